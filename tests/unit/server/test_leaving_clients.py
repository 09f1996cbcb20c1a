"""The server learns that a client has left, and cuts off a client that takes no bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill.server.http.exchange import ClientGone, Exchange, MemoryBudget
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


def test_a_client_that_takes_no_bytes_loses_its_connection() -> None:
    aborted: list[bool] = []

    async def receive() -> Any: ...

    async def send(message: Any) -> None:
        await asyncio.Event().wait()  # the client does not read, and the buffers are full

    async def stream() -> None:
        scope: Any = {"type": "http", "headers": [], "tidemill.abort": lambda: aborted.append(True)}
        settings = Settings(body_timeout=0.01)
        exchange = Exchange(scope, receive, send, settings, MemoryBudget(1))
        await exchange.send({"type": "http.response.body", "body": b"news", "more_body": True})

    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(stream(), 60))
    assert aborted == [True]
