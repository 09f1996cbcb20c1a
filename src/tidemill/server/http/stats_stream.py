"""The stream of queue statistics: one look at the store a second while there are listeners.

All listeners get the same bytes. A listener that takes no bytes for the server's ``body_timeout``
loses its connection, so few old snapshots stay in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from tidemill.app import Tidemill
from tidemill.errors import TidemillError

log = logging.getLogger("tidemill.server")

EVERY = 1.0  # seconds between two snapshots

KEEP_ALIVE = 15.0
"""Seconds after which a stream without news sends a comment, to keep its connection."""


def event(name: str, data: bytes) -> bytes:
    """A server-sent event. Its data is JSON on one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class StatsStream:
    """The statistics of all queues, whenever they change, for any number of listeners."""

    def __init__(self, mill: Tidemill, *, ended: Callable[[], bool]) -> None:
        self._mill = mill
        self._ended = ended
        self._listeners = 0
        self._latest = b""
        self._changed = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    async def listen(self) -> AsyncIterator[bytes]:
        """Events until the server shuts down, the first at once."""
        self._listeners += 1
        if self._looking is None:
            self._latest = b""
            self._looking = asyncio.ensure_future(self._look())
        sent = b""
        try:
            while not self._ended():
                if self._latest is not sent and self._latest:
                    sent = self._latest
                    yield sent
                    continue
                try:
                    async with asyncio.timeout(KEEP_ALIVE), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    yield b": here\n\n"
        finally:
            self._listeners -= 1

    async def _look(self) -> None:
        try:
            while self._listeners:
                try:
                    rows = await self._mill.runtime.threaded(self._mill.broker.stats)
                    rows_out = {"queues": [row.public() for row in rows]}
                    latest = event("queues", msgspec.json.encode(rows_out))
                except TidemillError as error:
                    log.warning("listeners of queue events get no news: %s", error)
                    latest = self._latest
                if latest != self._latest:
                    self._latest = latest
                    await self.wake()
                await asyncio.sleep(EVERY)
        finally:
            self._looking = None

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
