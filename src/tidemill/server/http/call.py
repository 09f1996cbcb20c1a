"""A call of an endpoint: its request, the server's parts, and its work, perhaps in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tidemill.core.job import Record
from tidemill.server.http.backend import Backend
from tidemill.server.http.exchange import Exchange
from tidemill.server.http.receipts import Receipt, parse, sealed
from tidemill.server.tokens import Role

T = TypeVar("T")

LARGE = 256 * 1024
"""A body of more bytes is parsed in a thread, so that the event loop serves other clients."""


class Call:
    """One call of an endpoint. ``status`` is the status of its answer, and may be changed."""

    __slots__ = ("backend", "exchange", "has_turn", "headers", "status")

    def __init__(self, backend: Backend, exchange: Exchange, status: int) -> None:
        self.backend = backend
        self.exchange = exchange
        self.status = status
        self.headers: dict[str, str] | None = None
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
        """The parts of a receipt of this client.

        Raises:
            Problem: the receipt is invalid, belongs to another token, or needs no settling.
        """
        return parse(receipt, self._secret)

    @property
    def _secret(self) -> str:
        """The key that seals receipts of a token for some queues; empty for all other clients."""
        token = self.exchange.token
        return token.sha256 if token is not None and token.queues else ""
