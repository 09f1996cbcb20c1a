"""Shared owners of workers that speak HTTP: one for each set of tasks that workers know.

All clients of such an owner know the same tasks, so each client may get any task that the owner
leases. A task of another name is given back, and tried again later. A shared owner is closed when
it had no requests for a while. Its clients keep the jobs that they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from tidemill.server.http.problems import Problem
from tidemill.server.shared_owner import SharedOwner

MAX_OWNERS = 100
"""Shared owners at a time. Each has a thread, and is an owner in the store."""

IDLE = 60.0
"""Seconds after which a shared owner without clients is closed."""


class _Entry:
    """A shared owner, and the number of requests that use it now."""

    def __init__(self, shared_owner: SharedOwner) -> None:
        self.shared_owner = shared_owner
        self.opened = asyncio.ensure_future(shared_owner.open())
        self.clients = 0
        self.closing: asyncio.TimerHandle | None = None


class TaskOwners:
    """The shared owners of a server by their tasks. ``make`` makes an owner without opening it."""

    def __init__(self, make: Callable[[Sequence[str]], SharedOwner]) -> None:
        self._make = make
        self._entries: dict[tuple[str, ...], _Entry] = {}
        self._ending: set[asyncio.Future[None]] = set()

    def of_owner(self, owner_id: str) -> SharedOwner | None:
        owners = (entry.shared_owner for entry in self._entries.values())
        return next((it for it in owners if it.owner.id == owner_id), None)

    @contextlib.asynccontextmanager
    async def use(self, tasks: Sequence[str]) -> AsyncIterator[SharedOwner]:
        """The shared owner for these tasks; it stays open while the context lasts."""
        names = tuple(sorted(set(tasks)))
        entry = self._entries.get(names) or self._open(names)
        entry.clients += 1
        if entry.closing is not None:
            entry.closing.cancel()
            entry.closing = None
        try:
            await asyncio.shield(entry.opened)
            yield entry.shared_owner
        finally:
            entry.clients -= 1
            if not entry.clients:
                self._leave(names, entry)

    def _open(self, names: tuple[str, ...]) -> _Entry:
        if len(self._entries) >= MAX_OWNERS:
            raise Problem(
                "too-many-requests",
                f"workers of this server already use {MAX_OWNERS} different sets of tasks; name "
                f"the same tasks in each request, or wait {IDLE:g} s",
                headers={"retry-after": f"{IDLE:.0f}"},
            )
        entry = self._entries[names] = _Entry(self._make(names))
        return entry

    def _leave(self, names: tuple[str, ...], entry: _Entry) -> None:
        if self._entries.get(names) is not entry:
            return
        if entry.opened.done() and (entry.opened.cancelled() or entry.opened.exception()):
            del self._entries[names]
            return
        loop = asyncio.get_running_loop()
        entry.closing = loop.call_later(IDLE, self._close, names)

    def _close(self, names: tuple[str, ...]) -> None:
        ending = asyncio.ensure_future(self._entries.pop(names).shared_owner.close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close all shared owners."""
        for names, entry in list(self._entries.items()):
            if entry.closing is not None:
                entry.closing.cancel()
            with contextlib.suppress(Exception):
                await entry.opened
            self._close(names)
        if self._ending:
            await asyncio.wait(self._ending)
