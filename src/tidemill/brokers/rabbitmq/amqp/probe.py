"""Probes: ask on a side connection whether a place answers, before an owner consumes from it.

A place (a queue of the server) that lost its log, or recovers, is silent. A consume from a silent
place waits for 65 s, and so do all later requests on its channel. Then the server closes the
connection. For these 65 s the server also keeps the messages that it handed out over the channel,
even if the consumer is gone. So a probe first asks each place, on the connection that reads the
names of queues, whether a consumer would begin there. A silent place is left alone, and asked again
after growing pauses.

The probe's consumer has no credit, so the server hands out nothing to it. A server without credit
(RabbitMQ 4) sends the probe a message, which goes back and counts as delivered. So with such a
server, only places that may be silent are probed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pika
from pika.channel import Channel
from pika.compat import long
from pika.exceptions import ChannelClosedByBroker

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread

log = logging.getLogger("tidemill.rabbitmq")

ANSWERS_WITHIN = 10.0
"""Seconds within which a consumer must begin."""

_PAUSE, _PAUSE_MOST = 5.0, 300.0
"""Seconds until a place is asked again: at first, and at most."""

_NO_CREDIT = {"x-credit": {"credit": long(0), "drain": False}}
_KNOW_CREDIT = ("3",)
"""The major versions of servers that know credit."""


class Probes:
    """The probes of one owner, in the connection thread of its consumers.

    ``side`` is the thread of the connection that asks. ``answered`` is called when a probe finds
    that a place answers.
    """

    def __init__(
        self, thread: ConnectionThread, side: ConnectionThread, answered: Callable[[], None]
    ) -> None:
        self._thread = thread
        self._side = side
        self._answered = answered
        self._connection: pika.SelectConnection | None = None
        self._is_free = False
        self._silent: set[str] = set()
        self._well: set[str] = set()  # places that answered on this connection
        self._pauses: dict[str, float] = {}  # seconds before the next try, by place

    def __contains__(self, name: str) -> bool:
        return name in self._silent

    def opened(self, connection: pika.SelectConnection) -> None:
        """Begin on a new connection, and ask all silent places at once."""
        self._connection = connection
        version = str((connection.server_properties or {}).get("version", ""))
        self._is_free = version.partition(".")[0] in _KNOW_CREDIT
        self._well.clear()
        for name in list(self._silent):
            self._ask(name)

    def close(self) -> None:
        """Ask no more."""
        self._connection = None

    def try_first(self, name: str, *, doubted: bool) -> bool:
        """Ask a place that has not answered on this connection yet; True if an answer will come."""
        if name in self._well or not (self._is_free or doubted):
            return False
        if name not in self._silent:
            self._silent.add(name)
            self._ask(name)
        return True

    def leave_alone(self, name: str) -> None:
        """Leave a silent place alone until it answers."""
        self._well.discard(name)
        if name not in self._silent:
            self._silent.add(name)
            self._try_later(name)

    def is_well(self, name: str) -> None:
        """Record that a place answers, and forget its earlier pauses."""
        self._well.add(name)
        self._pauses.pop(name, None)

    def _try_later(self, name: str) -> None:
        pause = self._pauses.get(name, _PAUSE)
        if name not in self._pauses:
            log.error("the queue %s does not answer; it is tried again in %g s", name, pause)
        self._pauses[name] = min(2 * pause, _PAUSE_MOST)
        connection = self._connection
        self._thread.later(
            pause, lambda: self._ask(name) if connection is self._connection else None
        )

    def _ask(self, name: str) -> None:
        connection = self._connection

        def told(answers: bool | None) -> None:
            if connection is self._connection:  # else the probe of the next connection asks
                self._told(name, answers)

        if connection is not None:
            _Probe(self._side, name, lambda said: self._thread.do(lambda: told(said)))

    def _told(self, name: str, answers: bool | None) -> None:
        """Handle an answer. None means that the place was not asked.

        A place that was never silent then counts as a place that answers.
        """
        if answers or (answers is None and name not in self._pauses):
            self._silent.discard(name)
            self._well.add(name)
            self._answered()
        else:
            self._try_later(name)


class _Probe:
    """One question. ``told`` is called once: with the answer, or with None if nobody was asked."""

    def __init__(
        self, thread: ConnectionThread, name: str, told: Callable[[bool | None], None]
    ) -> None:
        self._thread = thread
        self._name = name
        self._told: Callable[[bool | None], None] | None = told
        self._asked = False
        thread.add(self)
        thread.do(lambda: thread.later(ANSWERS_WITHIN, self._missed))

    def opened(self, connection: pika.SelectConnection) -> None:
        if self._told is not None and connection.is_open:
            self._asked = True
            connection.channel(on_open_callback=self._begin)

    def unblocked(self) -> None:
        """Do nothing: a probe publishes nothing."""

    def lost(self, why: str) -> None:
        """Wait for the next connection: another place may have broken this one."""
        self._asked = False

    def _begin(self, channel: Channel) -> None:
        def closed(_: object, why: BaseException) -> None:
            if isinstance(why, ChannelClosedByBroker):  # the place is missing, or its node is away
                self._end(answers=True)

        def begun(_: object) -> None:
            self._end(answers=True)
            if channel.is_open:
                channel.close()

        channel.add_on_close_callback(closed)
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(self._name, _ignore, arguments=_NO_CREDIT, callback=begun)

    def _missed(self) -> None:
        self._end(answers=False if self._asked else None)

    def _end(self, *, answers: bool | None) -> None:
        told, self._told = self._told, None
        if told is not None:
            self._thread.remove(self)
            told(answers)


def _ignore(*_: object) -> None:
    pass
