"""The stream of queue statistics: one look at the store a second while there are listeners.

All listeners get the same bytes. A slow listener keeps an old snapshot in memory. When the old
snapshots have too many bytes, the listeners of the oldest snapshots are cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from tidemill.app import Tidemill
from tidemill.errors import TidemillError

log = logging.getLogger("tidemill.server")

EVERY = 1.0
"""Seconds between two snapshots."""

OLD = 64 * 1024 * 1024
"""Bytes of older snapshots that slow listeners may keep in memory."""

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
        self._taking: dict[bytes, set[asyncio.Task[None]]] = {}  # by snapshot, the oldest first
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
                    with self._is_taking(sent):
                        yield sent
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
        """Record that the current task sends a snapshot to its listener."""
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
        """End the listeners of the oldest snapshots, when the old snapshots have too many bytes."""
        old = [snapshot for snapshot in self._taking if snapshot != self._latest]
        size = sum(map(len, old))
        for snapshot in old:
            if size <= OLD:
                return
            size -= len(snapshot)
            tasks = self._taking.pop(snapshot)
            log.warning(
                "%d listeners of queue events are cut off: they read too slowly", len(tasks)
            )
            for task in list(tasks):
                task.cancel()

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
                    self._cut_off()
                    await self.wake()
                await asyncio.sleep(EVERY)
        finally:
            self._looking = None

    async def wake(self) -> None:
        """Wake all listeners."""
        async with self._changed:
            self._changed.notify_all()
