"""``amqp://``: the broker of jobs that lie in the queues of a RabbitMQ server.

This file turns each call of the seam into what the rooms beside it do: :mod:`.line` keeps the
connections up, :mod:`.publisher` publishes, :mod:`.intake` takes, :mod:`.delays` is how the server
keeps what is not due, :mod:`.registry` which queues there are, :mod:`.names` what lies where.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.base import (
    Departure,
    Feature,
    Filter,
    Mode,
    Page,
    QueueStats,
    Reply,
    Step,
)
from tidemill.brokers.draining import Contents
from tidemill.brokers.forks import tell_of_forks
from tidemill.brokers.policing import Policed
from tidemill.brokers.rabbitmq.announcer import Announcer
from tidemill.brokers.rabbitmq.arriving import arrivals, cursor_message, read_cursor
from tidemill.brokers.rabbitmq.declaring import Declarer
from tidemill.brokers.rabbitmq.delays import Clockwork
from tidemill.brokers.rabbitmq.describing import describe
from tidemill.brokers.rabbitmq.desk import Desk
from tidemill.brokers.rabbitmq.failed import Failed
from tidemill.brokers.rabbitmq.farewell import flush_at_exit
from tidemill.brokers.rabbitmq.intake import Intake
from tidemill.brokers.rabbitmq.lacking import Lacking, check_job, refuse
from tidemill.brokers.rabbitmq.leaving import Leaving
from tidemill.brokers.rabbitmq.line import Line, Voice
from tidemill.brokers.rabbitmq.message import Carried, Writer
from tidemill.brokers.rabbitmq.names import Names, Place
from tidemill.brokers.rabbitmq.policies import examine
from tidemill.brokers.rabbitmq.publisher import Outgoing, Publisher
from tidemill.brokers.rabbitmq.registry import Registry
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.timekeeper import Timekeeper, Timekeeping
from tidemill.brokers.rabbitmq.timer_queues import TimerQueues, by_workers
from tidemill.brokers.rabbitmq.visit import visit
from tidemill.brokers.schedules import Schedule
from tidemill.clock import machine_time, wall_time
from tidemill.errors import TidemillError
from tidemill.job import Command, Envelope, Owner, Placed, Put, Record, State, encode_envelope
from tidemill.locks import Lock

__all__ = ["RabbitBroker"]

_TICK = 3600.0

_PUBLISHERS_BEAT = 600
"""Seconds: heartbeats of a line that only publishes. It may be that of a process that runs tasks,
and one of those may hold the interpreter lock for minutes; nothing hangs on the line meanwhile."""

_FAREWELL = 5.0
"""Seconds for what is under way when a broker is closed."""

_FEATURES = frozenset(
    {
        *(Feature.DURABLE, Feature.PROCESSES, Feature.DELAY, Feature.PRIORITY, Feature.FAILED),
        Feature.DRAIN,
    }
)


class RabbitBroker(Lacking):
    """A broker on a RabbitMQ server."""

    features = _FEATURES

    def __init__(self, settings: Settings) -> None:
        self.url = settings.shown
        self._settings = settings
        self._closed = False
        self._inherited = False  # lines and owners are those of a parent
        self._version = ""  # of the server, when we last heard of it
        self._lock = Lock()
        settings.parameters(_PUBLISHERS_BEAT)  # what is wrong with its files is said at once
        self._begin()
        try:
            self._out.await_up(settings.patience)
        except BaseException:
            self.close()
            raise
        tell_of_forks(self)
        flush_at_exit(self)

    def _begin(self) -> None:
        """Begin in this process, which may be a fork of the one that opened the broker."""
        settings = self._settings
        self._names = Names(settings.prefix, settings.classic)
        clockwork = Clockwork(settings.prefix)
        voice, beat = Voice(settings.where), max(1, round(settings.owner_lease / 2))
        self._out = Line(settings, "publisher", _PUBLISHERS_BEAT, voice)
        self._in = Line(settings, "consumer", beat, voice)
        self._names_line = Line(settings, "names", beat)
        self._declarer = Declarer(clockwork, self._names.failed)
        notice = TimerQueues(self._names).notice
        self._publisher = Publisher(self._out, self._declarer, notice)
        for user in (self._declarer, self._publisher):
            self._out.add(user)
        consumers = self._in_declarer = Declarer(clockwork, self._names.failed)
        self._joined = False
        self._writer = Writer(self._names, clockwork, self._workers_keep_time)
        self._failed = Failed(settings, self._writer, self._publish, self._make_known)
        self._registry = Registry(self._names_line, clockwork, self._names)
        shared = self._publisher, self._names, self._writer, itertools.count(1).__next__
        self._announcer = Announcer(self._out, self._publisher, self._registry, self._served)
        self._out.add(self._announcer)
        self._desk = Desk(self._in, consumers, *shared, self._announcer.entries)
        self._intakes: dict[str, Intake] = {}
        parts = self._in, consumers, self._publisher, self._names, self._writer
        self._timekeeping = Timekeeping(lambda: Timekeeper(*parts))

    def after_fork_child(self) -> None:
        """In a forked child: lines and owners are the parent's; close our copies.

        It has lines of its own when it first does something: many a child never does.
        """
        if not (self._closed or self._inherited):
            for intake in self._intakes.values():
                intake.after_fork_child()
            for line in (self._out, self._in, self._names_line):
                line.after_fork_child()
            self._intakes = {}
            self._inherited = True
        self._lock = Lock()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        with self._lock:
            if self._inherited:
                self._begin()
                self._inherited = False

    def _consuming(self) -> Line:
        """The line by which messages are taken, up."""
        with self._lock:
            if not self._joined:
                self._joined = True
                self._in.add(self._in_declarer)
        self._in.await_up(self._settings.patience)
        return self._in

    def _workers_keep_time(self) -> bool:
        """Whether workers keep the time of delayed jobs, or the server."""
        self._version = _text(self._out.server.get("version", "")) or self._version
        return by_workers(self._settings, self._version)

    @property
    def identity(self) -> str:
        """What tells what lies here from all else, by whatever address: its cluster's name."""
        self._check_open()
        self._out.await_up(self._settings.patience)
        cluster = _text(self._out.server.get("cluster_name") or self._settings.where)
        return f"rabbitmq {cluster} {self._settings.vhost} {self._settings.prefix}"

    @property
    def boards(self) -> str:
        """None: nobody but the worker itself would read its board."""
        return ""

    # -- producing ------------------------------------------------------------------------------

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
            refuse("nonce=", Feature.ELSEWHERE)
        if not jobs:
            return []
        now = wall_time()
        items: list[Outgoing] = []
        for job in jobs:
            check_job(job)
            if job.expires and not job.created:
                job = msgspec.structs.replace(job, created=now)
            delay = max(job.delay, job.at - now if job.at else 0.0)
            items.append(self._writer.write_new(job, delay, now))
        self._make_known([job.queue for job in jobs])
        self._publish(items)
        return [Put(job.id, Placed.CREATED) for job in jobs]

    def carry(self, jobs: Sequence[Envelope], alone: Collection[str]) -> None:
        """Publish jobs; those whose ids are in ``alone`` are brought one at a time."""
        self._check_open()
        known = [Carried(job, encode_envelope(job), losses=job.id in alone) for job in jobs]
        items = [self._writer.write(job) for job in known]  # or refused, before it is made known
        self._make_known([job.queue for job in jobs])
        self._publisher.put(items, self._settings.patience, once=True)

    def _make_known(self, queues: Iterable[str]) -> None:
        self._announcer.make_known(queues, self._settings.patience)

    def _publish(self, items: Sequence[Outgoing]) -> None:
        self._publisher.put(items, self._settings.patience)

    def _served(self) -> Iterator[str]:
        """The queues that our owners take from."""
        for intake in list(self._intakes.values()):
            yield from self._registry.known() if intake.serves_all else intake.owner.queues

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._check_open()
        if owner.lease:
            refuse("a lease", Feature.ELSEWHERE)
        self.detach(owner.id)
        self._consuming()
        self._timekeeping.start()
        queues = self._all_queues() if owner.kind == "worker" and not owner.queues else None
        intake = self._intakes[owner.id] = Intake(owner, self._desk)
        if queues is not None:
            self._serve_all(intake, queues)

    def _serve_all(self, intake: Intake, queues: Sequence[str]) -> None:
        intake.serves_all = True
        for queue in queues:
            intake.serve(queue)
        self._registry.listen(intake.serve)

    def _all_queues(self) -> list[str]:
        return self._registry.read_all(lambda item: self._publish([item]), self._settings.patience)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._let_go(owner_id, _FAREWELL)

    def _let_go(self, owner_id: str, patience: float) -> None:
        intake = self._intakes.pop(owner_id, None)
        if intake is not None:
            self._registry.unlisten(intake.serve)
            intake.close(patience)
            if not self._intakes:
                self._timekeeping.stop(patience)

    def _intake(self, owner_id: str) -> Intake:
        self._check_open()
        intake = self._intakes.get(owner_id)
        if intake is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return intake

    def exchange(self, step: Step) -> Reply:
        if step.want is not None and step.want.mode is Mode.MERGED:
            refuse("taking of several queues as if they were one", Feature.MERGED)
        intake = self._intake(step.owner)
        if step.want is not None and intake.owner.kind == "consumer":
            self._announcer.use(step.want.queues)
        if step.want is not None and not (step.want.queues or intake.serves_all):
            self._serve_all(intake, self._all_queues())
        return intake.exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return self._intake(owner_id).wait(timeout, fds)

    def bell(self, owner_id: str) -> int:
        """A descriptor that is readable when something came, once ``arm`` was called."""
        return self._intake(owner_id).bell.fd

    def arm(self, owner_id: str) -> bool:
        """Have the bell rung when something comes; False when something has come already."""
        return self._intake(owner_id).bell.arm()

    def disarm(self, owner_id: str) -> None:
        """Have it rung no more."""
        self._intake(owner_id).bell.disarm()

    def doubt(self, owner_id: str, jobs: Sequence[Envelope], alone: Collection[str]) -> None:
        """These were carried: that there was nothing is no longer known."""
        intake = self._intakes.get(owner_id)
        if intake is not None:
            names = self._names
            places = {names.suspect(j.queue) if j.id in alone else names.home(j) for j in jobs}
            intake.doubt([place.name for place in places])

    def recall(self) -> int:
        return 0

    def wake(self, owner_id: str) -> None:
        intake = self._intakes.get(owner_id)
        if intake is not None:
            intake.wake()

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """The server itself gives back what a dead owner held, when its line is gone."""
        return 0

    def tick(self) -> float:
        self._check_open()
        return _TICK

    def count_silence(self) -> float:
        return float("inf")  # there are no owners elsewhere

    def command(self, owner_id: str, command: Command) -> bool:
        return False

    def wait_space(self, queue: str, timeout: float) -> bool:
        return True

    # -- looking --------------------------------------------------------------------------------

    def was_here(self, job_id: str) -> bool:
        return False

    def stats(self) -> list[QueueStats]:
        """What is ready, and who asks for it; the server knows no more of a queue."""
        self._check_open()
        self._consuming()
        queues, rows = self._all_queues(), []
        with visit(self._settings) as server:
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
            refuse("looking for jobs that have not failed (--state failed)", Feature.INSPECT)
        return self._failed.find(what, limit, cursor)

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        self._check_open()
        return self._failed.kick(job_ids)

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        self._check_open()
        return self._failed.delete(job_ids)

    def owners(self) -> list[Owner]:
        return [intake.owner for intake in list(self._intakes.values())]

    def info(self) -> dict[str, Any]:
        self._check_open()
        self._out.await_up(self._settings.patience)
        server = {k: _text(v) for k, v in self._out.server.items()}
        return describe(self._settings, self._names, server, self._out.blocked)

    def policies(self) -> Policed:
        """What operators set on the server that can destroy accepted jobs."""
        self._check_open()
        self._consuming()
        version = _text(self._out.server.get("version", ""))
        return examine(self._settings, self._names, self._all_queues(), version)

    def purge(self, queue: str) -> int:
        """Delete what is ready, also what our owners were handed in advance.

        Delayed jobs are not deleted: they share their queues with other queues' jobs, and arrive.
        """
        self._check_open()
        intakes = list(self._intakes.values())
        for intake in intakes:
            intake.put_back(queue, self._settings.patience)
        if intakes:
            self._publisher.flush(self._settings.patience)  # what goes back may be written anew
        try:
            with visit(self._settings) as server:
                return sum(server.purge(place) for place in self._places(queue))
        finally:
            for intake in intakes:
                intake.bell.tell()  # who waits may want something again

    def forget_queue(self, queue: str) -> bool:
        refuse("deleting a queue (delayed jobs may be on their way to it)", Feature.INSPECT)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        """Take in jobs of a store: two steps, so that who is killed in between may repeat one."""
        self._check_open()
        if schedules:
            refuse("a schedule", Feature.SCHEDULES)
        for record in records:
            check_job(record.envelope)
        items = arrivals(self._writer, records)
        self._make_known([record.envelope.queue for record in records])
        self._publish(items)
        if cursor:
            self._publish([cursor_message(self._settings.prefix, departure.mark, cursor)])
        return [True] * len(records)

    def adopted(self, mark: str) -> str:
        self._check_open()
        return read_cursor(self._settings, mark)

    def contents(self, queues: Collection[str]) -> Contents:
        """All that is there, of queues that were announced and of these."""
        self._check_open()
        known = [*self._all_queues(), *queues]
        return Leaving(self._settings, self._names, known, self._writer, self._publish)

    def flush(self) -> None:
        """Sleep until the server has all verdicts, for some seconds at most."""
        if not (self._closed or self._inherited):
            until = machine_time() + _FAREWELL
            self._timekeeping.stop(_FAREWELL)
            self._publisher.flush(_FAREWELL)  # a message is acknowledged after its successor
            for intake in list(self._intakes.values()):
                intake.flush(max(0.1, until - machine_time()))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            until = machine_time() + _FAREWELL
            for owner_id in list(self._intakes):
                self._let_go(owner_id, max(0.1, until - machine_time()))
            if not self._inherited:
                self._timekeeping.stop(max(0.1, until - machine_time()))
                self._publisher.close()
                for line in (self._names_line, self._in, self._out):
                    line.close()


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
