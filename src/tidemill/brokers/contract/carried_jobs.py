"""The part of the contract that fills and empties a message broker (``Feature.DRAIN``).

A message broker only carries jobs and has no place for most of a job's record. It cannot be closed
to others, so other programs may put and take jobs while tidemill drains it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, cast

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.job import Envelope, Record

__all__ = ["CarriedJobs", "Remains", "Taken", "carried_jobs"]


class Remains(msgspec.Struct, frozen=True):
    """The jobs that still lie in a broker, and the number of its consumers.

    ``unanswered`` names parts of the broker that do not answer; their content is unknown.
    """

    jobs: int
    consumers: int
    unanswered: list[str] = []


class Taken(msgspec.Struct):
    """Jobs taken out of a broker. The broker keeps each one until the caller says it is stored.

    Attributes:
        records: the jobs as they stood there, without numbers: ready, scheduled or failed.
        strange: names of messages that are not jobs; they stay in the broker.
        stored: for each record, whether the broker may forget it. Set this list before asking for
            the next piece. The broker does not bring a forgotten job again.
        remains: in the last piece only, the jobs that arrived meanwhile.
    """

    records: list[Record]
    strange: list[str] = []
    stored: list[bool] = []
    remains: Remains | None = None


class CarriedJobs(Protocol):
    """All jobs that a message broker carries."""

    def unfit(self, job: Envelope) -> str:
        """The reason the broker cannot carry a job, to stand behind "jobs"; empty if it can."""
        ...

    def take(self) -> Iterator[Taken]:
        """Take all jobs out, in pieces: scheduled jobs, ready jobs, then failed jobs.

        The jobs of each state come in order, as far as there is one. Jobs that other consumers
        held and gave back meanwhile are looked for several times, but not for ever.

        Raises:
            BrokerUnavailable: the broker does not answer; jobs not yet stored stay in it.
        """
        ...

    def remains(self) -> Remains:
        """The jobs and consumers of this moment."""
        ...


class _Carries(Protocol):
    def contents(self, queues: Collection[str]) -> CarriedJobs: ...


def carried_jobs(broker: Broker, queues: Collection[str] = ()) -> CarriedJobs:
    """The jobs that a broker carries, in these queues and in all queues that it knows.

    Raises:
        FeatureMissing: the broker is a store.
    """
    need(broker, Feature.DRAIN, "taking out what is carried")
    return cast(_Carries, broker).contents(queues)
