"""``amqp://``: the broker of jobs in the queues of a RabbitMQ server.

This file has the core of the contract; :mod:`.calls` has all other calls. :mod:`.amqp` speaks the
protocol. :mod:`.put` publishes, :mod:`.claim` takes, and :mod:`.timekeeper` keeps delayed jobs.
:mod:`.queue_registry` knows the queues that exist, and :mod:`.layout` names all places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.rabbitmq.amqp.publish_channel import Outgoing
from tidemill.brokers.rabbitmq.base import FAREWELL, text_of
from tidemill.brokers.rabbitmq.calls import AdminCalls, InspectionCalls
from tidemill.brokers.rabbitmq.claim import AttachedOwner
from tidemill.brokers.rabbitmq.settings import check_url
from tidemill.brokers.rabbitmq.unsupported import check_job, refuse
from tidemill.core.clock import clock
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.errors import TidemillError
from tidemill.core.job import Placed, Put
from tidemill.core.owner import Owner

_TICK = 3600.0


_FEATURES = frozenset(
    (Feature.DURABLE, Feature.PROCESSES, Feature.DELAY, Feature.PRIORITY, Feature.FAILED)
)


def open_url(url: Url) -> RabbitBroker:
    """The broker of a URL."""
    return RabbitBroker(check_url(url))


class RabbitBroker(InspectionCalls, AdminCalls):
    """A broker on a RabbitMQ server."""

    features = _FEATURES

    @property
    def identity(self) -> str:
        """The name of this set of jobs: cluster, vhost and prefix, the same for every address."""
        self._check_open()
        self._out.await_up(self._settings.patience)
        cluster = text_of(self._out.server.get("cluster_name") or self._settings.where)
        return f"rabbitmq {cluster} {self._settings.vhost} {self._settings.prefix}"

    @property
    def boards(self) -> str:
        """No folder: only the worker itself would read its scoreboard."""
        return ""

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        self._check_open()
        if txn is not None:
            refuse("txn=", Feature.TRANSACTIONS)
        if hold or let_go:
            refuse("a group", Feature.FLOWS)
        if nonce:
            refuse("nonce=", Feature.REMOTE_OWNERS)
        if not jobs:
            return []
        now = clock.wall()
        items: list[Outgoing] = []
        for job in jobs:
            check_job(job)
            if job.expires and not job.created:
                job = msgspec.structs.replace(job, created=now)
            delay = max(job.delay, job.at - now if job.at else 0.0)
            items.append(self._writer.write_new(job, delay, now))
        self._put(jobs, items)
        return [Put(job.id, Placed.CREATED) for job in jobs]

    def attach(self, owner: Owner) -> None:
        self._check_open()
        if owner.lease:
            refuse("a lease", Feature.REMOTE_OWNERS)
        self.detach(owner.id)
        self._consuming()
        self._timekeeping.start()
        queues = self._all_queues() if owner.kind == "worker" and not owner.queues else None
        attached = self._owners[owner.id] = AttachedOwner(owner, self._context)
        if queues is not None:
            self._serve_all(attached, queues)

    def _serve_all(self, attached: AttachedOwner, queues: Sequence[str]) -> None:
        attached.serves_all = True
        for queue in queues:
            attached.serve(queue)
        self._registry.listen(attached.serve)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._let_go(owner_id, FAREWELL)

    def _attached(self, owner_id: str) -> AttachedOwner:
        self._check_open()
        attached = self._owners.get(owner_id)
        if attached is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return attached

    def exchange(self, step: Step) -> Reply:
        if step.want is not None and step.want.mode is Mode.MERGED:
            refuse("taking of several queues as if they were one", Feature.MERGED)
        attached = self._attached(step.owner)
        if step.want is not None and attached.owner.kind == "consumer":
            self._announcer.use(step.want.queues)
        if step.want is not None and not (step.want.queues or attached.serves_all):
            self._serve_all(attached, self._all_queues())
        return attached.exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return self._attached(owner_id).wait(timeout, fds)

    def wake(self, owner_id: str) -> None:
        attached = self._owners.get(owner_id)
        if attached is not None:
            attached.wake()

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Release nothing: the server returns a dead owner's messages when its connection ends."""
        return 0

    def tick(self) -> float:
        self._check_open()
        return _TICK

    def count_silence(self) -> float:
        return float("inf")  # RabbitMQ has no remote owners

    def wait_space(self, queue: str, timeout: float) -> bool:
        return True
