"""Await something from sync code, whether or not an event loop runs in the calling thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


def run_awaitable(
    awaitable: Awaitable[Any],
    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run,
) -> Any:
    """The result of an awaitable. ``run_coroutine`` runs it where no event loop runs."""

    async def run() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_coroutine(run())
    # A thread cannot run two event loops, so another thread runs the awaitable.
    return _in_thread(lambda: asyncio.run(run()))


def _in_thread(function: Callable[[], Any]) -> Any:
    context = contextvars.copy_context()
    box: list[tuple[Any, BaseException | None]] = []

    def target() -> None:
        try:
            box.append((context.run(function), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=target, name="tidemill-inline")
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value
