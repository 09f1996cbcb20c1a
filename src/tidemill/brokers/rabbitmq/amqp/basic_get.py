"""Take ready messages for an owner that does not wait: one by one, and none in advance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.queue_state import HeldMessage, QueueState
from tidemill.brokers.rabbitmq.settle import Settlement
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.locks import Event, RLock

ANSWER_WITHIN = 10.0
"""Seconds within which the server must say whether it has a message."""


class BasicGet:
    """Fetches messages for one owner. ``lock`` is the owner's lock."""

    def __init__(self, channel: ConsumerChannel, settlement: Settlement, lock: RLock) -> None:
        self._channel = channel
        self._settlement = settlement
        self._lock = lock

    def fetch(self, rows: list[list[QueueState]]) -> Iterator[HeldMessage]:
        """Yield messages. Rows of places take turns; a row yields the first message of its places.

        Raises:
            BrokerUnavailable: the server does not answer. The message of a late answer goes back.
        """
        while rows:
            row = rows.pop(0)
            hold = next(filter(None, map(self._get, row)), None)
            if hold is not None:
                rows.append(row)
                yield hold

    def _get(self, state: QueueState) -> HeldMessage | None:
        """One message, if the server has a usable message."""
        while True:
            with self._lock:
                if len(state):
                    return state.take()[0]  # a message came during the last question
            consumed = len(state.consumers) > 1  # the place also has a consumer of this owner
            found = self._ask(state)
            if isinstance(found, HeldMessage):
                return found
            if found is None and not len(state) and not (consumed and self._brings(state)):
                return None

    def _brings(self, state: QueueState) -> bool:
        """Whether a consumer of this owner got the message.

        The server may answer that a queue is empty, although it has given a message to a consumer
        of the same channel. The message for the consumer comes before the answer to a later call.
        """
        return self._channel.sync(ANSWER_WITHIN) and len(state) > 0

    def _ask(self, state: QueueState) -> Any:
        """The next message of a place; None if there is none, and False if it was settled."""
        answered, found, dropped = Event(), list[Any](), list[bool]()

        def heard(got: Any) -> None:
            hold = got and self._settlement.read(state, *got)
            with self._lock:
                found.append(hold)
                if dropped:
                    give_back()
            answered.set()

        def give_back() -> None:  # nobody waits for the answer
            for hold in found:
                if isinstance(hold, HeldMessage):
                    self._settlement.give_back(hold)

        self._channel.get(state, heard)
        try:
            if not answered.wait(ANSWER_WITHIN):
                raise BrokerUnavailable(self._channel.silence())
        except BaseException:  # for example, a signal handler has raised
            with self._lock:
                dropped.append(True)
                give_back()
            raise
        return found[0]
