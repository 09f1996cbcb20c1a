"""What a check finds, and one look at a store for all checks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.brokers.contract.job_numbers import with_job_numbers
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.store import Store
from tidemill.client.explain import serving
from tidemill.client.search import users_queues
from tidemill.core.job import Owner, State
from tidemill.doctor.held import Held, held_jobs
from tidemill.limits.arithmetic import LimitStats

_SAMPLE = 50


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report.

    Attributes:
        status: ``ok``, ``warn`` or ``fail``.
        message: a sentence, which begins with a small letter.
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
        return self.broker.info()

    @functools.cached_property
    def queues(self) -> list[QueueStats]:
        return users_queues(self.broker.stats())

    @functools.cached_property
    def owners(self) -> list[Owner]:
        return self.broker.owners()

    @property
    def workers(self) -> list[Owner]:
        return [owner for owner in self.owners if owner.kind == "worker"]

    @functools.cached_property
    def unserved(self) -> frozenset[str]:
        """The queues that have ready jobs of tasks, and no worker."""
        rows = (row for row in self.queues if row.ready and not self.serving(row.name))
        return frozenset(row.name for row in rows if has_tasks(self.broker, row.name))

    @property
    def is_unserved(self) -> bool:
        """True when no worker is alive and several queues need one: one finding for all."""
        return len(self.unserved) > 1 and not self.workers

    @functools.cached_property
    def held(self) -> Held:
        return held_jobs(self.broker, self.owners, self.queues)

    @functools.cached_property
    def limits(self) -> list[LimitStats]:
        return with_limits(self.broker, "limits").limits()

    def serving(self, queue: str) -> Sequence[Owner]:
        return serving(self.owners, queue)

    def consuming(self, queue: str) -> Sequence[Owner]:
        takers = (owner for owner in self.owners if owner.kind == "consumer")
        return [owner for owner in takers if not owner.queues or queue in owner.queues]


def has_tasks(broker: Store, queue: str) -> bool:
    """True when a sample of the queue's ready jobs has a job of a task, not only messages."""
    if Feature.NAMED in broker.features:
        head = with_job_numbers(broker, "doctor").head(queue, State.READY, _SAMPLE)
        return any(not record.envelope.is_message for record in head)
    ready = Filter(states=frozenset({State.READY}), queue=queue)
    return any(not r.envelope.is_message for r in broker.find(ready, _SAMPLE).records)
