"""Verdicts and touches that wait for the next exchange, and the answers to their clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidemill.core.job import Note, Verdict
from tidemill.server.waiters import PendingCommit

Answer = tuple[asyncio.Future[Any] | None, bool | Exception]


class PendingVerdict(NamedTuple):
    """A verdict, or a touch with notes, and the future of the client that waits for the answer."""

    verdict: Verdict | None
    touch: tuple[int, float] | None
    answer: asyncio.Future[bool] | None
    commit: PendingCommit | None
    notes: Sequence[Note] = ()

    @property
    def is_void(self) -> bool:
        """True when the job was lost with a failed commit."""
        return self.commit is not None and self.commit.failed


def deliver_answers(answers: Sequence[Answer]) -> None:
    """Resolve the futures of clients. Called in the event loop."""
    for future, outcome in answers:
        if future is None or future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def wait_for_loop(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Wait in a thread until the loop has handled all earlier calls of the thread."""
    handled = threading.Event()
    with contextlib.suppress(RuntimeError):  # raised when the loop has ended
        loop.call_soon_threadsafe(handled.set)
        handled.wait(seconds)
