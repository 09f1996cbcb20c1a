"""Taking for who does not mean to wait: what is there, one by one, and nothing in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidemill.brokers.rabbitmq.desk import Desk
from tidemill.brokers.rabbitmq.ends import Ends
from tidemill.brokers.rabbitmq.shelf import Hold, Shelf
from tidemill.brokers.rabbitmq.tap import Tap
from tidemill.errors import BrokerUnavailable
from tidemill.locks import Event, RLock

__all__ = ["ANSWER_WITHIN", "Fetching"]

ANSWER_WITHIN = 10.0
"""Seconds the server has to say whether there is a message."""


class _Question:
    """One message that is asked for."""

    def __init__(self) -> None:
        self.answered = Event()
        self.found: Any = None
        self.dropped = False  # nobody waits for the answer any more


class Fetching:
    """Asks for messages of one owner, whose ``lock`` it is."""

    def __init__(self, desk: Desk, tap: Tap, ends: Ends, lock: RLock) -> None:
        self._desk = desk
        self._tap = tap
        self._ends = ends
        self._lock = lock

    def fetch(self, rows: list[list[Shelf]]) -> Iterator[Hold]:
        """Messages, each of the first place of a row that has one; the rows take turns.

        Raises:
            BrokerUnavailable: the server does not answer. An answer that comes later goes back.
        """
        while rows:
            row = rows.pop(0)
            hold = self._first(row)
            if hold is not None:
                rows.append(row)
                yield hold

    def _first(self, row: Sequence[Shelf]) -> Hold | None:
        return next(filter(None, map(self._get, row)), None)

    def _get(self, shelf: Shelf) -> Hold | None:
        """One message, if the server has one that can be used."""
        while True:
            with self._lock:
                if len(shelf):
                    return shelf.take()[0]  # it was on its way when the server was asked
            consumed = len(shelf.consumers) > 1  # by this owner, beside its calls for one message
            question = self._ask(shelf)
            found = question.found
            if isinstance(found, Hold):
                return found
            if found is None and not len(shelf) and not (consumed and self._brings(shelf)):
                return None

    def _brings(self, shelf: Shelf) -> bool:
        """Whether a consumer of this owner had the message.

        The server may answer that a queue is empty before it brings a message that it has given to
        a consumer of the same channel. The answer to a later call comes after that message.
        """
        return self._tap.sync(ANSWER_WITHIN) and len(shelf) > 0

    def _ask(self, shelf: Shelf) -> _Question:
        question = _Question()

        def heard(got: Any) -> None:
            found = got and self._ends.read(shelf, *got)
            with self._lock:
                if question.dropped and isinstance(found, Hold):
                    self._ends.give_back(found)
                question.found = found
            question.answered.set()

        self._tap.get(shelf, heard)
        try:
            if not question.answered.wait(ANSWER_WITHIN):
                with self._lock:
                    question.dropped = question.found is None
                if question.dropped:
                    raise BrokerUnavailable(self._desk.line.silence())
        except BaseException:  # a signal handler may have raised
            with self._lock:
                question.dropped = True
                if isinstance(question.found, Hold):
                    self._ends.give_back(question.found)
            raise
        return question
