"""The broker calls of a job server in a thread of the tests: many stores, each below a path."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import shutil
import socket
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import uvicorn
from starlette.types import Receive, Scope, Send

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.registry import open_broker
from tidemill.server.http.broker_rpc import BrokerRpc
from tidemill.server.http.waits import give_up_silent_owners

T = TypeVar("T")
MOST = 16 * 1024 * 1024


def listen(port: int = 0) -> socket.socket:
    """A socket that asyncio knows for one of TCP, so that it sends what it is told at once."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(128)
    return sock


class _Store(NamedTuple):
    url: str
    broker: Broker
    calls: BrokerRpc
    over: asyncio.Event
    counting: asyncio.Future[None]


class Stores:
    """Job servers as they are mounted in one: each store has its own, below a path of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._stores: dict[str, _Store] = {}  # by path
        self._sock = listen()
        self.port = int(self._sock.getsockname()[1])
        config = uvicorn.Config(self, log_level="error", lifespan="off", loop="asyncio")
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix="stores"))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._server.serve([self._sock]))

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def open(self, url: str) -> str:
        """The url at which the store of a url is served; it is opened, or was before."""
        for path, store in self._stores.items():
            if store.url == url:
                return self._at(path)
        broker = open_broker(url)
        path = f"s{next(self._numbers)}"
        self._stores[path] = self._do(self._begin(url, broker))
        return self._at(path)

    def _at(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    async def _begin(self, url: str, broker: Broker) -> _Store:
        broker.tick()  # or the first who waits would, and come back for it
        over = asyncio.Event()
        calls = BrokerRpc(broker, lambda scope, role: None, over, MOST)
        counting = asyncio.ensure_future(give_up_silent_owners(broker, over))
        return _Store(url, broker, calls, over, counting)

    def paths(self) -> set[str]:
        """Of all stores that are served."""
        return set(self._stores)

    def forget(self, part: str) -> None:
        """Close the stores with this in their url."""
        for path, store in list(self._stores.items()):
            if part in store.url:
                self.end(path)

    def end(self, path: str) -> None:
        """Close the store of a path."""
        store = self._stores.pop(path)
        self._do(self._close(store))
        with contextlib.suppress(OSError):
            store.broker.close()

    async def _close(self, store: _Store) -> None:
        store.over.set()
        await store.calls.close()
        await store.counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, path, rest = scope["path"].split("/", 2)
        scope["path_params"] = {"name": rest.removeprefix("v1/broker/")}
        await self._stores[path].calls(scope, receive, send)


_stores: list[Stores] = []
_folders: list[str] = []


def served(url: str) -> str:
    """The store of a url behind the job server of this process."""
    if not _stores:
        _stores.append(Stores())
    return _stores[0].open(url)


@contextlib.contextmanager
def served_for_a_while() -> Iterator[None]:
    """Close the stores afterwards that were served first within the block."""
    before = _stores[0].paths() if _stores else set()
    yield
    for stores in _stores:
        for path in stores.paths() - before:
            stores.end(path)


def forget_served(part: object) -> None:
    """Give up what was served with this in its url."""
    for stores in _stores:
        stores.forget(str(part))


def http_url(name: str) -> str:
    """A store of that name on LMDB behind its job server, for as long as the test lasts."""
    if not _folders:
        _folders.append(tempfile.mkdtemp(prefix="tidemill-test-served-"))
        atexit.register(shutil.rmtree, _folders[0], ignore_errors=True)
    return served(f"lmdb://{_folders[0]}/{name}")
