"""The part of the contract that shows jobs of unknown tasks (``Feature.UNKNOWN``).

A worker that does not know the task of a job hands in the verdict ``Outcome.UNKNOWN``. ``exchange``
then sets the job aside: the job waits for a worker that knows its task.
"""

from __future__ import annotations

from typing import Protocol, cast

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.job import Record, State

MOST_NAMED = 1000
"""The most task names in one reply."""

MOST_COUNTED = 10_000
"""The number at which the count of one task's jobs stops."""


class UnknownTask(msgspec.Struct):
    """A task with jobs set aside.

    Attributes:
        count: the number of its jobs, up to :data:`MOST_COUNTED`.
        oldest: the wall time at which the oldest of its jobs was made.
    """

    task: str
    queues: list[str]
    count: int
    oldest: float


class UnknownTasks(Protocol):
    """A broker that sets jobs of unknown tasks aside."""

    def unknown_tasks(self) -> list[UnknownTask]:
        """The tasks that have jobs set aside, by name."""
        ...


def with_unknown_tasks(broker: Broker, option: str) -> UnknownTasks:
    """The broker with its call for unknown tasks.

    Raises:
        FeatureMissing: the broker sets no jobs aside; the error names ``option``.
    """
    need(broker, Feature.UNKNOWN, option)
    return cast(UnknownTasks, broker)


def as_adopted(record: Record) -> Record:
    """The record for another store: a job that was set aside arrives as a ready job."""
    if not record.unknown:
        return record
    return msgspec.structs.replace(record, state=State.READY, due=0.0, error="", unknown=False)
