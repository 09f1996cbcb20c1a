"""The part of the seam that is about jobs of unknown tasks (``Feature.UNKNOWN``).

Setting jobs aside and bringing them back is inside ``exchange``. These requests show the jobs set
aside.
"""

from __future__ import annotations

from typing import Protocol, cast

import msgspec

from tidemill.brokers.base import Broker, Feature, need
from tidemill.job import Record, State

__all__ = ["COUNTED_MOST", "TOLD_MOST", "Unknown", "UnknownTask", "arriving", "setting_aside"]

TOLD_MOST = 1000
"""Names that one reply tells at most."""

COUNTED_MOST = 10_000
"""Jobs of one task that are counted at most."""


class UnknownTask(msgspec.Struct):
    """A task with jobs set aside. ``oldest`` is when the oldest of them was made, in wall time.

    ``count`` goes up to :data:`COUNTED_MOST`.
    """

    task: str
    queues: list[str]
    count: int
    oldest: float


class Unknown(Protocol):
    """A broker that sets jobs of unknown tasks aside."""

    def unknown_tasks(self) -> list[UnknownTask]:
        """The tasks that have jobs set aside, by name."""
        ...


def setting_aside(broker: Broker, option: str) -> Unknown:
    """The broker, as one that sets jobs of unknown tasks aside.

    Raises:
        FeatureMissing: it does not; ``option`` names what was asked for.
    """
    need(broker, Feature.UNKNOWN, option)
    return cast(Unknown, broker)


def arriving(record: Record) -> Record:
    """A record as it arrives in another store: a job that was set aside is ready there."""
    if not record.unknown:
        return record
    return msgspec.structs.replace(record, state=State.READY, due=0.0, error="", unknown=False)
