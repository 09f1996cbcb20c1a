"""The part of the seam that is about jobs by name, of the brokers that have ``Feature.NAMED``.

A protocol whose jobs have numbers needs it, and whoever looks at what is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from tidemill.brokers.base import Broker, Feature, need
from tidemill.job import Lease, Record, State

__all__ = ["HEAD_STATES", "Naming", "naming"]

HEAD_STATES = (State.READY, State.SCHEDULED, State.FAILED)
"""States whose jobs are kept in an order that can be looked into from its beginning."""


class Naming(Protocol):
    """A broker that leases a job by its id, and knows what is first."""

    def numbers(self, count: int) -> int:
        """Reserve so many numbers in a row that nobody else gets; the first. They begin with 1.

        Those of a call that was repeated since its reply was lost are lost with it.
        """
        ...

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        """The first jobs of a queue that are ready, scheduled or have failed, in order.

        That is the order in which they are leased, come due, or ended. Of those that are ready and
        wait for a limit by name only the next of each key is among them, and none that is carried.
        """
        ...

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        """Lease jobs to a consumer: those of them that are ready, are scheduled, or have failed.

        What was scheduled or has failed becomes ready in the same step, as ``kick`` has it. Pauses
        and the limits of queues do not hold for it; a job that has a limit of its own, or lies with
        the carrier, is not leased so.
        """
        ...


def naming(broker: Broker, option: str) -> Naming:
    """The broker, as one that leases by name.

    Raises:
        FeatureMissing: it does not; ``option`` names what was asked for.
    """
    need(broker, Feature.NAMED, option)
    return cast(Naming, broker)
