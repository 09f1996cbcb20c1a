"""A short visit to the server, on a connection of its own: to look at places, or act on them.

Such calls are rare, and what they hold in their hands goes back when the connection ends, however
it does. To ask for a place that is not there does not make it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker

from tidemill.brokers.rabbitmq.names import Place
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.trouble import sentence
from tidemill.clock import machine_time
from tidemill.errors import BrokerUnavailable

__all__ = ["TAKE_MOST", "Seen", "Visit", "visit"]

_HEARTBEAT = 600
_NOT_FOUND = 404

TAKE_MOST = (1 << 16) - 1
"""Messages that a consumer may hold in its hands."""

_QUIET, _SILENT = 0.2, 2.0
"""Seconds without a message after which that was all: of what it counted, and of less."""

Seen = tuple[int, pika.BasicProperties, bytes]
"""A message: its tag, its properties and its body."""


class Visit:
    """What may be asked while it lasts. One thread's."""

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._hear: Any = connection.process_data_events  # whose types know no part of a second
        self.channel: BlockingChannel = connection.channel()

    def count(self, place: Place) -> tuple[int, int]:
        """How many messages are ready in a place, and how many consumers it has; 0 without it."""
        return self._look(place) or (0, 0)

    def _look(self, place: Place) -> tuple[int, int] | None:
        try:
            found: Any = self.channel.queue_declare(place.name, passive=True)
        except ChannelClosedByBroker as error:
            self._come_back(error)
            return None
        return found.method.message_count, found.method.consumer_count

    def purge(self, place: Place) -> int:
        """Delete what is ready in a place; how many that were."""
        try:
            purged: Any = self.channel.queue_purge(place.name)
        except ChannelClosedByBroker as error:
            self._come_back(error)
            return 0
        return int(purged.method.message_count)

    def take(self, place: Place, most: int) -> list[Seen]:
        """Messages of a place in their order: all that are ready, at most so many or TAKE_MOST.

        They are ours until they are acknowledged or the visit is over; then they stand where they
        stood, unless some were still on their way. What the server counts may be of a moment ago,
        so what it did not count is waited for, too, for a short while.
        """
        came: list[Seen] = []

        def push(_: Any, method: Any, properties: Any, body: bytes) -> None:
            came.append((method.delivery_tag, properties, body))

        most = min(most, TAKE_MOST)
        there = self._look(place)
        if there is None:
            return came
        counted = min(most, there[0])
        self.channel.basic_qos(prefetch_count=most)
        self.channel.basic_consume(place.name, push)
        before = -1
        while before < len(came) < most:
            before = len(came)
            until = machine_time() + (_QUIET if before >= counted else _SILENT)
            while len(came) == before and (left := until - machine_time()) > 0:
                self._hear(left)
        return came

    def _come_back(self, error: ChannelClosedByBroker) -> None:
        """The server closes the channel of whoever asks for what is not there."""
        if error.reply_code != _NOT_FOUND:
            raise error
        self.channel = self._connection.channel()


@contextlib.contextmanager
def visit(settings: Settings) -> Iterator[Visit]:
    """Connect for the time of a block.

    Raises:
        BrokerUnavailable: the server is not there, or refuses.
    """
    try:
        connection = pika.BlockingConnection(settings.parameters(_HEARTBEAT))
        try:
            yield Visit(connection)
        finally:
            with contextlib.suppress(AMQPError):
                connection.close()
    except (AMQPError, OSError) as error:
        raise BrokerUnavailable(sentence(error, settings)) from error
