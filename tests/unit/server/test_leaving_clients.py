"""The server learns that a client has left before it writes an answer into the void."""

from __future__ import annotations

import asyncio
from typing import Any

from tidemill.server.http.exchange import Exchange, MemoryBudget
from tidemill.server.settings import Settings


def test_a_client_has_left_as_soon_as_its_connection_closes() -> None:
    closing = False

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None: ...

    async def look() -> list[bool]:
        nonlocal closing
        scope: Any = {"type": "http", "headers": [], "tidemill.is_closing": lambda: closing}
        exchange = Exchange(scope, receive, send, Settings(), MemoryBudget(1))
        exchange.leaving()
        before = exchange.has_left
        closing = True  # the task of ``leaving`` does not know yet
        after = exchange.has_left
        exchange.end()
        return [before, after]

    assert asyncio.run(look()) == [False, True]
