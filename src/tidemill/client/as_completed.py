"""``as_completed``: iterate over jobs in the order in which they end."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from tidemill.client.compositions import PAGE
from tidemill.client.context import waiting_for
from tidemill.client.display import open_bar
from tidemill.client.explain import no_worker
from tidemill.client.job_handle import FIRST_POLL, FOREVER, LONGEST_POLL
from tidemill.core.config import Seconds, check_seconds
from tidemill.core.job import Record, State
from tidemill.core.words import counted
from tidemill.errors import ResultTimeout, TidemillError

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

H = TypeVar("H", covariant=True)

Waited = tuple[str, Callable[[str, Record | None], H]]
"""The id of a job, and the function that makes a handle from the id and the record."""


_End = tuple[H, Record | None, bool]
"""The handle of a job that has ended, its record if it is still kept, and True for success."""


class Completed(Generic[H]):
    """The iterable that ``as_completed`` returns, for ``for`` and ``async for``.

    Each handle comes as soon as its job has ended, with or without success. At first the iteration
    watches 1,000 unfinished jobs; each job that ends makes room for another.

    Raises:
        ResultTimeout: some jobs have not ended ``timeout`` seconds after the iteration began.
    """

    def __init__(
        self,
        runtime: Runtime | None,
        waited: Callable[[], Iterator[Waited[H]]],
        count: int,
        timeout: Seconds | None,
        progress: bool,
    ) -> None:
        self._runtime = runtime
        self._waited = waited
        self._count = count
        self._seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        self._progress = progress

    def __iter__(self) -> Iterator[H]:
        if self._runtime is None:
            return
        watch = _Watch(self._runtime, self._waited(), self._count, self._seconds)
        with open_bar(self._count, show=self._progress) as bar:
            while (ended := watch.next_ended(LONGEST_POLL)) is not None:
                for handle, record, good in ended:
                    bar.step(record, good=good)
                    yield handle

    async def __aiter__(self) -> AsyncIterator[H]:
        if self._runtime is None:
            return
        watch, look = _Watch(self._runtime, self._waited(), self._count, self._seconds), FIRST_POLL
        with open_bar(self._count, show=self._progress) as bar:
            # Each wait is short, so that a cancelled iteration frees its thread soon.
            while (ended := await self._runtime.patiently(watch.next_ended, look)) is not None:
                look = FIRST_POLL if ended else min(2 * look, LONGEST_POLL)
                for handle, record, good in ended:
                    bar.step(record, good=good)
                    yield handle


class _Watch(Generic[H]):
    """One iteration: the jobs that are watched now, and the jobs that are watched later."""

    def __init__(
        self, runtime: Runtime, waited: Iterator[Waited[H]], count: int, seconds: float
    ) -> None:
        if runtime.in_batch():
            raise TidemillError("cannot wait inside a batch: its jobs are stored when it ends")
        self._runtime, self._jobs = runtime, runtime.job_store
        self._unfinished: Record | None = None  # one of those that the last look found
        self._unwatched = waited
        self._left = count
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._room = PAGE
        self._watched: list[Waited[H]] = []

    def next_ended(self, longest: float) -> list[_End[H]] | None:
        """Wait up to ``longest`` seconds for jobs to end.

        Returns their ends; None after the last job.
        """
        self._watched += itertools.islice(self._unwatched, self._room - len(self._watched))
        if not self._watched:
            return None
        left = self._until - time.monotonic()
        ids = [job_id for job_id, _ in self._watched]
        with waiting_for(self._runtime, ids[0], self._left):
            seconds = max(0.0, min(left, longest))
            records = self._jobs.wait_for(ids, seconds, first=True)
        ended = self._take(records)
        if not ended:
            self._watch_more(longest)
        return ended

    def _take(self, records: list[Record | None]) -> list[_End[H]]:
        ended: list[_End[H]] = []
        watched: list[Waited[H]] = []
        for one, record in zip(self._watched, records, strict=True):
            if record is None or record.state.finished:
                job_id, handle = one
                if record is None:  # a pruned job probably succeeded: failed jobs are kept longer
                    good = self._jobs.was_here(job_id)
                else:
                    good = record.state is State.SUCCEEDED
                ended.append((handle(job_id, record), record, good))
            else:
                watched.append(one)
                self._unfinished = record
        self._watched = watched
        self._left -= len(ended)
        return ended

    def _watch_more(self, longest: float) -> None:
        if time.monotonic() >= self._until:
            why = no_worker(self._runtime, self._unfinished) if self._unfinished else ""
            have = "has" if self._left == 1 else "have"
            text = f"{counted(self._left, 'job')} {have} not ended after {self._seconds:g} s"
            raise ResultTimeout(f"{text}: {why}" if why else text)
        if longest >= LONGEST_POLL:
            self._room += PAGE  # the watched jobs may be stuck, while later jobs have ended
