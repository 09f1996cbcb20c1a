"""The attempts at a job, and the runs that the attempts belong to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One attempt at a job, as the history shows it. Times are epoch seconds, 0 where unknown.

    Attributes:
        number: the number of the attempt within its run, from 1.
        run: the number of the run, from 1. A retry by a person begins the next run.
        worker: the name of the worker.
        leased: when the worker got the job.
        started: when the task began.
        ended: when the task ended.
        outcome: the outcome in the worker's verdict, as a number. For ``Record.outcome_of``, a
            retry after the last attempt is a failure.
        error: the exception as one line, such as ``shop.errors.RateLimited: message``.
        traceback: the traceback as text.
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
    """The run of the next attempt, with this ``number``, after the given attempts."""
    if not attempts:
        return 1
    last = attempts[-1]
    return last.run if number > last.number else last.run + 1


def latest_error(attempts: Sequence[Attempt]) -> str:
    """The error of the latest attempt; empty when there is no attempt."""
    return attempts[-1].error if attempts else ""


def was_held(attempts: Sequence[Attempt], leased: float) -> bool:
    """True when the latest attempt belongs to the lease made at ``leased`` (``Verdict.hold``)."""
    return bool(attempts) and attempts[-1].leased == leased
