"""One read of the store for all viewers: queues, owners and facts, at most a second old."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.inline_jobs import move_due
from tidemill.client.search import users_queues
from tidemill.core.clock import clock
from tidemill.core.job import Owner
from tidemill.dashboard.routes import Routes
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.dashboard.page import Page

T = TypeVar("T")

EVERY = 1.0  # seconds for which viewers share a look


class Look(msgspec.Struct, frozen=True):
    """The data of one look: one read of the store."""

    at: float  # wall time of the look
    queues: list[QueueStats]  # without the queues of ``limits.hold``
    owners: list[Owner]  # workers and consumers; empty where the broker has no list of them
    facts: dict[str, Any]  # as ``tidemill info`` shows them

    @property
    def workers(self) -> list[Owner]:
        return [owner for owner in self.owners if owner.kind == "worker"]

    def queue(self, name: str) -> QueueStats | None:
        return next((row for row in self.queues if row.name == name), None)

    def serving(self, queue: str) -> list[Owner]:
        return [owner for owner in self.workers if not owner.queues or queue in owner.queues]

    def digest(self) -> bytes:
        """The queues and owners as bytes. When these bytes change, pages must be read again."""
        return msgspec.msgpack.encode((self.queues, [owner.id for owner in self.owners]))


class Cache:
    """Answers that several viewers share for some seconds; one thread makes an answer for all."""

    MOST = 500

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._makers: dict[object, threading.Lock] = {}
        self._kept: dict[object, tuple[float, object]] = {}

    def get(self, key: object, seconds: float, make: Callable[[], T]) -> T:
        """The answer under a key, or a new answer if that answer is older than ``seconds``."""
        with self._lock:
            if len(self._kept) > self.MOST:
                self._kept.clear()
                self._makers.clear()
            maker = self._makers.setdefault(key, threading.Lock())
        with maker:
            kept = self._kept.get(key)
            now = time.monotonic()
            if kept is not None and now - kept[0] < seconds:
                return cast(T, kept[1])
            made = make()
            self._kept[key] = time.monotonic(), made
            return made

    def clear(self) -> None:
        """Drop all answers, because an action has changed something."""
        with self._lock:
            self._kept.clear()


class Looks:
    """Takes looks at one store. Threads that want a look at the same time share one look."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._cache = Cache()

    def take(self, max_age: float = EVERY) -> Look:
        """The latest look, or a new look if the latest is older than ``max_age`` seconds."""
        return self._cache.get("look", max_age, self._look)

    def forget(self) -> None:
        self._cache.clear()

    def _look(self) -> Look:
        broker, at = self._mill.broker, clock.wall()
        move_due(broker)
        queues = users_queues(broker.stats())
        owners = broker.owners() if Feature.INSPECT in broker.features else []
        return Look(at, queues, owners, broker.info())


routes = Routes()

KEEP_ALIVE = 15.0  # seconds until a silent stream sends a comment, so that no proxy closes it


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
        return PlainTextResponse("this site has no event stream; its pages ask for changes", 404)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    news = page.dashboard.news.listen()
    return StreamingResponse(news, headers=headers, media_type="text/event-stream")
