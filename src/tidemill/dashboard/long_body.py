"""A long body on an event loop: threads make its parts, one at a time, as the reader takes them."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any


class PartsFromThread:
    """The parts of a body, made on demand, without empty parts. The caller must call :meth:`close`.

    Args:
        parts: makes the parts.
        run: makes a call in a thread, and returns its value.
    """

    def __init__(self, parts: Generator[bytes], run: Callable[..., Awaitable[Any]]) -> None:
        self._parts = parts
        self._run = run
        self._lock = threading.Lock()  # a thread goes on after a cancellation of its caller

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        while (part := await self._run(self._make)) is not None:
            if part:
                yield part

    def _make(self) -> bytes | None:
        with self._lock:
            return next(self._parts, None)

    def close(self) -> None:
        """Make no further part. If a thread makes a part now, this call waits for its end."""
        with self._lock:
            self._parts.close()


def filled(parts: Generator[bytes]) -> Generator[bytes]:
    """The parts of a body, without empty parts. Closing the generator closes ``parts``."""
    try:
        yield from filter(None, parts)
    finally:
        parts.close()
