"""What of a channel is in hand, and how it is acknowledged: as much as can be with one frame."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pika.channel import Channel

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.consumers import Consumer, Stage

__all__ = ["Acknowledgements"]

_FEW, _STRAGGLE = 64, 0.02
"""With more messages than so many in hand one is not acknowledged by itself before that many
seconds, within which those before it are likely to be done: then one frame does for all."""


class Acknowledgements:
    """The messages of one channel after the other. All of it runs in the line's thread.

    Attributes:
        open: the tags in hand, as they came, and who brought them.
    """

    def __init__(self, thread: ConnectionThread) -> None:
        self._thread = thread
        self._channel: Channel | None = None
        self.open: OrderedDict[int, Consumer] = OrderedDict()
        self._done: set[int] = set()  # to be acknowledged with those before them
        self._stragglers: set[int] = set()  # of these: those that have waited for a while

    def begin_anew(self, channel: Channel | None) -> None:
        """What is in hand is the server's again."""
        self._channel = channel
        self.open.clear()
        self._done.clear()
        self._stragglers.clear()

    def came(self, tag: int, consumer: Consumer) -> None:
        """A message is in hand."""
        self.open[tag] = consumer
        consumer.in_hand += 1

    def count(self, tags: Sequence[int]) -> tuple[list[int], bool]:
        """Those that are in hand, and are not any more; whether nothing comes in place of some."""
        left, fallen = list[int](), False
        for tag in tags:
            consumer = self.open.pop(tag, None)
            if consumer is not None:
                left.append(tag)
                consumer.in_hand -= 1
                fallen = fallen or consumer.stage is not Stage.BEGUN
        return left, fallen

    def acknowledge(self, tags: Sequence[int]) -> None:
        """These have been counted: all up to the first that is still open at once."""
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
        """What waits for those before it waits no longer."""
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
