"""The event loop whose task waits for a call in a thread.

Calls of a broker block, so coroutines make them in threads. An async connection belongs to the
loop: the thread lets the loop run a coroutine on the connection, and waits for the result.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

WAITING_LOOP: contextvars.ContextVar[AbstractEventLoop | None]
WAITING_LOOP = contextvars.ContextVar("tidemill_waiting_loop", default=None)
