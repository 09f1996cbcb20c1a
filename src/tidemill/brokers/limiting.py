"""The part of the seam that is about limits, of the brokers that have ``Feature.LIMITS``.

Enforcing them is inside ``exchange``: a lease takes a token and its end frees a place, in the step
that makes the move. What is here changes and shows them.
"""

from __future__ import annotations

from typing import Protocol, cast

from tidemill.brokers.base import Broker, Feature, need
from tidemill.gate import Held, LimitStats, Terms

__all__ = ["Limiting", "limiting"]


class Limiting(Protocol):
    """A broker that keeps limits."""

    def set_limit(
        self, name: str, terms: Terms, *, queue: bool = False, declared: bool = False
    ) -> None:
        """Have these terms hold for a limit, or for a queue, from now on.

        Terms that are ``declared``, as by code that starts, change nothing if the same were
        declared before: what was set since stays. A job's ``Claim`` declares its limit when the job
        is stored. A ready job that may not start yet waits aside; it does not fail.
        """
        ...

    def limits(self) -> list[LimitStats]:
        """Every limit in numbers, by name, queues first."""
        ...

    def held(self, job_id: str) -> Held | None:
        """What keeps a ready job from starting now; None when no limit does."""
        ...


def limiting(broker: Broker, option: str) -> Limiting:
    """The broker, as one that keeps limits.

    Raises:
        FeatureMissing: it does not; ``option`` names what was asked for.
    """
    need(broker, Feature.LIMITS, option)
    return cast(Limiting, broker)
