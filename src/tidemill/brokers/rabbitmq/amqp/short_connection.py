"""A short connection to the server, to look at places or act on them.

When the connection ends, for whatever reason, the messages that it holds go back. A question about
a missing place does not make the place.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    AMQPError,
    AMQPHeartbeatTimeout,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
)

from tidemill.brokers.rabbitmq.amqp.connection import part
from tidemill.brokers.rabbitmq.errors import sentence
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.errors import BrokerUnavailable

_HEARTBEAT = 600
_NOT_FOUND, _NONE = 404, "NOT_FOUND - no queue "
"""The answer for a missing place. With another text the place exists, but its node is away."""

TAKE_MOST = (1 << 16) - 1  # the most messages that a consumer may hold
_QUIET = 0.2  # seconds without a message that end a walk, after all counted messages came
_SILENT = 2.0  # seconds without a message after which a walk counts the rest anew

ANSWER_WITHIN = 10.0
"""Seconds within which a place must answer. A place that lost its log never answers.

The server renews its counts of messages every 5 s.
"""


class Unanswered(BrokerUnavailable):
    """A place does not answer, so its contents are unknown."""


class _Silence(AMQPHeartbeatTimeout):
    """The form of ``Unanswered`` that pika can raise. ``short_connection`` translates it."""

    def __init__(self, place: Place, why: str) -> None:
        super().__init__(f"the queue {place.name} {why}")


Seen = tuple[int, pika.BasicProperties, bytes]  # a message: its tag, properties and body


class ShortConnection:
    """The calls of a short connection. Only one thread may use them."""

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._hear: Any = connection.process_data_events  # pika's types allow only whole seconds
        # The channel that takes and acknowledges messages. Questions go over another channel, which
        # the server closes after a question about a missing place.
        self.channel: BlockingChannel = connection.channel()
        self._questions: BlockingChannel = connection.channel()

    def count(self, place: Place) -> tuple[int, int]:
        """The numbers of ready messages and of consumers of a place; zeros for a missing place."""
        found = self._ask(place, lambda: self._questions.queue_declare(place.name, passive=True))
        return (found.message_count, found.consumer_count) if found else (0, 0)

    def purge(self, place: Place) -> int:
        """Delete the ready messages of a place. Return their number."""
        purged = self._ask(place, lambda: self._questions.queue_purge(place.name))
        return int(purged.message_count) if purged else 0

    def _ask(self, place: Place, question: Callable[[], Any]) -> Any:
        """The answer to a question; None, and a new channel for questions, for a missing place."""
        try:
            with self._answer_of(place):
                return question().method
        except ChannelClosedByBroker as error:
            if error.reply_code != _NOT_FOUND:
                raise
            if not error.reply_text.startswith(_NONE):
                raise _Silence(place, f"cannot be used: {error.reply_text}") from error
            self._questions = self._connection.channel()
            return None

    def walk(self, place: Place, most: int = TAKE_MOST) -> Iterator[Seen]:
        """The messages of a place in their order, as they come, ``most`` at most.

        We hold the messages until their acknowledgement or the end of the connection. Messages that
        are not acknowledged then go back to their positions, if no message is under way. The
        server's count may be out of date, so the walk also waits a short while for messages beyond
        this count. The walk ends early when another reader holds the rest. If messages are ready
        and none comes for ``ANSWER_WITHIN`` seconds, the connection ends with ``Unanswered``.
        """
        came: deque[Seen] = deque()

        def push(_: Any, method: Any, properties: Any, body: bytes) -> None:
            came.append((method.delivery_tag, properties, body))

        there = self._ask(place, lambda: self._questions.queue_declare(place.name, passive=True))
        if there is None:
            return
        counted = min(most, there.message_count)
        self.channel.basic_qos(prefetch_count=most)
        with self._answer_of(place):
            tag = self.channel.basic_consume(place.name, push)
        for number in range(most):
            wait = _SILENT if number < counted else _QUIET
            if not self._comes(place, came, wait, most, sure=number < counted):
                break
            yield came.popleft()
        with self._answer_of(place):
            self.channel.basic_cancel(tag)
        yield from came  # we already hold these messages

    def _comes(
        self, place: Place, came: deque[Seen], wait: float, most: int, *, sure: bool
    ) -> bool:
        """Wait for the next message of a walk. ``sure``: each ready message must come in time."""
        began = time.monotonic()
        while True:
            until = time.monotonic() + wait
            while not came and (left := until - time.monotonic()) > 0:
                self._hear(left)
            if came or not sure:
                return bool(came)
            ready = self.count(place)[0]
            # All messages that the server sent before this answer have arrived. A cancel would send
            # them back.
            with self._answer_of(place):
                self.channel.basic_qos(prefetch_count=most)
            self._hear(0)
            if came or not ready:
                return bool(came)
            if time.monotonic() - began > ANSWER_WITHIN:
                raise _Silence(place, "does not hand out its messages")

    @contextlib.contextmanager
    def _answer_of(self, place: Place) -> Iterator[None]:
        """Run a block of questions; end the connection if the place does not answer in time."""
        # For a queue without a leader, the server's only answer is to close the connection.
        silence = _Silence(place, "does not answer")
        connection = part(self._connection, "_impl")
        call_later = part(connection, "_adapter_call_later")
        terminate = part(connection, "_terminate_stream")
        timer = None
        if call_later and terminate:  # else the heartbeat ends a silent connection
            timer = call_later(ANSWER_WITHIN, lambda: terminate(silence))
        try:
            yield
        except ConnectionClosedByBroker as error:
            raise _Silence(place, f"cannot be used: {error.reply_text}") from error
        finally:
            if timer is not None:
                part(connection, "_adapter_remove_timeout")(timer)


def _hang_up(connection: pika.BlockingConnection) -> None:
    """Close the connection, even if a channel that the server closed makes pika fail."""
    with contextlib.suppress(AMQPError):
        connection.close()
    if connection.is_open:
        sock = part(connection, "_impl", "_transport", "_sock")
        if sock is not None:  # else the socket closes with the object
            sock.close()
            part(connection, "_impl", "ioloop").close()


@contextlib.contextmanager
def short_connection(settings: Settings) -> Iterator[ShortConnection]:
    """Connect for the time of a block."""
    try:
        connection = pika.BlockingConnection(settings.parameters(_HEARTBEAT))
        try:
            yield ShortConnection(connection)
        finally:
            _hang_up(connection)
    except _Silence as error:
        raise Unanswered(sentence(error, settings)) from error
    except (AMQPError, OSError) as error:
        raise BrokerUnavailable(sentence(error, settings)) from error
