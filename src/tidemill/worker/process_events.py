"""Calls the app's functions at the start and the stop of a worker process: ``mill.on(…)``.

Async functions run on the event loop that later runs the async jobs, so a connection pool that a
function opens there serves the jobs. Sync functions run in the main thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidemill.core.errors import BrokerUnavailable, TidemillError
from tidemill.worker.event_loop import Loop, new_runner
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.verdicts import describe

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

log = SafeLog("tidemill.worker")


class ProcessEvents:
    """The start and the stop of one process. ``runner`` exists once an async function has run."""

    def __init__(self, mill: Runtime) -> None:
        self._handlers = mill.event_handlers
        self.runner: asyncio.Runner | None = None

    def start(self) -> None:
        """Call the functions for the start, in the order of their declaration.

        Raises:
            TidemillError: a function has raised; the text has its traceback.
        """
        for function in self._handlers["process_start"]:
            try:
                awaitable = function()
                if inspect.isawaitable(awaitable):
                    self._run(awaitable)
            except BaseException as error:
                _, trace = describe(error)
                kind = BrokerUnavailable if isinstance(error, BrokerUnavailable) else TidemillError
                raise kind(
                    f"{_name(function)}, called at process_start, raised:\n{trace}"
                ) from error

    def _run(self, awaitable: Any) -> None:
        """Run an awaitable on the loop of the process, which has no thread yet.

        The calling thread may have a running loop of its own, so another thread runs the awaitable.
        """
        runner = self.runner = self.runner or new_runner()
        errors: list[BaseException] = []

        async def run() -> None:
            await awaitable

        def target() -> None:
            try:
                runner.run(run())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=target, name="tidemill-start")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def stop(self, loop: Loop) -> None:
        """Call the functions for the stop, in the opposite order; exceptions are logged."""
        for function in reversed(self._handlers["process_stop"]):
            try:
                awaitable = function()
                if inspect.isawaitable(awaitable):
                    _wait(awaitable, loop)
            except BaseException:
                log.exception("%s, called at process_stop, raised", _name(function))


def _wait(awaitable: Any, loop: Loop) -> None:
    async def run() -> None:
        await awaitable

    asyncio.run_coroutine_threadsafe(run(), loop.begun()).result()


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
