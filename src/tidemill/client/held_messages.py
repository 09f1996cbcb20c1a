"""The messages that this process holds, by id, so that code with only the id can settle them.

A message leaves the table when it is settled, or when its lease turns out to be lost. A message
that nobody settles leaves the table some time after its ttr.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.client.message import Message
from tidemill.core.errors import LeaseLost

_FEW = 1000
"""A table of up to this many messages is not searched for messages whose ttr has run out."""


class HeldMessages:
    """A table of held messages, without messages with ``ttr=0``, which are settled already."""

    def __init__(self) -> None:
        self._by_id: dict[str, Message] = {}
        self._most = _FEW

    def add(self, messages: Iterable[Message]) -> None:
        """Add messages that are handed to their consumer."""
        self._by_id |= {message.id: message for message in messages if not message.at_most_once}
        if len(self._by_id) > self._most:
            for message in list(self._by_id.values()):
                if message.is_over:
                    self.discard(message)
            self._most = max(_FEW, 2 * len(self._by_id))  # search again at twice this size

    def discard(self, message: Message) -> None:
        """Forget a message. A later lease of the same message stays."""
        found = self._by_id.pop(message.id, None)
        if found is not None and found is not message:
            self._by_id.setdefault(message.id, found)

    def get(self, queue: str, message_id: str) -> Message:
        """The held message with this id.

        Raises:
            LeaseLost: this process holds no such message of the queue.
        """
        message = self._by_id.get(message_id)
        if message is None or message.queue != queue:
            raise not_held(queue, message_id)
        return message


def not_held(queue: str, message_id: str) -> LeaseLost:
    """The error for an id whose message is not held here."""
    return LeaseLost(
        f"this process holds no message {message_id!r} of queue {queue!r}: it was settled, its ttr "
        "ran out, or another process took it; settle a message once, where it was taken"
    )
