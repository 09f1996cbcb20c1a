"""Long polls: waits that end early when the client leaves or the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidemill.server.http.exchange import ClientGone, Exchange

T = TypeVar("T")


class LongPolls:
    """The long polls of a server. Once ``stopping`` is set, each poll is answered at once."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping

    async def wait(self, exchange: Exchange, work: Coroutine[Any, Any, T], late: T) -> T:
        """The result of the work; ``late`` when the server ends first.

        Raises:
            ClientGone: the client went away; the work was cancelled.
        """
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            ends = [working, exchange.leaving(), stopping]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()  # does nothing when the work is done
            await asyncio.wait([working])
            if not working.cancelled():
                return working.result()
            if exchange.has_left:
                raise ClientGone
            return late
        finally:
            working.cancel()
            stopping.cancel()
