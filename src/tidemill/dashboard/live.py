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


class News:
    """The updates of one store, for any number of viewers on one event loop."""

    def __init__(self, looks: Looks, ended: Callable[[], bool]) -> None:
        self._looks = looks
        self._ended = ended
        self._latest = b""
        self._looking: asyncio.Task[None] | None = None  # at most one thread, shared by all

    async def listen(self) -> AsyncGenerator[bytes]:
        """The parts of an event stream: a comment at once, then an event for each change."""
        seen, quiet = self._latest, 0.0
        yield b": live\n\nretry: 2000\n\n"
        while not self._ended():
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(asyncio.to_thread(self._look))
            await asyncio.wait([self._looking], timeout=EVERY)
            if seen != self._latest:
                seen, quiet = self._latest, 0.0
                yield b"event: changed\ndata: 1\n\n"
            elif quiet >= KEEP_ALIVE:
                quiet = 0.0
                yield b": here\n\n"
            await asyncio.sleep(EVERY)
            quiet += EVERY

    def _look(self) -> None:
        with contextlib.suppress(TidemillError):  # the pages of the viewers show the error
            self._latest = self._looks.take(EVERY).digest()


@routes.get("/live")
def live(page: Page) -> Response:
    """The event stream of a page, in a site that is not of WSGI."""
    if page.dashboard.live != "sse":
        raise NotFound("this site has no event stream; its pages ask for changes")
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    news = page.dashboard.news.listen()
    return StreamingResponse(news, headers=headers, media_type="text/event-stream")
