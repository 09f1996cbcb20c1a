"""What all who watch are told: one look at the store a second, only while somebody watches.

All of them are sent the same bytes. A listener that reads slowly keeps an old snapshot in memory;
when those of all listeners have too many bytes, the listeners of the oldest are cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from tidemill.app import Tidemill
from tidemill.errors import TidemillError

__all__ = ["Snapshots", "event"]

log = logging.getLogger("tidemill.server")

EVERY = 1.0
"""Seconds between two looks."""

OLD = 64 * 1024 * 1024
"""Bytes that snapshots before the latest may have, which some listeners have not taken yet."""

KEEP_ALIVE = 15.0
"""Seconds after which a stream with nothing to say says that it is still there."""


def event(name: str, data: bytes) -> bytes:
    """A server-sent event; its data is JSON, so it is one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class Snapshots:
    """The numbers of the queues, as they change, for any number of listeners."""

    def __init__(self, mill: Tidemill, *, ended: Callable[[], bool]) -> None:
        self._mill = mill
        self._ended = ended
        self._listeners = 0
        self._latest = b""
        self._taking: dict[bytes, set[asyncio.Task[None]]] = {}  # by snapshot, the oldest first
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
                if self._latest is not said and self._latest:
                    said = self._latest
                    with self._is_taking(said):
                        yield said
                    continue
                try:
                    async with asyncio.timeout(KEEP_ALIVE), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    yield b": here\n\n"
        finally:
            self._listeners -= 1

    @contextlib.contextmanager
    def _is_taking(self, snapshot: bytes) -> Iterator[None]:
        """While the current task sends a snapshot to its listener."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._taking.setdefault(snapshot, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._taking.pop(snapshot, None)

    def _cut_off(self) -> None:
        """End the listeners that keep the oldest snapshots, where those are too many."""
        old = [snapshot for snapshot in self._taking if snapshot != self._latest]
        size = sum(map(len, old))
        for snapshot in old:
            if size <= OLD:
                return
            size -= len(snapshot)
            tasks = self._taking.pop(snapshot)
            log.warning("%d who watch the queues are cut off: they read too slowly", len(tasks))
            for task in list(tasks):
                task.cancel()

    async def _look(self) -> None:
        try:
            while self._listeners:
                try:
                    rows = await self._mill.threaded(self._mill.broker.stats)
                    rows_out = {"queues": [row.public() for row in rows]}
                    latest = event("queues", msgspec.json.encode(rows_out))
                except TidemillError as error:
                    log.warning("who watches the queues sees nothing now: %s", error)
                    latest = self._latest
                if latest != self._latest:
                    self._latest = latest
                    self._cut_off()
                    await self.wake()
                await asyncio.sleep(EVERY)
        finally:
            self._looking = None

    async def wake(self) -> None:
        """Have all who listen look."""
        async with self._changed:
            self._changed.notify_all()
