"""Jobs in the order in which they end: ``as_completed``, for threads and for event loops."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.bar import open_bar
from tidemill.config import Seconds, check_seconds
from tidemill.context import waiting_for
from tidemill.errors import ResultTimeout, TidemillError
from tidemill.handle import FIRST_LOOK, FOREVER, LONGEST_LOOK
from tidemill.inputs import PAGE
from tidemill.job import Record, State

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["Completed", "Waited"]

H = TypeVar("H", covariant=True)

Waited = tuple[str, Callable[[str, Record | None], H]]
"""The id of a job, and what makes its handle of that and its record."""


class Completed(Generic[H]):
    """What ``as_completed`` returns: iterate over it with ``for``, or with ``async for``.

    Each handle comes as soon as its job has ended, however. Of more than 1,000 jobs the first 1,000
    that have not ended are watched, and those behind take the places of those that have.

    Raises:
        ResultTimeout: not all have ended ``timeout`` seconds after the iteration began.
    """

    def __init__(
        self,
        mill: Tidemill | None,
        waited: Callable[[], Iterator[Waited[H]]],
        count: int,
        timeout: Seconds | None,
        progress: bool,
    ) -> None:
        self._mill = mill
        self._waited = waited
        self._count = count
        self._seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        self._progress = progress

    def __iter__(self) -> Iterator[H]:
        if self._mill is None:
            return
        watch = _Watch(self._mill, self._waited(), self._count, self._seconds)
        with open_bar(self._count, show=self._progress) as bar:
            while (ended := watch.next_ended(LONGEST_LOOK)) is not None:
                for handle, failed in ended:
                    bar.step(failed=failed)
                    yield handle

    async def __aiter__(self) -> AsyncIterator[H]:
        if self._mill is None:
            return
        watch, look = _Watch(self._mill, self._waited(), self._count, self._seconds), FIRST_LOOK
        with open_bar(self._count, show=self._progress) as bar:
            # In slices, so that a wait that was cancelled does not keep its thread for ever.
            while (ended := await self._mill.patiently(watch.next_ended, look)) is not None:
                look = FIRST_LOOK if ended else min(2 * look, LONGEST_LOOK)
                for handle, failed in ended:
                    bar.step(failed=failed)
                    yield handle


class _Watch(Generic[H]):
    """One iteration: the jobs that are watched now, and those behind them."""

    def __init__(
        self, mill: Tidemill, waited: Iterator[Waited[H]], count: int, seconds: float
    ) -> None:
        if mill.in_batch():
            raise TidemillError("waiting inside a batch would wait for the batch's own end")
        self._sync = mill.sync
        self._broker: Any = None if mill.sync else mill.broker
        self._behind = waited
        self._left = count
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._room = PAGE
        self._watched: list[Waited[H]] = []

    def next_ended(self, longest: float) -> list[tuple[H, bool]] | None:
        """Wait for the next to end, up to ``longest`` seconds: handles, and whether they failed.

        None when there are no more.
        """
        self._watched += itertools.islice(self._behind, self._room - len(self._watched))
        if not self._watched:
            return None
        if self._sync:  # all of it was run at once, in the caller
            done, self._watched = self._watched, []
            return [(handle(job_id, None), False) for job_id, handle in done]
        left = self._until - time.monotonic()
        ids = [job_id for job_id, _ in self._watched]
        with waiting_for(ids[0]):
            seconds = max(0.0, min(left, longest))
            records: list[Record | None] = self._broker.wait_for(ids, seconds, first=True)
        ended = self._take(records)
        if not ended:
            self._stood_still(longest)
        return ended

    def _take(self, records: list[Record | None]) -> list[tuple[H, bool]]:
        ended: list[tuple[H, bool]] = []
        watched: list[Waited[H]] = []
        for one, record in zip(self._watched, records, strict=True):
            if record is None or record.state.finished:
                job_id, handle = one
                good = record is not None and record.state is State.SUCCEEDED
                ended.append((handle(job_id, record), not good))
            else:
                watched.append(one)
        self._watched = watched
        self._left -= len(ended)
        return ended

    def _stood_still(self, longest: float) -> None:
        if time.monotonic() >= self._until:
            raise ResultTimeout(f"{self._left} jobs have not ended after {self._seconds:g} s")
        if longest >= LONGEST_LOOK:
            self._room += PAGE  # those in front may be stuck, and others behind them done
