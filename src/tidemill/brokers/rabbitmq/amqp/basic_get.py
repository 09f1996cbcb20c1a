"""Take ready messages for an owner that does not wait: one by one, and none in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.queue_state import HeldMessage, QueueState
from tidemill.brokers.rabbitmq.settle import Settlement
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.locks import Event, RLock

ANSWER_WITHIN = 10.0
"""Seconds within which the server must say whether it has a message."""


class _Question:
    """A question for one message."""

    def __init__(self) -> None:
        self.answered = Event()
        self.found: Any = None
        self.dropped = False  # True when nobody waits for the answer


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
            hold = self._first(row)
            if hold is not None:
                rows.append(row)
                yield hold

    def _first(self, row: Sequence[QueueState]) -> HeldMessage | None:
        return next(filter(None, map(self._get, row)), None)

    def _get(self, state: QueueState) -> HeldMessage | None:
        """One message, if the server has a usable message."""
        while True:
            with self._lock:
                if len(state):
                    return state.take()[0]  # a message came during the last question
            consumed = len(state.consumers) > 1  # the place also has a consumer of this owner
            question = self._ask(state)
            found = question.found
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

    def _ask(self, state: QueueState) -> _Question:
        question = _Question()

        def heard(got: Any) -> None:
            found = got and self._settlement.read(state, *got)
            with self._lock:
                if question.dropped and isinstance(found, HeldMessage):
                    self._settlement.give_back(found)
                question.found = found
            question.answered.set()

        self._channel.get(state, heard)
        try:
            if not question.answered.wait(ANSWER_WITHIN):
                raise BrokerUnavailable(self._channel.silence())
        except BaseException:  # for example, a signal handler has raised
            with self._lock:
                question.dropped = True
                if isinstance(question.found, HeldMessage):
                    self._settlement.give_back(question.found)
            raise
        return question
