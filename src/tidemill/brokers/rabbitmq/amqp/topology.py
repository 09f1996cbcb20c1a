"""Declare queues on the server, on a separate channel.

The declaration of an existing queue changes nothing. So on each connection, this process declares a
queue before it first uses the queue. The answer also has the numbers of messages and consumers of
the queue. AMQP tells no more about a queue.

A queue that lost its log delays the answer, and all later requests on the channel. A question
without a prompt answer keeps its channel, and the other questions go on over another channel.

For a silent quorum queue, the server answers after a quarter of a second that the queue is empty.
So after a slow answer nobody knows whether the queue works (``doubts``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pika
from pika.channel import Channel
from pika.exceptions import AMQPError

from tidemill.brokers.rabbitmq.layout import Place

log = logging.getLogger("tidemill.rabbitmq")

_SLOW, _SILENT = 1.0, 10.0
"""Seconds without an answer to an errand. After the first number, other errands go on over another
channel; after the second, the errand is given up."""

_PROMPT = 0.2
"""Seconds within which a working queue answers, as a rule."""

SILENT = f"no answer in {_SILENT:g} s"

Answer = Callable[[str], None]
"""Called in the connection thread: with an empty text when all is done, else with the reason."""


class _Errand:
    """A question about one place.

    Attributes:
        over: called with the number of ready messages, or with the reason of a failure.
        slow: called if there is no answer soon.
        channel: the channel of the question.
        since: monotonic time of the question.
    """

    __slots__ = ("channel", "over", "place", "since", "slow")

    def __init__(
        self, place: Place, over: Callable[[int, str], None], slow: Callable[[], None]
    ) -> None:
        self.place = place
        self.over = over
        self.slow = slow
        self.channel: Channel | None = None
        self.since = 0.0


class Declarer:
    """Declares over one connection. All of it runs in the connection thread."""

    def __init__(self, failed: Place) -> None:
        self._failed = failed
        self._connection: pika.SelectConnection | None = None
        self._channel: Channel | None = None
        self._known: set[str] = set()
        self._doubted: set[str] = set()
        self._waiting: deque[_Errand] = deque()
        self._current: _Errand | None = None
        self._apart: list[_Errand] = []  # errands without a prompt answer
        self._opening = self._watching = False

    # -- called by the connection thread --------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        """Begin on a new connection, which may lead to another server."""
        self._connection = connection
        self.forget_all()
        self._next()

    def unblocked(self) -> None:
        """Do nothing: the declarer does not wait for publications."""

    def lost(self, why: str) -> None:
        """End all errands. Their callers ask again when the connection is back."""
        begun = [*self._apart, *([self._current] if self._current else []), *self._waiting]
        self._connection = self._channel = self._current = None
        self._opening = self._watching = False
        self._waiting, self._apart = deque(), []
        for errand in begun:
            errand.over(0, why)

    # -- asking ---------------------------------------------------------------------------------

    def knows(self, place: Place) -> bool:
        """Whether a place was declared already."""
        return place.name in self._known

    def doubts(self, place: Place) -> bool:
        """Whether a declared place may be silent when a consumer asks."""
        return place.name in self._doubted

    def forget_all(self) -> None:
        """Forget everything that was declared: somebody may have deleted queues."""
        self._known.clear()

    def declare(self, place: Place, then: Answer) -> None:
        """Declare a queue that may not exist yet."""
        if place.name in self._known:
            then("")
            return
        if self._failed.name not in self._known and self._needs_failed(place):
            self._declare(self._failed, lambda why: None)
        self._declare(place, then)

    def _declare(self, place: Place, then: Answer) -> None:
        def over(_: int, why: str) -> None:
            if not why:
                self._known.add(place.name)
                self._doubted.discard(place.name)
                if time.monotonic() - errand.since >= _PROMPT:
                    self._doubted.add(place.name)
            then(why)

        errand = _Errand(place, over, lambda: None)
        self._begin(errand)

    def count(
        self, place: Place, then: Callable[[int, str], None], slow: Callable[[], None]
    ) -> None:
        """Count the ready messages of a queue. ``slow`` is called if no answer comes soon."""
        self._begin(_Errand(place, then, slow))

    def _needs_failed(self, place: Place) -> bool:
        """Whether the server moves the messages that it takes out of a place to the failed jobs."""
        return bool(place.arguments.get("x-dead-letter-routing-key") == self._failed.name)

    # -- questions in order ---------------------------------------------------------------------

    def _begin(self, errand: _Errand) -> None:
        self._waiting.append(errand)
        self._next()

    def _next(self) -> None:
        connection = self._connection
        if self._current or self._opening or not self._waiting:
            return
        if connection is None or not connection.is_open:
            return  # when the connection has closed, ``lost`` ends all errands
        if self._channel is None or not self._channel.is_open:
            self._opening = True
            connection.channel(on_open_callback=self._channel_opened)
            return
        self._current = errand = self._waiting.popleft()
        errand.channel, errand.since = self._channel, time.monotonic()
        self._watch()
        self._go_on(errand)

    def _channel_opened(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        self._channel, self._opening = channel, False
        self._next()

    def _go_on(self, errand: _Errand) -> None:
        assert errand.channel is not None
        place, answered = errand.place, functools.partial(self._answered, errand)
        errand.channel.queue_declare(
            place.name, durable=True, arguments=place.arguments, callback=answered
        )

    def _answered(self, errand: _Errand, frame: Any) -> None:
        if errand is self._current or errand in self._apart:  # else it was given up
            self._end(errand, int(frame.method.message_count), "")

    def _end(self, errand: _Errand, count: int, why: str) -> None:
        if errand is self._current:
            self._current = None
        else:
            self._apart.remove(errand)
            self._leave(errand.channel)
        errand.over(count, why)
        self._next()

    @staticmethod
    def _leave(channel: Channel | None) -> None:
        if channel is not None and channel.is_open:
            with contextlib.suppress(AMQPError):
                channel.close()

    def _channel_closed(self, channel: Any, reason: Any) -> None:
        """The server closes a channel after an impossible request."""
        if channel is self._channel:
            self._channel = None
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        why = str(getattr(reason, "reply_text", reason))
        for errand in [self._current, *self._apart]:
            if errand is not None and errand.channel is channel:
                self._end(errand, 0, why)

    # -- late answers ---------------------------------------------------------------------------

    def _watch(self) -> None:
        if not self._watching and self._connection is not None:
            self._watching = True
            look = functools.partial(self._look, self._connection)
            self._connection.ioloop.call_later(_SLOW, look)

    def _look(self, connection: pika.SelectConnection) -> None:
        if connection is not self._connection:
            return
        self._watching = False
        now, current = time.monotonic(), self._current
        for errand in [one for one in self._apart if now - one.since >= _SILENT]:
            self._end(errand, 0, SILENT)
        if current is not None and current is self._current and now - current.since >= _SLOW:
            self._apart.append(current)
            self._current = self._channel = None
            current.slow()
            self._next()
        if self._current or self._apart:
            self._watch()
