"""Middleware: functions that wrap the run of every job.

A middleware is a function ``(call_next, context)`` that returns the value of ``call_next()``. A
middleware may act before and after the call, raise, call again, or not call at all. The first in
the list is the outermost.

    def timed(call_next, context):
        start = time.perf_counter()
        try:
            return call_next()
        finally:
            log.info("%s took %.3f s", context.task, time.perf_counter() - start)

Around an async task ``call_next()`` returns an awaitable, and the middleware may be an async
function that awaits it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.client.context import JobContext

__all__ = ["Middleware", "compose"]

Middleware = Callable[[Callable[[], Any], JobContext], Any]


def compose(layers: Sequence[Middleware], call: Callable[[], Any], context: JobContext) -> Any:
    """Call through all layers, and return the value or an awaitable of it."""
    for layer in reversed(layers):
        if inspect.iscoroutinefunction(layer):
            call = functools.partial(_awaited, call)
        call = functools.partial(layer, call, context)
    return call()


async def _awaited(call: Callable[[], Any]) -> Any:
    value = call()
    return await value if inspect.isawaitable(value) else value
