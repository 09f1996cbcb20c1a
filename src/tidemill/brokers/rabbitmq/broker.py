"""``amqp://``: the broker of jobs in the queues of a RabbitMQ server.

:mod:`.amqp` speaks the protocol. :mod:`.put` publishes, :mod:`.claim` takes, and :mod:`.timekeeper`
keeps delayed jobs. :mod:`.queue_registry` knows the queues that exist, and :mod:`.layout` names all
places. The server cannot answer some calls of the contract: their errors name the missing feature.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, ServerPolicies
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread, OutageLog
from tidemill.brokers.rabbitmq.amqp.short_connection import short_connection
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.claim import AttachedOwner, OwnerContext
from tidemill.brokers.rabbitmq.dead_letter import DeadLetters
from tidemill.brokers.rabbitmq.layout import LEVELS, Names, Place
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.policies import examine
from tidemill.brokers.rabbitmq.put import Outgoing, Publisher
from tidemill.brokers.rabbitmq.queue_registry import Announcer, Registry
from tidemill.brokers.rabbitmq.settings import Settings, check_url
from tidemill.brokers.rabbitmq.timekeeper import Timekeeper
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.core.clock import clock
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.forks import check_fork
from tidemill.core.job import Owner, Placed, Put, State
from tidemill.core.locks import Lock
from tidemill.errors import TidemillError

_PUBLISHERS_BEAT = 600
"""Seconds between heartbeats of the connection that only publishes. Its process may run tasks,
which may hold the interpreter lock for minutes. No lease depends on this connection."""

_FAREWELL = 5.0  # seconds that a closing broker waits for the work under way

_TICK = 3600.0


def open_url(url: Url) -> RabbitBroker:
    return RabbitBroker(check_url(url))


def _refuse(what: str, feature: Feature) -> NoReturn:
    """Raise the error that names the call and the missing feature."""
    raise lacks("amqp://", feature, what)


def _refused(what: str, feature: Feature) -> Any:
    """A call of the contract that the server cannot answer."""

    def call(self: RabbitBroker, *args: Any, **options: Any) -> NoReturn:
        _refuse(what, feature)

    return call


def _always(answer: Any) -> Any:
    """A call of the contract that has the same answer at any time."""
    return lambda self, *args, **options: answer


def _check_job(job: Envelope) -> None:
    """Refuse a job that needs a feature that the server lacks."""
    if job.key:
        _refuse("key=", Feature.KEYS)
    if job.limit is not None:
        _refuse("limit=", Feature.LIMITS)
    if job.links is not None:
        _refuse("a chain, a group, a flow or a hook", Feature.FLOWS)


class RabbitBroker:
    """A broker on a RabbitMQ server: its connections, its owners and its publisher."""

    features = frozenset(
        (Feature.DURABLE, Feature.PROCESSES, Feature.DELAY, Feature.PRIORITY, Feature.FAILED)
    )
    boards = ""  # no folder: only the worker itself would read its scoreboard

    def __init__(self, settings: Settings) -> None:
        self.url = settings.shown
        self._settings = settings
        self._closed = False
        self._inherited = False  # True when connections and owners belong to a parent process
        self._lock = Lock()
        settings.parameters(_PUBLISHERS_BEAT)  # check now: raises if a TLS file cannot be used
        self._begin()
        try:
            self._out.await_up(settings.patience)
        except BaseException:
            self.close()
            raise
        tell_of_forks(self)
        _open.add(self)

    def _begin(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        settings = self._settings
        self._names = Names(settings.prefix, settings.classic)
        outages, beat = OutageLog(settings.where), max(1, round(settings.owner_lease / 2))
        self._out = ConnectionThread(settings, "publisher", _PUBLISHERS_BEAT, outages)
        self._in = ConnectionThread(settings, "consumer", beat, outages)
        self._names_thread = ConnectionThread(settings, "names", beat)
        self._writer = Writer(self._names)
        self._publisher = Publisher(self._out, self._names.failed, self._writer.notice)
        self._out.add(self._publisher)
        declarer = Declarer(self._names_thread, self._in, self._names.failed)
        self._failed = DeadLetters(settings, self._writer, self._publish, self._make_known)
        self._registry = Registry(self._names_thread, declarer, self._names)
        self._announcer = Announcer(self._out, self._publisher, self._registry, self._served)
        parts = self._in, declarer, self._publisher, self._names, self._writer
        next_token = itertools.count(1).__next__
        self._context = OwnerContext(*parts, next_token, self._announcer.entries)
        self._owners: dict[str, AttachedOwner] = {}
        self._new_keeper = lambda: Timekeeper(*parts)
        self._keeper: Timekeeper | None = None  # runs while the process has owners

    def after_fork_child(self) -> None:
        """In a forked child: close the copies of the parent's connections and owners."""
        # The child connects at its first call. Many children never make a call.
        if not (self._closed or self._inherited):
            for attached in list(self._owners.values()):
                attached.wake_up.after_fork_child()
            for thread in (self._out, self._in, self._names_thread):
                thread.after_fork_child()
            self._owners = {}
            self._inherited = True
        self._lock = Lock()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        with self._lock:
            if self._inherited:
                self._begin()
                self._inherited = False

    @property
    def identity(self) -> str:
        """The name of this set of jobs: cluster, vhost and prefix, the same for every address."""
        cluster = self._server().get("cluster_name") or self._settings.where
        return f"rabbitmq {cluster} {self._settings.vhost} {self._settings.prefix}"

    def _server(self) -> dict[str, str]:
        """The properties of the server, as text."""
        self._check_open()
        self._out.await_up(self._settings.patience)
        return {
            name: value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            for name, value in self._out.server.items()
        }

    def flush(self) -> None:
        """Sleep until the server has all verdicts, for a few seconds at most."""
        if not (self._closed or self._inherited):
            until = time.monotonic() + _FAREWELL
            self._stop_keeper(_FAREWELL)
            # First replacements, then acknowledgements of the messages they replace.
            self._publisher.flush(_FAREWELL)
            for attached in list(self._owners.values()):
                attached.flush(max(0.1, until - time.monotonic()))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            until = time.monotonic() + _FAREWELL
            for owner_id in list(self._owners):
                self._let_go(owner_id, max(0.1, until - time.monotonic()))
            if not self._inherited:
                self._stop_keeper(max(0.1, until - time.monotonic()))
                self._publisher.close()
                for thread in (self._names_thread, self._in, self._out):
                    thread.close()

    # -- putting --------------------------------------------------------------------------------

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
            _refuse("txn=", Feature.TRANSACTIONS)
        if hold or let_go:
            _refuse("a group", Feature.FLOWS)
        if nonce:
            _refuse("nonce=", Feature.REMOTE_OWNERS)
        if not jobs:
            return []
        now = clock.wall()
        items: list[Outgoing] = []
        for job in jobs:
            _check_job(job)
            if job.expires and not job.created:
                job = msgspec.structs.replace(job, created=now)
            delay = max(job.delay, job.at - now if job.at else 0.0)
            items.append(self._writer.write_new(job, delay, now))
        began = time.monotonic()  # the announcement and the jobs have one patience
        self._make_known([job.queue for job in jobs], began)
        self._publisher.put(items, self._settings.patience, began=began)
        return [Put(job.id, Placed.CREATED) for job in jobs]

    wait_space = _always(True)

    def _make_known(self, queues: Iterable[str], began: float = 0.0) -> None:
        self._announcer.make_known(queues, self._settings.patience, began or time.monotonic())

    def _publish(self, items: Sequence[Outgoing]) -> None:
        self._publisher.put(items, self._settings.patience)

    # -- owners ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._check_open()
        if owner.lease:
            _refuse("a lease", Feature.REMOTE_OWNERS)
        self.detach(owner.id)
        self._in.await_up(self._settings.patience)
        with self._lock:
            self._keeper = self._keeper or self._new_keeper()
        queues = self._all_queues() if owner.kind == "worker" and not owner.queues else None
        attached = self._owners[owner.id] = AttachedOwner(owner, self._context)
        if queues is not None:
            self._serve_all(attached, queues)

    def _serve_all(self, attached: AttachedOwner, queues: Sequence[str]) -> None:
        attached.serves_all = True
        for queue in queues:
            attached.serve(queue)
        self._registry.listen(attached.serve)

    def _served(self) -> Iterator[str]:
        """The queues from which this process's owners take."""
        for attached in list(self._owners.values()):
            yield from self._registry.known() if attached.serves_all else attached.owner.queues

    def _all_queues(self) -> list[str]:
        return self._registry.read_all(lambda item: self._publish([item]), self._settings.patience)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._let_go(owner_id, _FAREWELL)

    def _let_go(self, owner_id: str, patience: float) -> None:
        attached = self._owners.pop(owner_id, None)
        if attached is not None:
            self._registry.unlisten(attached.serve)
            attached.close(patience)
            if not self._owners:
                self._stop_keeper(patience)

    def _stop_keeper(self, patience: float) -> None:
        with self._lock:
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close(patience)

    def _attached(self, owner_id: str) -> AttachedOwner:
        self._check_open()
        attached = self._owners.get(owner_id)
        if attached is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return attached

    def exchange(self, step: Step) -> Reply:
        if step.want is not None and step.want.mode is Mode.MERGED:
            _refuse("taking of several queues as if they were one", Feature.MERGED)
        attached = self._attached(step.owner)
        if step.want is not None and attached.owner.kind == "consumer":
            self._announcer.use(step.want.queues)
        if step.want is not None and not (step.want.queues or attached.serves_all):
            self._serve_all(attached, self._all_queues())
        return attached.exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return self._attached(owner_id).wake_up.sleep(timeout, fds)

    def wake(self, owner_id: str) -> None:
        attached = self._owners.get(owner_id)
        if attached is not None:
            attached.wake_up.wake()

    release = _always(0)  # the server returns a dead owner's messages when its connection ends
    count_silence = _always(float("inf"))  # RabbitMQ has no remote owners
    command = _always(False)

    def tick(self) -> float:
        self._check_open()
        return _TICK

    def owners(self) -> list[Owner]:
        return [attached.owner for attached in list(self._owners.values())]

    # -- looking --------------------------------------------------------------------------------

    was_here = _always(False)

    def stats(self) -> list[QueueStats]:
        """Ready jobs and consumers of each queue. The server knows no other counts."""
        self._check_open()
        queues, rows = self._all_queues(), []
        with short_connection(self._settings) as server:
            for queue in queues:
                counts = [server.count(place) for place in self._places(queue)]
                ready, consumers = sum(c[0] for c in counts), max(c[1] for c in counts)
                rows.append(QueueStats(name=queue, ready=ready, consumers=consumers))
        return rows

    def _places(self, queue: str) -> list[Place]:
        return [p for kind in ("tasks", "messages") for p in self._names.of(queue, kind)]

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        if what.states != {State.FAILED}:
            _refuse("looking for jobs that have not failed (--state failed)", Feature.INSPECT)
        return self._failed.find(what, limit, cursor)

    def info(self) -> dict[str, Any]:
        server, settings = self._server(), self._settings
        with short_connection(settings) as there:
            delayed = sum(there.count(self._names.timer(level))[0] for level in range(LEVELS))
            failed, _ = there.count(self._names.failed)
        blocked = self._out.blocked
        return {
            "broker": "rabbitmq",
            "url": settings.shown,
            "server": f"{server.get('product', 'unknown')} {server.get('version', '')}".strip(),
            "cluster": server.get("cluster_name", ""),
            "queues": "classic" if settings.classic else "quorum",
            "prefix": settings.prefix,
            "durable": True,
            "durability": "accepted jobs survive power loss: only what is synced is confirmed",
            "delayed": delayed,
            "failed": failed,
            "publishing": f"blocked: {blocked}" if blocked else "open",
        }

    def policies(self) -> ServerPolicies:
        """The policies and settings of the server that can destroy accepted jobs."""
        self._check_open()
        return examine(self._settings, self._names)

    # -- changing -------------------------------------------------------------------------------

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        self._check_open()
        return self._failed.retry(job_ids)

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        self._check_open()
        return self._failed.delete(job_ids)

    def purge(self, queue: str) -> int:
        """Delete the ready jobs of a queue, also jobs that the server pushed to this process."""
        # Delayed jobs are not deleted, since they share places with jobs of other queues. They
        # arrive later.
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

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        if paused is not None:
            _refuse("pause", Feature.PAUSE)
        _refuse("max_size=", Feature.MAX_SIZE)

    wait_for = _refused("waiting for a job", Feature.RESULTS)
    get = _refused("looking at a job", Feature.INSPECT)
    ahead = _refused("looking at a job", Feature.INSPECT)
    cancel = _refused("cancel", Feature.CANCEL)
    alter = _refused("alter", Feature.ALTER)
    forget_queue = _refused(
        "deleting a queue (delayed jobs may be on their way to it)", Feature.INSPECT
    )
    backup = _refused("backup", Feature.BACKUP)
    wall = _refused("a schedule", Feature.SCHEDULES)
    schedules = _refused("a schedule", Feature.SCHEDULES)
    list_schedules = _refused("a schedule", Feature.SCHEDULES)
    change_schedules = _refused("a schedule", Feature.SCHEDULES)
    depart = _refused("move", Feature.MOVE)
    stay = _refused("move", Feature.MOVE)
    adopt = _refused("move", Feature.MOVE)
    adopted = _refused("move", Feature.MOVE)


_open: weakref.WeakSet[RabbitBroker] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Flush the brokers of a process that ends without closing them."""
    # A connection thread writes acknowledgements, and the interpreter does not wait for this
    # thread. Without a flush, the server would deliver again the messages that the process
    # acknowledged last.
    check_fork()  # the parent flushes its own
    for broker in list(_open):
        # If the server is away, it delivers the messages again.
        with contextlib.suppress(Exception):
            broker.flush()
