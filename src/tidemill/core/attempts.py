"""The attempts at a job: the end of each, and the run that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["Attempt", "latest_error", "run_of", "was_held"]


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One attempt at a job, as the history shows it. Times are wall time, 0 where unknown.

    ``number`` counts the attempts of one run. A kick begins the next run, at attempt 1.
    """

    number: int
    worker: str
    leased: float
    started: float
    ended: float
    outcome: int
    error: str = ""
    traceback: str = ""
    run: int = 1


def run_of(attempts: Sequence[Attempt], number: int) -> int:
    """The run of attempt ``number``, which follows these attempts."""
    if not attempts:
        return 1
    last = attempts[-1]
    return last.run if number > last.number else last.run + 1


def latest_error(attempts: Sequence[Attempt]) -> str:
    """The error of the latest attempt; empty when there is no attempt."""
    return attempts[-1].error if attempts else ""


def was_held(attempts: Sequence[Attempt], leased: float) -> bool:
    """True when the attempt of a lease made at that time is recorded already (``Verdict.hold``)."""
    return bool(attempts) and attempts[-1].leased == leased
