"""Connections that no thread uses at the moment, kept for the next call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tidemill.core.signals import defer_signals, resume_signals


class Closable(Protocol):
    """The part of a connection that this module uses."""

    def close(self) -> None:
        """Hang up."""


T = TypeVar("T", bound=Closable)


class Spares(Generic[T]):
    """Spare connections of a broker, for any thread. Each step is atomic without a lock."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._spare: list[T] = []
        self._closed = False

    def lend(self) -> Lent[T]:
        """Lend a connection for a block, which signal handlers interrupt only in its waits."""
        return Lent(self)

    def take(self) -> T:
        """Take a connection that no other thread uses; :meth:`give_back` ends the use."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._make()

    def give_back(self, connection: T) -> None:
        """Keep a connection for the next call, or close the connection after :meth:`close`."""
        self._spare.append(connection)
        if self._closed:  # check last: then this thread or the closing thread closes the connection
            self._hang_up()

    def close(self) -> None:
        """Close the spare connections now, and lent connections when their threads return them."""
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._spare.pop().close()


class Lent(Generic[T]):
    """A connection for the time of a block."""

    __slots__ = ("_began", "_connection", "_spares")

    def __init__(self, spares: Spares[T]) -> None:
        self._spares = spares

    def __enter__(self) -> T:
        self._began = defer_signals()
        try:
            self._connection = self._spares.take()
        except BaseException:
            if self._began:
                resume_signals()
            raise
        return self._connection

    def __exit__(self, *_: object) -> None:
        try:
            self._spares.give_back(self._connection)
        finally:
            if self._began:
                resume_signals()
