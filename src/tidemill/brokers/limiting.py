"""The part of the seam that is about limits, of the brokers that have ``Feature.LIMITS``.

Enforcing them is inside ``exchange``: a lease takes a token and its end frees a place, in the step
that makes the move. What is here changes and shows them.
"""

from __future__ import annotations

from typing import Protocol, cast

from tidemill.brokers.base import Broker, Feature, need
from tidemill.gate import Claim, Held, LimitStats, Terms

__all__ = ["GRACE", "Limiting", "declare_limit", "limiting"]

GRACE = 0.05
"""Seconds in which an owner that was left a place takes it; then whoever left it looks again."""


class Limiting(Protocol):
    """A broker that keeps limits.

    Jobs of one limit, or of one key of it, that wait in several queues are begun in the order of
    all jobs: priority, then age. Where an older one waits in a queue that the owner does not take
    from, and another owner sleeps for it, the place is left to that one, which is hinted; whoever
    left it may look again after ``GRACE``.
    """

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        """Have these terms hold for a limit, or for a queue, from now on.

        Terms that are ``declared``, as by code that starts, are noted, and hold unless others were
        set by hand, before or after; None, by hand, has those hold that were declared last. A job's
        ``Claim`` declares its limit when the job is stored; that of a schedule's job, or of one
        that comes from another store, only when the limit is not known. A ready job that may not
        start yet waits aside; it does not fail.
        """
        ...

    def limits(self) -> list[LimitStats]:
        """Every limit in numbers, by name, queues first."""
        ...

    def held(self, job_id: str) -> Held | None:
        """What keeps a ready job from starting now; None when no limit does."""
        ...


def declare_limit(broker: Broker, claim: Claim | None) -> None:
    """Have a broker know what code says of a limit, before a job does."""
    if claim is not None:
        limiting(broker, "limit=").set_limit(claim.name, claim.terms, declared=True)


def limiting(broker: Broker, option: str) -> Limiting:
    """The broker, as one that keeps limits.

    Raises:
        FeatureMissing: it does not; ``option`` names what was asked for.
    """
    need(broker, Feature.LIMITS, option)
    return cast(Limiting, broker)
