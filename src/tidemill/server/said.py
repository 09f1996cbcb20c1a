"""What clients say of the jobs they hold, on its way to the store; and what they are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidemill.job import Note, Verdict
from tidemill.server.asks import Pledge

__all__ = ["Answer", "Said", "tell"]

Answer = tuple[asyncio.Future[Any] | None, bool | Exception]


class Said(NamedTuple):
    """A verdict, or a wish for more time with notes; and who is to hear what came of it."""

    verdict: Verdict | None
    touch: tuple[int, float] | None
    answer: asyncio.Future[bool] | None
    pledge: Pledge | None
    notes: Sequence[Note] = ()

    @property
    def is_void(self) -> bool:
        """True when it is of a job that was lost with a commit."""
        return self.pledge is not None and self.pledge.broken


def tell(answers: Sequence[Answer]) -> None:
    """In the loop: tell clients what came of what they said."""
    for future, what in answers:
        if future is None or future.done():
            continue
        if isinstance(what, Exception):
            future.set_exception(what)
        else:
            future.set_result(what)
