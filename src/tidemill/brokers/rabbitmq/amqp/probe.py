"""Probes: ask on a side connection whether a place answers, before an owner consumes from it.

A place (a queue of the server) that lost its log, or recovers, is silent. A consume from a silent
place waits for 65 s, and so do all later requests on its channel. Then the server closes the
connection. For these 65 s the server also keeps the messages that it handed out over the channel,
even if the consumer is gone. So a probe first asks each place, on a separate connection, whether a
consumer would begin there. A silent place is left alone, and asked again after growing pauses.

The probe's consumer has no credit, so the server hands out nothing to it. A server without credit
(RabbitMQ 4) sends the probe a message, which goes back and counts as delivered. So with such a
server, only places that may be silent are probed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

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

_MOST = 64
"""The most places that are asked at a time."""

_IDLE = 1.0
"""Seconds after which an idle side connection is closed."""

_NO_CREDIT = {"x-credit": {"credit": long(0), "drain": False}}
_KNOW_CREDIT = ("3",)
"""The major versions of servers that know credit."""


class Probes:
    """The probes of one owner, in the connection thread.

    ``answered`` is called when a probe finds that a place answers.
    """

    def __init__(self, thread: ConnectionThread, answered: Callable[[], None]) -> None:
        self._thread = thread
        self._answered = answered
        self._connection: pika.SelectConnection | None = None
        self._round: _Round | None = None
        self._is_free = False
        self._silent: set[str] = set()
        self._well: set[str] = set()  # places that answered on this connection
        self._pauses: dict[str, float] = {}  # seconds before the next try, by place

    def __contains__(self, name: str) -> bool:
        return name in self._silent

    def opened(self, connection: pika.SelectConnection) -> None:
        """Begin on a new connection, and ask all silent places at once."""
        self.close()
        self._connection = connection
        version = str((connection.server_properties or {}).get("version", ""))
        self._is_free = version.partition(".")[0] in _KNOW_CREDIT
        self._well.clear()
        for name in list(self._silent):
            self._ask(name)

    def close(self) -> None:
        """Ask no more."""
        if self._round is not None:
            self._round.end()
        self._connection = self._round = None

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
        if self._connection is None or not self._connection.is_open:
            return  # the probe of the next connection asks
        if self._round is None or self._round.is_over:
            self._round = _Round(self._thread, self._told)
        self._round.ask(name)

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


class _Round:
    """A side connection with the places to ask over it. It ends soon after the last answer.

    ``told`` is called with each place and True or False for its answer. It gets None for a place
    that was not asked, because no connection was made.
    """

    def __init__(self, thread: ConnectionThread, told: Callable[[str, bool | None], None]) -> None:
        self._thread = thread
        self._told = told
        self._connection: pika.SelectConnection | None = None
        self._todo: dict[str, None] = {}
        self._asked: set[str] = set()
        self._stuck = False  # True while a waiting consume keeps the connection from closing
        self.is_over = False
        thread.beside(self._connected)

    def ask(self, name: str) -> None:
        """Ask one more place."""
        self._todo[name] = None
        self._next()

    def end(self) -> None:
        """End the round without a call of ``told``."""
        self.is_over = True
        self._hang_up()

    def _connected(self, result: pika.SelectConnection | BaseException) -> None:
        if isinstance(result, BaseException):
            self._lost()
            return
        self._connection = result
        result.add_on_close_callback(lambda *_: self._lost())
        if self.is_over:
            self._hang_up()
        else:
            self._next()

    def _lost(self) -> None:
        if not self.is_over:
            self.is_over = True
            # The server has closed the connection because of a silent place.
            for name in self._asked:
                self._told(name, False)
            for name in self._todo:
                self._told(name, None)

    def _next(self) -> None:
        connection = self._connection
        if self.is_over or connection is None or not connection.is_open:
            return
        while self._todo and len(self._asked) < _MOST:
            name = next(iter(self._todo))
            del self._todo[name]
            self._asked.add(name)
            connection.channel(on_open_callback=functools.partial(self._begin, name))
            self._thread.later(ANSWERS_WITHIN, functools.partial(self._missed, name))
        if not self._asked:
            self._thread.later(_IDLE, self._rest)

    def _rest(self) -> None:
        if not (self._asked or self._todo or self.is_over):
            self.end()

    def _begin(self, name: str, channel: Channel) -> None:
        def closed(_: Any, why: BaseException) -> None:
            if isinstance(why, ChannelClosedByBroker):  # the place is missing, or its node is away
                self._heard(name, answers=True)

        def begun(_: Any) -> None:
            if self._heard(name, answers=True):
                channel.close()

        channel.add_on_close_callback(closed)
        channel.basic_qos(prefetch_count=1)
        channel.basic_consume(name, _ignore, arguments=_NO_CREDIT, callback=begun)

    def _missed(self, name: str) -> None:
        self._heard(name, answers=False)

    def _heard(self, name: str, *, answers: bool) -> bool:
        """Handle an answer, or its absence; False when the place already has a result."""
        if self.is_over or name not in self._asked:
            return False
        self._asked.discard(name)
        self._stuck = self._stuck or not answers
        self._told(name, answers)
        self._next()
        return True

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._thread.leave(self._connection, at_once=self._stuck or bool(self._asked))


def _ignore(*_: Any) -> None:
    pass
