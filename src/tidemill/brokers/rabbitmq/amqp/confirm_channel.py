"""A channel with confirms, and the messages under way over it."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from typing import Any, Protocol, cast

import pika
from pika.channel import Channel
from pika.spec import Basic

from tidemill.brokers.rabbitmq.amqp.connection import Connection
from tidemill.brokers.rabbitmq.amqp.frames import Confirm, decoded, encoded, publication
from tidemill.brokers.rabbitmq.amqp.publish_windows import Batch, Outgoing, PublishWindow


class PublishOutcome(enum.Enum):
    """The outcome of a message: the server stored or refused the message, or no queue took it."""

    STORED = enum.auto()
    REFUSED = enum.auto()
    RETURNED = enum.auto()


Sent = tuple[PublishWindow, Batch, Outgoing]
Answer = tuple[PublishWindow, Batch, Outgoing, PublishOutcome]


class ConfirmListener(Protocol):
    """Listens to confirm channels. Called in the connection thread."""

    def channel_opened(self, channel: ConfirmChannel) -> None:
        """The channel is open: messages may be sent."""

    def channel_answered(self, channel: ConfirmChannel, answers: list[Answer]) -> None:
        """The server has confirmed, refused or returned messages."""

    def channel_closed(self, channel: ConfirmChannel, code: int, why: str) -> None:
        """The server closed the channel, though the connection lives."""


class ConfirmChannel:
    """One channel, from its opening to its end.

    Attributes:
        destination: the queue that the channel checks; empty for the main channel.
        sent: the messages under way by delivery tag, in the order of sending.
        quiet: the number of checks by ``Publisher`` since the last answer of the server.
        spent: True after a queue refused a message. Another channel replaces this channel when all
            its messages are answered. In RabbitMQ before 3.12.5 a channel remembers the leader of a
            queue from its first message there. It refuses later messages while the node of that
            leader is away.
    """

    def __init__(
        self, connection: pika.SelectConnection, listener: ConfirmListener, destination: str = ""
    ) -> None:
        self.destination = destination
        self.quiet = 0
        self.sent: dict[int, Sent] = {}
        self._returned: set[int] = set()
        self._next = 1  # the tag of the next message
        self._listener = listener
        self._begun = self._left = self.spent = False
        self._connection = cast(Connection, connection)
        self._channel: Channel = connection.channel(on_open_callback=self._opened)
        self._channel.add_on_close_callback(self._closed)

    @property
    def is_open(self) -> bool:
        """Whether messages may be sent over the channel."""
        return self._begun and not self._left and self._channel.is_open

    def send(self, some: Sequence[Sent]) -> None:
        """Send messages."""
        self.sent.update(zip(range(self._next, self._next + len(some)), some, strict=True))
        self._next += len(some)
        items = [item for _, _, item in some]
        if not self._connection.is_quick:
            for e in items:
                properties = decoded(e.properties)
                self._channel.basic_publish("", e.key, e.body, properties, mandatory=True)
            return
        number, most = self._channel.channel_number, self._connection.body_most
        frames = [publication(number, e.key, e.properties, e.body, most) for e in items]
        self._connection.write(b"".join(frames), 3 * len(frames))

    def take_back(self) -> list[Sent]:
        """Take out the messages under way, whose answers will not come."""
        sent, self.sent = list(self.sent.values()), {}
        return sent

    def close(self) -> None:
        """Leave the channel."""
        self._left = True
        if self._channel.is_open:
            self._channel.close()

    # -- called by the channel ------------------------------------------------------------------

    def _opened(self, channel: Channel) -> None:
        if self._left:
            channel.close()
            return
        channel.add_on_return_callback(self._on_return)
        self._connection.hear_confirms(channel, self._confirmed)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._begin())

    def _begin(self) -> None:
        if not self._left:
            self._begun = True
            self._listener.channel_opened(self)

    def _closed(self, channel: Channel, reason: Any) -> None:
        was_left, self._left = self._left, True
        # If the connection has ended, it reports this itself.
        if not was_left and channel.connection.is_open:
            code, why = getattr(reason, "reply_code", 0), getattr(reason, "reply_text", reason)
            self._listener.channel_closed(self, code, str(why))

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        """Remember that a message was returned. The server confirms this message right after."""
        returned = (method.routing_key, encoded(properties), body)
        for tag, (_, _, item) in self.sent.items():
            sent = (item.key, item.properties, item.body)
            if sent == returned and tag not in self._returned:
                self._returned.add(tag)
                break

    def _on_confirm(self, frame: Any) -> None:
        """A confirm that came in pieces."""
        method = frame.method
        self._confirmed([(method.delivery_tag, method.multiple, isinstance(method, Basic.Ack))])

    def _confirmed(self, confirms: Sequence[Confirm]) -> None:
        if self._left:
            return
        answers: list[Answer] = []
        for last, multiple, stored in confirms:
            tags = [last]
            if multiple:
                # The lambda is used at once, in this turn of the loop, so that it sees the right
                # ``last``.
                tags = list(itertools.takewhile(lambda tag: tag <= last, self.sent))  # noqa: B023
            came = PublishOutcome.STORED if stored else PublishOutcome.REFUSED
            for tag in tags:
                found = self.sent.pop(tag, None)
                if found is not None:
                    back = tag in self._returned
                    answers.append((*found, PublishOutcome.RETURNED if back else came))
                    self._returned.discard(tag)
        self.quiet = 0
        self._listener.channel_answered(self, answers)
