"""Desks of workers that speak HTTP: one for each set of tasks that such workers know.

All who ask at a desk know the same tasks, so whatever it leases can be handed to whoever waits for
the queue. What it leases by another name is set aside in the store for a worker that knows it. A
desk at which nobody has asked for a while is closed; what its clients hold stays theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from tidemill.server.desk import Desk
from tidemill.server.problems import Problem

__all__ = ["TaskDesks"]

MOST = 100
"""Desks at a time. Each has a thread, and is an owner in the store."""

IDLE = 60.0
"""Seconds after which a desk is closed that nobody asks."""


class _Place:
    """A desk, and how many ask there now."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.opened = asyncio.ensure_future(desk.open())
        self.asking = 0
        self.closing: asyncio.TimerHandle | None = None


class TaskDesks:
    """The desks of a server by the tasks they take. ``make`` makes one, which is not open yet."""

    def __init__(self, make: Callable[[Sequence[str]], Desk]) -> None:
        self._make = make
        self._places: dict[tuple[str, ...], _Place] = {}
        self._by_owner: dict[str, Desk] = {}
        self._ending: set[asyncio.Future[None]] = set()

    def of_owner(self, owner_id: str) -> Desk | None:
        """The open desk that is this owner in the store."""
        return self._by_owner.get(owner_id)

    @contextlib.asynccontextmanager
    async def at(self, tasks: Sequence[str]) -> AsyncIterator[Desk]:
        """The desk for these tasks, which stays open meanwhile.

        Raises:
            Problem: there are too many desks.
            TidemillError: the store cannot be reached.
        """
        names = tuple(sorted(set(tasks)))
        place = self._places.get(names) or self._open(names)
        place.asking += 1
        if place.closing is not None:
            place.closing.cancel()
            place.closing = None
        try:
            await asyncio.shield(place.opened)
            yield place.desk
        finally:
            place.asking -= 1
            if not place.asking:
                self._leave(names, place)

    def _open(self, names: tuple[str, ...]) -> _Place:
        if len(self._places) >= MOST:
            raise Problem(
                "too-many-requests",
                f"workers of this server name {MOST} different sets of tasks already; name the "
                f"same tasks in each request, or wait {IDLE:g} s",
                headers={"retry-after": f"{IDLE:.0f}"},
            )
        desk = self._make(names)
        place = self._places[names] = _Place(desk)
        self._by_owner[desk.owner.id] = desk
        return place

    def _leave(self, names: tuple[str, ...], place: _Place) -> None:
        if self._places.get(names) is not place:
            return
        if place.opened.done() and (place.opened.cancelled() or place.opened.exception()):
            self._forget(names)
            return
        loop = asyncio.get_running_loop()
        place.closing = loop.call_later(IDLE, self._close, names)

    def _forget(self, names: tuple[str, ...]) -> Desk:
        desk = self._places.pop(names).desk
        del self._by_owner[desk.owner.id]
        return desk

    def _close(self, names: tuple[str, ...]) -> None:
        ending = asyncio.ensure_future(self._forget(names).close())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close all desks."""
        for names, place in list(self._places.items()):
            if place.closing is not None:
                place.closing.cancel()
            with contextlib.suppress(Exception):
                await place.opened
            self._close(names)
        if self._ending:
            await asyncio.wait(self._ending)
