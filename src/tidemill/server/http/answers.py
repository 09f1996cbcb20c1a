"""Answers: turn the result of an endpoint into the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tidemill.server.http.call import Call
from tidemill.server.http.exchange import ClientGone
from tidemill.server.http.memory_budget import SMALL


class Document(msgspec.Struct):
    """An answer that is encoded already."""

    data: bytes
    media: str = "application/json"


class Stream(msgspec.Struct):
    """Server-sent events. With ``shared`` all listeners get the same bytes, kept once."""

    events: AsyncIterator[bytes]
    shared: bool = False


async def send_answer(call: Call, result: Any) -> None:
    """Answer a call: nothing, a document, a stream of events, or any struct as JSON."""
    exchange = call.exchange
    if isinstance(result, Stream):
        await _send_events(call, result)
    elif isinstance(result, Document):
        await exchange.answer(call.status, result.data, result.media.encode(), call.headers)
    elif result is None:
        await exchange.answer(204, b"", b"", call.headers)
    else:
        data = msgspec.json.encode(result)
        if len(data) > SMALL and exchange.scope["method"] == "GET":
            exchange.share.check(len(data))
        await exchange.answer(call.status, data, b"application/json", call.headers)


async def _send_events(call: Call, stream: Stream) -> None:
    """Send events until they end, the client goes away, or the server ends."""
    exchange = call.exchange
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    if exchange.scope["method"] == "HEAD":  # the client would wait for an end that never comes
        await exchange.send({"type": "http.response.body", "body": b""})
        return
    leaving = exchange.leaving()

    async def send_all() -> None:
        async for event in stream.events:
            if len(event) > SMALL and not stream.shared:
                exchange.share.free()
                exchange.share.take(len(event))
            await exchange.send({"type": "http.response.body", "body": event, "more_body": True})

    sending = asyncio.ensure_future(send_all())
    try:
        await asyncio.wait([leaving, sending], return_when=asyncio.FIRST_COMPLETED)
        if sending.cancelled():  # the client reads too slowly
            raise ClientGone
        if sending.done():
            sending.result()
            await exchange.send({"type": "http.response.body", "body": b""})
    finally:
        sending.cancel()
