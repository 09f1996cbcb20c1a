"""The part of the contract that fills and empties a message broker (``Feature.DRAIN``).

A message broker only carries jobs and has no place for most of a job's record. tidemill cannot lock
a message broker, so other programs may put and take jobs while tidemill drains it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, cast

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.envelope import Envelope
from tidemill.core.job import Record


class Remains(msgspec.Struct, frozen=True):
    """The jobs that still lie in a broker, and the number of its consumers.

    ``unanswered`` names parts of the broker that do not answer; their content is unknown.
    """

    jobs: int
    consumers: int
    unanswered: list[str] = []


class Taken(msgspec.Struct):
    """Jobs taken out of a broker. The broker keeps each job until the caller reports it stored.

    Attributes:
        records: the jobs as the broker had them, without sequence numbers: ready, scheduled or
            failed.
        strange: names of messages that are not jobs. These messages stay in the broker.
        stored: for each record, whether the broker may forget it. Set this list before asking for
            the next piece. The broker does not return a forgotten job again.
        remains: in the last piece only, the jobs that arrived meanwhile.
    """

    records: list[Record]
    strange: list[str] = []
    stored: list[bool] = []
    remains: Remains | None = None


class CarriedJobs(Protocol):
    """All jobs that a message broker carries."""

    def unfit(self, job: Envelope) -> str:
        """The reason why the broker cannot carry a job; empty if the broker can.

        The text continues a sentence after the word "jobs".
        """
        ...

    def take(self) -> Iterator[Taken]:
        """Take all jobs out, in pieces: scheduled jobs, ready jobs, then failed jobs.

        The jobs of each state come in order, as far as the broker keeps an order. The broker looks
        a few times for jobs that other consumers held and gave back.

        Raises:
            BrokerUnavailable: the broker does not answer. Jobs not yet stored stay in the broker.
        """
        ...

    def remains(self) -> Remains:
        """The jobs and consumers that the broker has now."""
        ...


class _Carries(Protocol):
    def contents(self, queues: Collection[str]) -> CarriedJobs: ...


def carried_jobs(broker: Broker, queues: Collection[str] = ()) -> CarriedJobs:
    """The jobs that a broker carries, in these queues and in all queues that it knows.

    Raises:
        FeatureMissing: the broker is a store.
    """
    need(broker, Feature.DRAIN, "taking carried jobs out")
    return cast(_Carries, broker).contents(queues)
