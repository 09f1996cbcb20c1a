"""A short visit to the server, on a connection of its own: to look at places, or act on them.

Such calls are rare, and what they hold in their hands goes back when the connection ends, however
it does. To ask for a place that is not there does not make it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    AMQPError,
    AMQPHeartbeatTimeout,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
)

from tidemill.brokers.rabbitmq.errors import sentence
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.core.clock import machine_time
from tidemill.core.errors import BrokerUnavailable

__all__ = [
    "ANSWER_WITHIN",
    "TAKE_MOST",
    "Seen",
    "ShortConnection",
    "Unanswered",
    "short_connection",
]

_HEARTBEAT = 600
_UNLIKE = 406
_NOT_FOUND, _NONE = 404, "NOT_FOUND - no queue "
"""What is said of a place that is not there; with other words it is there, but its node is away."""

TAKE_MOST = (1 << 16) - 1
"""Messages that a consumer may hold in its hands."""

_QUIET, _SILENT = 0.2, 2.0
"""Seconds without a message after which that was all: of what it counted, and of less."""

ANSWER_WITHIN = 10.0
"""Seconds that a place has to answer: one that has lost its log would never do so."""


class Unanswered(BrokerUnavailable):
    """A place does not answer, so nobody knows what lies there.

    Attributes:
        place: its name.
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class _Silence(AMQPHeartbeatTimeout):
    """The same, while the visit lasts."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"the queue {place} {why}")
        self.place = place


class Seen(NamedTuple):
    """A message. Its key is what it was routed by."""

    tag: int
    properties: pika.BasicProperties
    body: bytes
    key: str = ""


class ShortConnection:
    """What may be asked while it lasts. One thread's.

    Attributes:
        channel: what was taken is acknowledged over it. Questions go over another: the server
            closes the channel of whoever asks for what is not there.
    """

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._hear: Any = connection.process_data_events  # whose types know no part of a second
        self.channel: BlockingChannel = connection.channel()
        self._questions: BlockingChannel = connection.channel()

    def count(self, place: Place) -> tuple[int, int]:
        """How many messages are ready in a place, and how many consumers it has; 0 without it."""
        return self.look(place) or (0, 0)

    def look(self, place: Place) -> tuple[int, int] | None:
        """The same, but None without it."""
        try:
            with self._answer_of(place):
                found: Any = self._questions.queue_declare(place.name, passive=True)
        except ChannelClosedByBroker as error:
            self._come_back(error, place)
            return None
        return found.method.message_count, found.method.consumer_count

    def is_declared_so(self, place: Place) -> bool:
        """Whether a place that is there was declared as this release does it."""
        try:
            with self._answer_of(place):
                self._questions.queue_declare(place.name, durable=True, arguments=place.arguments)
        except ChannelClosedByBroker as error:
            if error.reply_code != _UNLIKE:
                raise
            self._questions = self._connection.channel()
            return False
        return True

    def purge(self, place: Place) -> int:
        """Delete what is ready in a place; how many that were."""
        try:
            with self._answer_of(place):
                purged: Any = self._questions.queue_purge(place.name)
        except ChannelClosedByBroker as error:
            self._come_back(error, place)
            return 0
        return int(purged.method.message_count)

    def take(self, place: Place, most: int) -> list[Seen]:
        """Messages of a place in their order: all that are ready, at most so many."""
        return list(self.walk(place, most))

    def walk(self, place: Place, most: int = TAKE_MOST, ahead: int = TAKE_MOST) -> Iterator[Seen]:
        """Messages of a place in their order as they come, at most so many.

        They are ours until they are acknowledged or the visit is over; then they stand where they
        stood, unless some were still on their way. What the server counts may be of a moment ago,
        so what it did not count is waited for, too, for a short while. No more of them are read
        than are asked for, give or take what comes in one piece. Of those that are not acknowledged
        there are never more than ``ahead``. To ask for none shows that the place answers: one that
        lost its leader is counted as empty.
        """
        came: deque[Seen] = deque()

        def push(_: Any, method: Any, properties: Any, body: bytes) -> None:
            came.append(Seen(method.delivery_tag, properties, body, method.routing_key))

        there = self.look(place)
        if there is None:
            return
        counted = min(most, there[0])
        self.channel.basic_qos(prefetch_count=max(1, min(most, ahead)))
        with self._answer_of(place):
            tag = self.channel.basic_consume(place.name, push)
        for number in range(most):
            until = machine_time() + (_QUIET if number >= counted else _SILENT)
            while not came and (left := until - machine_time()) > 0:
                self._hear(left)
            if not came:
                break
            yield came.popleft()
        with self._answer_of(place):
            self.channel.basic_cancel(tag)
        yield from came  # they are in our hands

    @contextlib.contextmanager
    def _answer_of(self, place: Place) -> Iterator[None]:
        """What is asked of a place in this block is answered in time, or the visit is over.

        Its server has no better answer than to close all when the queue has no leader.
        """
        connection: Any = cast("Any", self._connection)._impl
        silence = _Silence(place.name, "does not answer")
        timer = connection._adapter_call_later(
            ANSWER_WITHIN, lambda: connection._terminate_stream(silence)
        )
        try:
            yield
        except ConnectionClosedByBroker as error:
            raise _Silence(place.name, f"cannot be used: {error.reply_text}") from error
        finally:
            connection._adapter_remove_timeout(timer)

    def _come_back(self, error: ChannelClosedByBroker, place: Place) -> None:
        """After a question about what is not there."""
        if error.reply_code != _NOT_FOUND:
            raise error
        if not error.reply_text.startswith(_NONE):
            raise _Silence(place.name, f"cannot be used: {error.reply_text}") from error
        self._questions = self._connection.channel()


def _hang_up(connection: pika.BlockingConnection) -> None:
    """Close the connection. A channel that the server closes meanwhile may keep pika from that."""
    with contextlib.suppress(AMQPError):
        connection.close()
    if connection.is_open:
        within: Any = connection
        within._impl._transport._sock.close()
        within._impl.ioloop.close()


@contextlib.contextmanager
def short_connection(settings: Settings) -> Iterator[ShortConnection]:
    """Connect for the time of a block.

    Raises:
        Unanswered: a place that was asked for does not answer, or is down.
        BrokerUnavailable: the server is not there, or refuses.
    """
    try:
        connection = pika.BlockingConnection(settings.parameters(_HEARTBEAT))
        try:
            yield ShortConnection(connection)
        finally:
            _hang_up(connection)
    except _Silence as error:
        raise Unanswered(sentence(error, settings), error.place) from error
    except (AMQPError, OSError) as error:
        raise BrokerUnavailable(sentence(error, settings)) from error
