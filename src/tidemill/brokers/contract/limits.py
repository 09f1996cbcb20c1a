"""The part of the contract that sets and shows limits (``Feature.LIMITS``).

``exchange`` enforces limits. The step that leases a job takes a token of the job's limit. The step
that ends the lease frees the job's place in the limit.
"""

from __future__ import annotations

from typing import Protocol, cast

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.limits.arithmetic import Held, LimitStats


class LimitCalls(Protocol):
    """Calls of a broker that keeps limits."""

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        """Change a limit, or with ``queue`` the limit of a queue, from now on.

        ``declared`` settings come from the app's code, when a process starts. The store keeps these
        settings. They apply while nobody has set other settings by hand. ``terms=None`` without
        ``declared`` removes the settings set by hand. Then the last declared settings apply. A
        job's ``JobLimit`` declares its limit when the job is stored. The ``JobLimit`` of a
        schedule's job, or of a job from another store, declares its limit only if the limit is
        unknown. A ready job waits until its limit lets it start; it does not fail.
        """
        ...

    def limits(self) -> list[LimitStats]:
        """Every limit in numbers, by name, limits of queues first."""
        ...

    def held(self, job_id: str) -> Held | None:
        """The limit of a ready job; ``until`` is 0 while the limit lets the job start.

        A job may be under a limit of its own and under the limit of its queue. Then a closed limit
        goes before an open limit, and the limit of its own before the limit of the queue. None for
        a job without a limit.
        """
        ...


def declare_limit(broker: Broker, claim: JobLimit | None) -> None:
    """Declare a limit of the app's code to a broker, before a job declares the limit."""
    if claim is not None:
        with_limits(broker, "limit=").set_limit(claim.name, claim.terms, declared=True)


def with_limits(broker: Broker, option: str) -> LimitCalls:
    """The broker with its calls for limits. Raises FeatureMissing, which names ``option``."""
    need(broker, Feature.LIMITS, option)
    return cast(LimitCalls, broker)
