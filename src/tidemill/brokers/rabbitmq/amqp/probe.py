"""Places that let whoever asks for them wait, as one does that has lost its log, or recovers.

Who consumes of such a place waits for 65 s, with all that is behind on that channel; then the
server closes his line. And as long, whatever became of him, it keeps for him what was handed out
over that channel, of other places too. So each place is asked first, on a connection that nothing
else is done on, whether a consumer would begin there. One that does not answer is left alone, and
asked again now and then: soon at first, then after longer and longer pauses.

Such a consumer has no credit, so that nothing is handed out to it. A server that knows no credit
(RabbitMQ 4) brings it a message, which goes back, and counts as handed out: so there only those
places are asked of which there is doubt.
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

__all__ = ["ANSWERS_WITHIN", "Probes"]

log = logging.getLogger("tidemill.rabbitmq")

ANSWERS_WITHIN = 10.0
"""Seconds a consumer has to begin."""

_PAUSE, _PAUSE_MOST = 5.0, 300.0
"""Seconds until a place is asked again: at first, and at most."""

_MOST = 64
"""Places that are asked at a time."""

_IDLE = 1.0
"""Seconds after which a connection that nobody is asked over is closed."""

_NO_CREDIT = {"x-credit": {"credit": long(0), "drain": False}}
_KNOW_CREDIT = ("3",)
"""How the versions begin of servers that know it."""


class Probes:
    """Those of one owner, all in the line's thread; ``answered`` is told when a place answers."""

    def __init__(self, thread: ConnectionThread, answered: Callable[[], None]) -> None:
        self._thread = thread
        self._answered = answered
        self._connection: pika.SelectConnection | None = None
        self._round: _Round | None = None
        self._is_free = False
        self._silent: set[str] = set()
        self._well: set[str] = set()  # over this line
        self._pauses: dict[str, float] = {}  # by place, those before the next try

    def __contains__(self, name: str) -> bool:
        return name in self._silent

    def opened(self, connection: pika.SelectConnection) -> None:
        """There is a new line: what waited on the old one is asked at once."""
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
        """Ask a place that has not answered over this line yet; whether there is need."""
        if name in self._well or not (self._is_free or doubted):
            return False
        if name not in self._silent:
            self._silent.add(name)
            self._ask(name)
        return True

    def leave_alone(self, name: str) -> None:
        """Until it answers."""
        self._well.discard(name)
        if name not in self._silent:
            self._silent.add(name)
            self._try_later(name)

    def is_well(self, name: str) -> None:
        """A place answers: what was before does not count any more."""
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
            return  # the next line asks
        if self._round is None or self._round.is_over:
            self._round = _Round(self._thread, self._told)
        self._round.ask(name)

    def _told(self, name: str, answers: bool | None) -> None:
        """None: it could not be asked. What was not known to be silent is taken for well then."""
        if answers or (answers is None and name not in self._pauses):
            self._silent.discard(name)
            self._well.add(name)
            self._answered()
        else:
            self._try_later(name)


class _Round:
    """A connection, and the places that are asked over it; it ends soon after the last answer.

    ``told`` gets each place and whether it answers, or None if it was not asked, since there is no
    connection.
    """

    def __init__(self, thread: ConnectionThread, told: Callable[[str, bool | None], None]) -> None:
        self._thread = thread
        self._told = told
        self._connection: pika.SelectConnection | None = None
        self._todo: dict[str, None] = {}
        self._asked: set[str] = set()
        self._stuck = False  # who waits keeps the connection from a good end
        self.is_over = False
        thread.beside(self._connected)

    def ask(self, name: str) -> None:
        """One more."""
        self._todo[name] = None
        self._next()

    def end(self) -> None:
        """No more of it: nobody is told anything."""
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
            for name in self._asked:  # the server closes it when one has waited for too long
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
            if isinstance(why, ChannelClosedByBroker):  # there is no such place, or it is away
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
        """Whether that was still to be known."""
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
