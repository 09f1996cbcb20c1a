"""The state of a broker in this process: its connections, its owners and its publisher."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread, OutageLog
from tidemill.brokers.rabbitmq.amqp.publish_channel import Outgoing
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.claim import AttachedOwner
from tidemill.brokers.rabbitmq.dead_letter import DeadLetters
from tidemill.brokers.rabbitmq.exit_flush import flush_at_exit
from tidemill.brokers.rabbitmq.layout import Names, Place
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.owners import OwnerContext
from tidemill.brokers.rabbitmq.put import Publisher
from tidemill.brokers.rabbitmq.queue_announcer import Announcer
from tidemill.brokers.rabbitmq.queue_registry import Registry
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.timekeeper import Timekeeper, Timekeeping
from tidemill.brokers.rabbitmq.timer_queues import TimerQueues
from tidemill.brokers.rabbitmq.unsupported import Lacking
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.core.envelope import Envelope
from tidemill.core.errors import TidemillError
from tidemill.core.locks import Lock

_PUBLISHERS_BEAT = 600
"""Seconds between heartbeats of the connection that only publishes. Its process may run tasks,
which may hold the interpreter lock for minutes. No lease depends on this connection."""

FAREWELL = 5.0
"""Seconds that a closing broker waits for the work under way."""


class ServerCalls(Lacking):
    """The base of every call of the broker."""

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
        flush_at_exit(self)

    def _begin(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        settings = self._settings
        self._names = Names(settings.prefix, settings.classic)
        outages, beat = OutageLog(settings.where), max(1, round(settings.owner_lease / 2))
        self._out = ConnectionThread(settings, "publisher", _PUBLISHERS_BEAT, outages)
        self._in = ConnectionThread(settings, "consumer", beat, outages)
        self._names_thread = ConnectionThread(settings, "names", beat)
        notice = TimerQueues(self._names).notice
        self._publisher = Publisher(self._out, self._names.failed, notice)
        self._out.add(self._publisher)
        consumers = self._in_declarer = Declarer(self._names.failed)
        self._joined = False
        self._writer = Writer(self._names)
        self._failed = DeadLetters(settings, self._writer, self._publish, self._make_known)
        self._registry = Registry(self._names_thread, self._names)
        self._announcer = Announcer(self._out, self._publisher, self._registry, self._served)
        self._out.add(self._announcer)
        lines = self._in, self._names_thread, consumers
        parts = (*lines, self._publisher, self._names, self._writer)
        next_token = itertools.count(1).__next__
        self._context = OwnerContext(*parts, next_token, self._announcer.entries)
        self._owners: dict[str, AttachedOwner] = {}
        self._timekeeping = Timekeeping(lambda: Timekeeper(*parts))

    def after_fork_child(self) -> None:
        """In a forked child: close the copies of the parent's connections and owners.

        The child connects at its first call. Many children never make a call.
        """
        if not (self._closed or self._inherited):
            for attached in list(self._owners.values()):
                attached.after_fork_child()
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

    def _consuming(self) -> ConnectionThread:
        """Wait for the connection that takes messages, and return its thread."""
        with self._lock:
            if not self._joined:
                self._joined = True
                self._in.add(self._in_declarer)
        self._in.await_up(self._settings.patience)
        return self._in

    def _put(self, jobs: Sequence[Envelope], items: Sequence[Outgoing]) -> None:
        """Announce the queues of jobs and publish the jobs, both within one patience."""
        began = time.monotonic()
        self._make_known([job.queue for job in jobs], began)
        self._publisher.put(items, self._settings.patience, began=began)

    def _make_known(self, queues: Iterable[str], began: float = 0.0) -> None:
        self._announcer.make_known(queues, self._settings.patience, began or time.monotonic())

    def _publish(self, items: Sequence[Outgoing]) -> None:
        self._publisher.put(items, self._settings.patience)

    def _served(self) -> Iterator[str]:
        """The queues from which this process's owners take."""
        for attached in list(self._owners.values()):
            yield from self._registry.known() if attached.serves_all else attached.owner.queues

    def _all_queues(self) -> list[str]:
        return self._registry.read_all(lambda item: self._publish([item]), self._settings.patience)

    def _places(self, queue: str) -> list[Place]:
        return [p for kind in ("tasks", "messages") for p in self._names.of(queue, kind)]

    def _let_go(self, owner_id: str, patience: float) -> None:
        attached = self._owners.pop(owner_id, None)
        if attached is not None:
            self._registry.unlisten(attached.serve)
            attached.close(patience)
            if not self._owners:
                self._timekeeping.stop(patience)

    def flush(self) -> None:
        """Sleep until the server has all verdicts, for a few seconds at most."""
        if not (self._closed or self._inherited):
            until = time.monotonic() + FAREWELL
            self._timekeeping.stop(FAREWELL)
            # First replacements, then acknowledgements of the messages they replace.
            self._publisher.flush(FAREWELL)
            for attached in list(self._owners.values()):
                attached.flush(max(0.1, until - time.monotonic()))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            until = time.monotonic() + FAREWELL
            for owner_id in list(self._owners):
                self._let_go(owner_id, max(0.1, until - time.monotonic()))
            if not self._inherited:
                self._timekeeping.stop(max(0.1, until - time.monotonic()))
                self._publisher.close()
                for thread in (self._names_thread, self._in, self._out):
                    thread.close()


def text_of(value: object) -> str:
    """A property of the server as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
