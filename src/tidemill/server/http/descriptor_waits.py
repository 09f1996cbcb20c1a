"""Waits for file descriptors in the event loop. Several waits may share a descriptor."""

from __future__ import annotations

import asyncio

from tidemill.brokers.contract.parked_waits import Until


class DescriptorWaits:
    """The waits of one event loop, by descriptor."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    async def wait(self, until: Until) -> None:
        """Wait until a descriptor is readable or hangs up, or until the time is over."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        fds = {*until.fds, *until.watched}
        timer = loop.call_later(max(0.0, until.seconds), _end, future)
        try:
            for fd in fds:
                self._add(fd, future)
            await future
        finally:
            timer.cancel()
            for fd in fds:
                self._drop(fd, future)

    def _add(self, fd: int, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.setdefault(fd, [])
        waiting.append(future)
        if len(waiting) == 1:
            asyncio.get_running_loop().add_reader(fd, self._is_ready, fd)

    def _drop(self, fd: int, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(fd, [])
        if future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[fd]
                asyncio.get_running_loop().remove_reader(fd)

    def _is_ready(self, fd: int) -> None:
        for future in list(self._waiting.get(fd, ())):
            _end(future)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
