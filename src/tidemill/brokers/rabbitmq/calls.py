"""The calls outside the core: inspection and administration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.policies import ServerPolicies
from tidemill.brokers.rabbitmq.amqp.short_connection import short_connection
from tidemill.brokers.rabbitmq.base import ServerCalls, text_of
from tidemill.brokers.rabbitmq.inspect import describe
from tidemill.brokers.rabbitmq.policies import examine
from tidemill.brokers.rabbitmq.unsupported import refuse
from tidemill.core.job import State
from tidemill.core.owner import Command, Owner


class InspectionCalls(ServerCalls):
    """Calls that only read, as far as the server can answer them."""

    def was_here(self, job_id: str) -> bool:
        return False

    def stats(self) -> list[QueueStats]:
        """Ready jobs and consumers of each queue. The server knows no other counts."""
        self._check_open()
        self._consuming()
        queues, rows = self._all_queues(), []
        with short_connection(self._settings) as server:
            for queue in queues:
                counts = [server.count(place) for place in self._places(queue)]
                ready, consumers = sum(c[0] for c in counts), max(c[1] for c in counts)
                rows.append(QueueStats(name=queue, ready=ready, consumers=consumers))
        return rows

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        if what.states != {State.FAILED}:
            refuse("looking for jobs that have not failed (--state failed)", Feature.INSPECT)
        return self._failed.find(what, limit, cursor)

    def owners(self) -> list[Owner]:
        return [attached.owner for attached in list(self._owners.values())]

    def info(self) -> dict[str, Any]:
        self._check_open()
        self._out.await_up(self._settings.patience)
        server = {k: text_of(v) for k, v in self._out.server.items()}
        return describe(self._settings, self._names, server, self._out.blocked)

    def policies(self) -> ServerPolicies:
        """The policies and settings of the server that can destroy accepted jobs."""
        self._check_open()
        self._consuming()
        return examine(self._settings, self._names)


class AdminCalls(ServerCalls):
    """Calls that change jobs and queues."""

    def kick(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        self._check_open()
        return self._failed.kick(job_ids)

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        self._check_open()
        return self._failed.delete(job_ids)

    def purge(self, queue: str) -> int:
        """Delete the ready jobs of a queue, also jobs that the server pushed to this process.

        Delayed jobs are not deleted, since they share places with jobs of other queues. They arrive
        later.
        """
        self._check_open()
        owners = list(self._owners.values())
        for attached in owners:
            attached.put_back(queue, self._settings.patience)
        if owners:
            # The return of a message may write a new message.
            self._publisher.flush(self._settings.patience)
        try:
            with short_connection(self._settings) as server:
                return sum(server.purge(place) for place in self._places(queue))
        finally:
            for attached in owners:
                attached.wake_up.tell()  # a waiting owner may want jobs of the queue

    def forget_queue(self, queue: str) -> bool:
        refuse("deleting a queue (delayed jobs may be on their way to it)", Feature.INSPECT)

    def command(self, owner_id: str, command: Command) -> bool:
        return False
