"""The part of the seam that is about brokers with ``Feature.DRAIN``, when jobs go there or leave.

Such a broker only carries jobs. It has no place for all that a store knows of one; and it cannot be
closed, so whoever knows it may put jobs there, and take them, while it is drained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol, cast

import msgspec

from tidemill.brokers.base import Broker, Feature, need
from tidemill.job import Envelope, Record

__all__ = ["Contents", "Remains", "Taken", "draining"]


class Remains(msgspec.Struct, frozen=True):
    """What is in a broker: jobs that nobody holds, and who asks for them.

    ``unanswered`` names places of it that do not answer: nobody knows what lies there.
    """

    jobs: int
    consumers: int
    unanswered: list[str] = []


class Taken(msgspec.Struct):
    """Jobs that were taken out of a broker. It has them back unless somebody says they are stored.

    Attributes:
        records: as they stood there, without numbers; ready, scheduled or failed.
        strange: names of messages that are no jobs; they stay.
        stored: of each record, whether the broker may forget it. To be set before the next is
            asked for; what it has forgotten then, it will not bring again.
        remains: in the last of all, what else there is: it came meanwhile.
    """

    records: list[Record]
    strange: list[str] = []
    stored: list[bool] = []
    remains: Remains | None = None


class Contents(Protocol):
    """All that a broker carries."""

    def unfit(self, job: Envelope) -> str:
        """Why it cannot carry a job, as words to put behind "jobs"; empty when it can."""
        ...

    def take(self) -> Iterator[Taken]:
        """Take everything out, in pieces: what is scheduled, what is ready, then what has failed.

        Of each kind in its order, as far as there is one. What others hold, and put there again
        meanwhile, is looked for several times, but not for ever.

        Raises:
            BrokerUnavailable: it is away; what nobody has stored is there again.
        """
        ...

    def remains(self) -> Remains:
        """What there is just now."""
        ...


class _Draining(Protocol):
    def contents(self, queues: Collection[str]) -> Contents: ...


def draining(broker: Broker, queues: Collection[str] = ()) -> Contents:
    """What a broker carries, of all queues it has heard of and of these.

    Raises:
        FeatureMissing: it is a store.
    """
    need(broker, Feature.DRAIN, "taking out what is carried")
    return cast(_Draining, broker).contents(queues)
