"""Long polls: waits that end early when the client leaves or the server shuts down.

There are thousands of polls, and most of them only time out. So a poll runs in the task of its
request, and needs no second task to notice that the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidemill.server.http.exchange import ClientGone, Exchange

T = TypeVar("T")


class _Poll:
    """One wait, in the task of its request."""

    __slots__ = ("_task", "gone", "interrupted")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.interrupted = False
        self.gone = False  # the client has left

    def leave(self) -> None:
        """End the wait, since the client has left."""
        self.gone = True
        self.interrupt()

    def interrupt(self) -> None:
        """End the wait; further calls do nothing."""
        if not self.interrupted:
            self.interrupted = True
            self._task.cancel()


class LongPolls:
    """The long polls of a server. After ``end`` each poll is answered as if its time were over."""

    def __init__(self) -> None:
        self._open: set[_Poll] = set()
        self._ended = False

    async def wait(self, exchange: Exchange, work: Coroutine[Any, Any, T], late: T) -> T:
        """The result of the work; ``late`` when the server ends first.

        Raises:
            ClientGone: the client went away; the work was cancelled.
        """
        task, connection = asyncio.current_task(), exchange.connection
        if connection.lost or self._ended or task is None:
            work.close()
            if connection.lost:
                raise ClientGone
            return late
        poll = _Poll(task)
        self._open.add(poll)
        connection.watch(poll.leave)
        try:
            result = await work
        except asyncio.CancelledError:
            if not poll.interrupted or task.uncancel() > 0:  # the whole request is cancelled
                raise
            if poll.gone:
                raise ClientGone from None
            return late
        finally:
            self._open.discard(poll)
            connection.watch(None)
        if poll.interrupted:  # the interrupt came too late: the work is done
            task.uncancel()
        return result

    def end(self) -> None:
        """Answer all open polls, and all later polls at once."""
        self._ended = True
        for poll in list(self._open):
            poll.interrupt()
