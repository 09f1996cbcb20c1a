"""What a check finds, and one look at a store for all checks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.contract.limits import with_limits
from tidemill.client.explain import serving
from tidemill.client.reading import users_queues
from tidemill.core.job import Owner
from tidemill.doctor.held import Held, held_jobs
from tidemill.limits.arithmetic import LimitStats

__all__ = ["Finding", "Seen"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report.

    Attributes:
        check: the name of the check.
        status: ``ok``, ``warn`` or ``fail``.
        message: a sentence, which begins with a small letter.
        advice: the remedy.
        queue: the queue that the finding is about; empty for none.
        note: a few words about that queue, for a table of queues.
        task, schedule: the task or the schedule that the finding is about; empty for none.
    """

    check: str
    status: str
    message: str
    advice: str = ""
    queue: str = ""
    note: str = ""
    task: str = ""
    schedule: str = ""


class Seen:
    """One look at a store. Each fact is read once, when the first check needs it."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self.broker = mill.broker

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """The facts of the store."""
        return self.broker.info()

    @functools.cached_property
    def queues(self) -> list[QueueStats]:
        """The queues of users in numbers."""
        return users_queues(self.broker.stats())

    @functools.cached_property
    def owners(self) -> list[Owner]:
        """The workers and consumers."""
        return self.broker.owners()

    @property
    def workers(self) -> list[Owner]:
        """The owners that run jobs."""
        return [owner for owner in self.owners if owner.kind == "worker"]

    @functools.cached_property
    def held(self) -> Held:
        """The leased jobs."""
        return held_jobs(self.broker, self.owners, self.queues)

    @functools.cached_property
    def limits(self) -> list[LimitStats]:
        """The limits in numbers."""
        return with_limits(self.broker, "limits").limits()

    def serving(self, queue: str) -> Sequence[Owner]:
        """The workers that take jobs of a queue."""
        return serving(self.owners, queue)

    def consuming(self, queue: str) -> Sequence[Owner]:
        """The consumers that take messages of a queue."""
        takers = (owner for owner in self.owners if owner.kind == "consumer")
        return [owner for owner in takers if not owner.queues or queue in owner.queues]
