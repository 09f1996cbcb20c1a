"""The unacknowledged messages of a channel, acknowledged with as few frames as possible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pika.channel import Channel

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.consumers import Consumer, Stage

_FEW, _STRAGGLE = 64, 0.02
"""With more than ``_FEW`` messages in hand, a single acknowledgement waits ``_STRAGGLE`` seconds.
In this time earlier jobs probably end, and then one frame acknowledges all their messages."""


class Acknowledgements:
    """The messages in hand: messages of the current channel whose jobs have not ended.

    All methods run in the connection thread.

    Attributes:
        open: the tags in hand in the order of arrival, each with its consumer.
    """

    def __init__(self, thread: ConnectionThread) -> None:
        self._thread = thread
        self._channel: Channel | None = None
        self.open: OrderedDict[int, Consumer] = OrderedDict()
        # Tags that wait to be acknowledged together with earlier tags.
        self._done: set[int] = set()
        self._stragglers: set[int] = set()  # the tags in ``_done`` that wait for the timer

    def begin_anew(self, channel: Channel | None) -> None:
        """Begin on a new channel: the server has taken back the messages in hand."""
        self._channel = channel
        self.open.clear()
        self._done.clear()
        self._stragglers.clear()

    def came(self, tag: int, consumer: Consumer) -> None:
        """Count a message that came."""
        self.open[tag] = consumer
        consumer.in_hand += 1

    def count(self, tags: Sequence[int]) -> tuple[list[int], bool]:
        """Take tags out of hand. Return the tags that were in hand.

        The second value is True when one of these messages came from a consumer that ends.
        """
        left, fallen = list[int](), False
        for tag in tags:
            consumer = self.open.pop(tag, None)
            if consumer is not None:
                left.append(tag)
                consumer.in_hand -= 1
                fallen = fallen or consumer.stage is not Stage.BEGUN
        return left, fallen

    def acknowledge(self, tags: Sequence[int]) -> None:
        """Acknowledge counted tags. One frame covers all tags before the first open tag."""
        self._done.update(tags)
        if not self._done or self._channel is None:
            return
        first_open = next(iter(self.open), max(self._done) + 1)
        together = [tag for tag in self._done if tag < first_open]
        if together:
            self._channel.basic_ack(max(together), multiple=True)
            self._done.difference_update(together)
        if len(self.open) <= _FEW:
            self.acknowledge_all()
        elif self._done and not self._stragglers:
            self._stragglers = set(self._done)
            self._thread.later(_STRAGGLE, self._acknowledge_stragglers)

    def acknowledge_all(self) -> None:
        """Acknowledge at once all tags that wait for earlier tags."""
        self._acknowledge_singly(self._done)

    def _acknowledge_stragglers(self) -> None:
        stragglers, self._stragglers = self._stragglers & self._done, set()
        self._acknowledge_singly(stragglers)
        self.acknowledge([])

    def _acknowledge_singly(self, tags: set[int]) -> None:
        if self._channel is not None and self._channel.is_open:
            for tag in sorted(tags):
                self._channel.basic_ack(tag)
            self._done -= tags
