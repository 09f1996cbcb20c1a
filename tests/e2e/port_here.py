"""The beanstalk port of an app, served by a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tidemill import Tidemill
from tidemill.server.beanstalk.listener import BeanstalkListener
from tidemill.server.beanstalk.shared_state import PortState
from tidemill.server.settings import Settings


class PortHere:
    """An open port, and what a test does to it."""

    def __init__(self, mill: Tidemill, **options: Any) -> None:
        self.mill = mill
        self._port = BeanstalkListener(mill, Settings(beanstalk="0", **options))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._port.open())
        self.number = self._port.port

    def _do(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(60)

    def drain(self) -> None:
        self._loop.call_soon_threadsafe(self._port.drain)

    def end(self) -> None:
        """Do what the server does first when it gets the order to end."""
        self._loop.call_soon_threadsafe(self._port.end)

    def at_once(self, what: Callable[[PortState], object]) -> None:
        """Do something in the port's loop, with nothing in between."""

        async def do() -> None:
            what(self._port._state)

        self._do(do())

    def close(self) -> None:
        self._do(self._port.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def port_of(mill: Tidemill, **options: Any) -> Iterator[PortHere]:
    """The port of an app, for a while."""
    port = PortHere(mill, **options)
    try:
        yield port
    finally:
        port.close()
