"""Long polls: waits that end with the client, and with the server.

A poll is no task of its own, nor is it one to listen for its client to go: there are thousands, and
all that most of them do is to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidemill.server.edge import Exchange, Gone

__all__ = ["Polls"]

T = TypeVar("T")


class _Poll:
    """One wait, in the task of its request."""

    __slots__ = ("_task", "gone", "interrupted")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.interrupted = False
        self.gone = False  # its client is

    def leave(self) -> None:
        """The client went away."""
        self.gone = True
        self.interrupt()

    def interrupt(self) -> None:
        """The wait is over, once."""
        if not self.interrupted:
            self.interrupted = True
            self._task.cancel()


class Polls:
    """The long polls of a server. From ``end`` on each is answered as if its time were over."""

    def __init__(self) -> None:
        self._open: set[_Poll] = set()
        self._ended = False

    async def wait(self, exchange: Exchange, work: Coroutine[Any, Any, T], late: T) -> T:
        """What the work comes to; ``late`` when the server ends first.

        Raises:
            Gone: the client went away; the work was cancelled.
        """
        task, line = asyncio.current_task(), exchange.line
        if line.lost or self._ended or task is None:
            work.close()
            if line.lost:
                raise Gone
            return late
        poll = _Poll(task)
        self._open.add(poll)
        line.watch(poll.leave)
        try:
            result = await work
        except asyncio.CancelledError:
            if not poll.interrupted or task.uncancel() > 0:  # it is the request that is cancelled
                raise
            if poll.gone:
                raise Gone from None
            return late
        finally:
            self._open.discard(poll)
            line.watch(None)
        if poll.interrupted:  # a moment too late
            task.uncancel()
        return result

    def end(self) -> None:
        """Answer all that wait, and those to come."""
        self._ended = True
        for poll in list(self._open):
            poll.interrupt()
