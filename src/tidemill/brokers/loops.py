"""The event loop whose task waits for a call that is made in a thread.

A broker's calls block, so coroutines make them in threads. An async connection
belongs to the loop: the thread has the loop run a coroutine on it, and waits for the result.
"""

from __future__ import annotations

import contextvars
from asyncio import AbstractEventLoop

__all__ = ["WAITING_LOOP"]

WAITING_LOOP: contextvars.ContextVar[AbstractEventLoop | None]
WAITING_LOOP = contextvars.ContextVar("tidemill_waiting_loop", default=None)
