"""Live updates: each process reads the store once a second for all its viewers.

Without viewers the process does not read. A viewer gets server-sent events. An event tells only
that something has changed. Then the browser requests the page again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response, StreamingResponse

from tidemill.core.errors import TidemillError
from tidemill.dashboard.look import EVERY, Looks
from tidemill.dashboard.page import NotFound, Page
from tidemill.dashboard.routes import Routes

routes = Routes()

KEEP_ALIVE = 15.0
"""Seconds after which a stream without events sends a comment, so that no proxy closes it."""

_HELLO = b": live\n\nretry: 2000\n\n"


class News:
    """The updates of one store, for any number of viewers on one event loop."""

    def __init__(self, looks: Looks, ended: Callable[[], bool]) -> None:
        self._looks = looks
        self._ended = ended
        self._viewers = 0
        self._version = 0
        self._digest = b""
        self._changed: asyncio.Event | None = None
        self._looking: asyncio.Task[None] | None = None

    async def listen(self) -> AsyncGenerator[bytes]:
        """The parts of an event stream: a comment at once, then an event for each change."""
        self._viewers += 1
        if self._looking is None:
            self._changed = asyncio.Event()
            self._looking = asyncio.ensure_future(self._look())
        seen = self._version
        try:
            yield _HELLO
            while not self._ended():
                if seen != self._version:
                    seen = self._version
                    yield b"event: changed\ndata: %d\n\n" % seen
                    continue
                if not await self._until_changed():
                    yield b": here\n\n"
        finally:
            self._viewers -= 1

    async def _until_changed(self) -> bool:
        """Wait for a change, or for the end of the process. False when a comment must be sent."""
        changed = self._changed  # a change at the moment of a timeout stays set in this event
        assert changed is not None
        for _ in range(int(KEEP_ALIVE / EVERY)):
            try:
                async with asyncio.timeout(EVERY):
                    await changed.wait()
                    return True
            except TimeoutError:
                if self._ended():
                    return True
        return False

    async def _look(self) -> None:
        try:
            while self._viewers and not self._ended():
                with contextlib.suppress(TidemillError):  # the pages of the viewers show the error
                    look = await asyncio.to_thread(self._looks.take, EVERY / 2)
                    digest = look.digest()
                    if digest != self._digest:
                        self._digest = digest
                        self._version += 1
                        self._wake()
                await asyncio.sleep(EVERY)
        finally:
            self._looking = None
            self._wake()

    def _wake(self) -> None:
        """Wake all viewers. Each viewer then waits for the next change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = asyncio.Event()


@routes.get("/live")
def live(page: Page) -> Response:
    """The event stream of a page, in a site that is not of WSGI."""
    if page.dashboard.live != "sse":
        raise NotFound("this site has no event stream; its pages ask for changes")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    news = page.dashboard.news.listen()
    return StreamingResponse(news, headers=headers, media_type="text/event-stream")
