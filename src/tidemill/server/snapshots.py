"""What all who watch are told: one look at the store a second, only while somebody watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from tidemill.app import Tidemill
from tidemill.errors import TidemillError

__all__ = ["Snapshots", "event"]

log = logging.getLogger("tidemill.server")

EVERY = 1.0
"""Seconds between two looks."""

KEEP_ALIVE = 15.0
"""Seconds after which a stream with nothing to say says that it is still there."""


def event(name: str, data: bytes) -> bytes:
    """A server-sent event; the data is JSON, so it is one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class Snapshots:
    """The numbers of the queues, as they change, for any number of listeners."""

    def __init__(self, mill: Tidemill, *, ended: Callable[[], bool]) -> None:
        self._mill = mill
        self._ended = ended
        self._listeners = 0
        self._latest = b""
        self._changed = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    async def listen(self) -> AsyncIterator[bytes]:
        """Events, the first at once; until the server ends."""
        self._listeners += 1
        if self._looking is None:
            self._latest = b""
            self._looking = asyncio.ensure_future(self._look())
        said = b""
        try:
            while not self._ended():
                if self._latest != said:
                    said = self._latest
                    yield event("queues", said)
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
                    rows = await self._mill.threaded(self._mill.broker.stats)
                    latest = msgspec.json.encode({"queues": [row.public() for row in rows]})
                except TidemillError as error:
                    log.warning("who watches the queues sees nothing now: %s", error)
                    latest = self._latest
                if latest != self._latest:
                    self._latest = latest
                    await self.wake()
                await asyncio.sleep(EVERY)
        finally:
            self._looking = None

    async def wake(self) -> None:
        """Have all who listen look."""
        async with self._changed:
            self._changed.notify_all()
