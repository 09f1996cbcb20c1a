"""Ask the server about queues, over a connection of its own: declare, probe and count.

The declaration of an existing queue changes nothing, and its answer has the number of messages. So
for each connection that takes messages, this process declares a queue before its first use.

The server also answers for a quorum queue that lost its log or recovers. But a consume from such a
queue waits for 65 s, with all later requests on its channel. So after the declaration, a *probe*
asks whether a consumer would begin: ``docs/design/rabbitmq.md`` says what it costs. A question
without a prompt answer keeps its channel, and the other questions go on over another channel. When
the connection is lost, the next connection asks all questions again.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pika
from pika.channel import Channel
from pika.compat import long
from pika.exceptions import AMQPError

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionListener, ConnectionThread
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.core.locks import Lock

_SLOW, _SILENT = 1.0, 10.0
"""Seconds without an answer to an errand. After the first number, other errands go on over another
channel; after the second, the errand is given up."""

_PROMPT = 0.2  # seconds within which a working queue answers a declaration, as a rule

_NO_CREDIT = {"x-credit": {"credit": long(0), "drain": False}}
_KNOW_CREDIT = ("3",)  # the major versions of servers that know credit

SILENT = "it does not answer"

Answer = Callable[[str], None]  # called with an empty text when all is done, else with the reason


class _Errand:
    """A question about one place."""

    __slots__ = ("channel", "over", "place", "probe", "since", "slow", "spent")

    def __init__(
        self,
        place: Place,
        over: Callable[[int, str], None],
        slow: Callable[[], None],
        probe: bool | None,
    ) -> None:
        self.place = place
        # Called with the number of ready messages, or with the reason of a failure.
        self.over = over
        self.slow = slow  # called if there is no answer soon
        self.probe = probe  # whether a probe follows; None if that is open
        self.channel: Channel | None = None  # the channel of the question
        # Monotonic time of the question, less ``spent``: seconds on lost connections.
        self.since = self.spent = 0.0


class Declarer(ConnectionListener):
    """Asks over the connection of ``side``, for that of ``thread``, which takes messages."""

    # Any thread may call. The thread of ``side`` calls the callers back.

    def __init__(self, side: ConnectionThread, thread: ConnectionThread, failed: Place) -> None:
        self._side = side
        self._thread = thread
        self._failed = failed
        self._lock = Lock()
        self._joined = False
        self._connection: pika.SelectConnection | None = None
        self._channel: Channel | None = None
        self._known: dict[str, int] = {}  # the connection for which a place was declared, by name
        self._waiting: deque[_Errand] = deque()
        self._current: _Errand | None = None
        self._apart: list[_Errand] = []  # errands without a prompt answer
        self._opening = self._watching = False

    # -- from any thread ------------------------------------------------------------------------

    def join(self) -> None:
        """Begin to listen to the connection."""
        with self._lock:
            join, self._joined = not self._joined, True
        if join:
            self._side.add(self)

    def knows(self, place: Place) -> bool:
        """Whether a place was declared for the current connection, and answers."""
        return self._known.get(place.name) == self._thread.connects

    def forget_all(self) -> None:
        """Forget everything that was declared: somebody may have deleted queues."""
        self._known.clear()

    def declare(self, place: Place, then: Answer, *, probe: bool | None = None) -> None:
        """Declare a place that may not exist yet."""
        # A probe follows, or none. With None, the server and the speed of its answer decide.
        needs_failed = place.arguments.get("x-dead-letter-routing-key") == self._failed.name
        if needs_failed and not self.knows(self._failed):  # the server moves messages there
            self.declare(self._failed, _ignore, probe=False)
        connects = self._thread.connects

        def over(_: int, why: str) -> None:
            if not why:
                self._known[place.name] = connects
            then(why)

        self._begin(_Errand(place, over, _ignore, probe))

    def count(
        self, place: Place, then: Callable[[int, str], None], slow: Callable[[], None]
    ) -> None:
        """Count the ready messages of a place. ``slow`` is called if no answer comes soon."""
        self._begin(_Errand(place, then, slow, probe=False))

    def _begin(self, errand: _Errand) -> None:
        self.join()
        self._side.do(lambda: self._add(errand))

    # -- called by the connection thread --------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        self._connection = connection
        self._next()

    def lost(self) -> None:
        """Keep the errands for the next connection, except those without an answer for long."""
        now, asked = time.monotonic(), [*self._apart, *([self._current] if self._current else [])]
        self._connection = self._channel = self._current = None
        self._opening = self._watching = False
        for errand in asked:
            errand.spent = now - errand.since
        silent = [one for one in asked if one.spent >= _SILENT]
        self._waiting.extendleft(one for one in reversed(asked) if one not in silent)
        self._apart = []
        for errand in silent:
            errand.over(0, SILENT)
        for errand in self._waiting:
            errand.slow()

    def _add(self, errand: _Errand) -> None:
        self._waiting.append(errand)
        self._next()

    def _next(self) -> None:
        connection = self._connection
        if self._current or self._opening or not self._waiting:
            return
        if connection is None or not connection.is_open:
            return  # the next connection asks
        if self._channel is None or not self._channel.is_open:
            self._opening = True
            connection.channel(on_open_callback=self._channel_opened)
            return
        self._current = errand = self._waiting.popleft()
        errand.channel, errand.since = self._channel, time.monotonic() - errand.spent
        self._watch()
        answered = functools.partial(self._answered, errand)
        place = errand.place
        errand.channel.queue_declare(
            place.name, durable=True, arguments=place.arguments, callback=answered
        )

    def _channel_opened(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        self._channel, self._opening = channel, False
        self._next()

    def _answered(self, errand: _Errand, frame: Any) -> None:
        if errand is not self._current and errand not in self._apart:
            return  # it was given up
        count, channel, probe = int(frame.method.message_count), errand.channel, errand.probe
        if probe is None:
            probe = self._is_free() or time.monotonic() - errand.since >= _PROMPT
        if probe and channel is not None:
            channel.basic_qos(prefetch_count=1)
            begun = functools.partial(self._begun, errand, count)
            channel.basic_consume(errand.place.name, _ignore, arguments=_NO_CREDIT, callback=begun)
        else:
            self._end(errand, count, "")

    def _is_free(self) -> bool:
        """Whether a probe costs no delivery of a message."""
        server = (self._connection and self._connection.server_properties) or {}
        return str(server.get("version", "")).partition(".")[0] in _KNOW_CREDIT

    def _begun(self, errand: _Errand, count: int, _: object) -> None:
        if errand is self._current or errand in self._apart:
            channel, errand.channel = errand.channel, None
            self._leave(channel)  # ends the consumer, and returns a message that it got
            self._end(errand, count, "")

    def _end(self, errand: _Errand, count: int, why: str) -> None:
        if errand is self._current:
            self._current = None
        else:
            self._apart.remove(errand)
            self._leave(errand.channel)
        errand.over(count, why)
        self._next()

    def _leave(self, channel: Channel | None) -> None:
        if channel is self._channel:
            self._channel = None
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

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._side.later(_SLOW, functools.partial(self._look, self._connection))

    def _look(self, connection: pika.SelectConnection | None) -> None:
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


def _ignore(*_: object) -> None:
    pass
