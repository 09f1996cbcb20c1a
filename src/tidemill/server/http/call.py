"""A call of an endpoint: its request, its work, perhaps in a thread, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec

from tidemill.core.job import Record
from tidemill.server.http.backend import Backend
from tidemill.server.http.exchange import SMALL, Exchange
from tidemill.server.http.receipts import Receipt, parse, sealed
from tidemill.server.tokens import Role

T = TypeVar("T")

LARGE = 256 * 1024
"""A body of more bytes is parsed in a thread, so that the event loop serves other clients."""


class Stream(msgspec.Struct):
    """Server-sent events. With ``shared`` all listeners get the same bytes, kept once."""

    events: AsyncIterator[bytes]
    shared: bool = False


class Call:
    """One call of an endpoint. ``status`` is the status of its answer, and may be changed."""

    def __init__(self, backend: Backend, exchange: Exchange, status: int) -> None:
        self.backend = backend
        self.exchange = exchange
        self.status = status
        self.has_turn = False

    @property
    def sees_arguments(self) -> bool:
        """Whether the client may see arguments and results of jobs."""
        return self.exchange.role >= Role[self.backend.settings.see_arguments.upper()]

    def shown(self, record: Record) -> Record:
        """A record as the client may see it."""
        return record if self.sees_arguments else record.without_values()

    # -- large bodies: one at a time, since a decoded body may be many times larger ---------------

    async def compute(self, function: Callable[[], T], size: int) -> T:
        """Call a function that handles ``size`` bytes; in a thread when they are many."""
        if size <= LARGE and not self.has_turn:
            return function()
        await self._take_turn()
        try:
            return await self.backend.run(function)
        finally:
            self.end_turn()

    async def decode_large(
        self, decode: Callable[[bytes], Any], data: bytes, *, keep_turn: bool
    ) -> Any:
        """Decode a large body in a thread. With ``keep_turn`` keep the turn for :meth:`compute`."""
        await self._take_turn()
        try:
            return await self.backend.run(decode, data)
        finally:
            if not keep_turn:
                self.end_turn()

    async def _take_turn(self) -> None:
        if not self.has_turn:
            await self.backend.large_body.acquire()
            self.has_turn = True

    def end_turn(self) -> None:
        """Let the next large body be handled; does nothing without a turn."""
        if self.has_turn:
            self.has_turn = False
            self.backend.large_body.release()

    # -- receipts ---------------------------------------------------------------------------------

    def sealed(self, receipt: str) -> str:
        """The receipt in the form for this client."""
        return sealed(receipt, self._secret) if self._secret else receipt

    def parse(self, receipt: str) -> Receipt:
        """The parts of a receipt of this client."""
        return parse(receipt, self._secret)

    @property
    def _secret(self) -> str:
        """The key that seals receipts of a token for some queues; empty for all other clients."""
        token = self.exchange.token
        return token.sha256 if token is not None and token.queues else ""


async def send_answer(call: Call, result: Any) -> None:
    """Answer a call: nothing, a stream of events, or any struct as JSON."""
    exchange = call.exchange
    if isinstance(result, Stream):
        await _send_events(call, result)
    elif result is None:
        await exchange.answer(204, b"", b"")
    else:
        data = msgspec.json.encode(result)
        if len(data) > SMALL and exchange.scope["method"] == "GET":
            exchange.hold(len(data))
        await exchange.answer(call.status, data, b"application/json")


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
                exchange.release()
                exchange.hold(len(event))
            await exchange.send({"type": "http.response.body", "body": event, "more_body": True})

    sending = asyncio.ensure_future(send_all())
    try:
        await asyncio.wait([leaving, sending], return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
            await exchange.send({"type": "http.response.body", "body": b""})
    finally:
        sending.cancel()
