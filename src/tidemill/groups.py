"""Handles on what is more than one job: a chain, whose result is its last step's, and a group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.brokers.base import Filter
from tidemill.config import Seconds, check_seconds
from tidemill.errors import JobNotFound, ResultTimeout, TidemillError
from tidemill.handle import FOREVER, Job
from tidemill.inputs import PAGE, member_id, members_of, size_of
from tidemill.job import GROUP, Record, State

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["JobChain", "JobGroup"]

R = TypeVar("R")

LOOK, LONGEST_LOOK = 0.05, 1.0
"""Seconds between two looks at which members have finished, at first and after a while."""


class JobChain(Job[R]):
    """A chain, as the job that is its last step.

    Attributes:
        steps: a handle on each step, in order; of a step that is a group, a group's.
    """

    __slots__ = ("steps",)

    def __init__(
        self, mill: Tidemill, job_id: str, steps: Sequence[Job[Any] | JobGroup[Any]]
    ) -> None:
        super().__init__(mill, job_id)
        self.steps = tuple(steps)

    @classmethod
    def done(cls, mill: Tidemill, job_id: str, steps: Sequence[Any]) -> JobChain[R]:
        """Of a chain that has been run at once, in the caller."""
        chain = cls(mill, job_id, steps)
        if isinstance(steps[-1], Job):
            chain.remember(steps[-1].record)
        return chain

    def _wait(self, timeout: Seconds | None) -> State:
        return State.SUCCEEDED if self._mill.sync else super()._wait(timeout)

    def _outcome(self) -> R:
        """What the last step returned; else the error of the step that stopped the chain."""
        if self._mill.sync:
            return self.steps[-1].result()  # type: ignore[return-value]
        if self.record.state is not State.SUCCEEDED:
            for step in self.steps[:-1]:
                if step.state is not State.SUCCEEDED and step.state.finished:
                    step.result()
        return super()._outcome()

    def cancel(self, terminate: bool = False) -> bool:
        """Cancel what has not finished; False when all had."""
        if self._mill.sync:
            return False
        done = [step.cancel(terminate) for step in self.steps[:-1]]
        return any([*done, bool(_cancel(self._mill, self.id, terminate))])

    def delete(self) -> bool:
        """Forget all steps and hooks."""
        self._record = None
        found = _delete(self._mill, self.id)
        for step in self.steps[:-1]:
            step.delete()
        return found

    def retry(self) -> bool:
        """Run the step again that stopped the chain, and then those after it."""
        self._record = None
        for step in self.steps[:-1]:
            if step.state is not State.SUCCEEDED:
                return bool(step.retry())
        return super().retry()


class JobGroup(Generic[R]):
    """A group, or a flow, by its id. ``await group`` waits for its results.

    Attributes:
        id: the group's id, from which those of its members follow.
    """

    __slots__ = ("_done", "_mill", "_whole", "id")

    def __init__(
        self, mill: Tidemill, group_id: str, done: Sequence[Job[Any] | JobGroup[Any]] | None = None
    ) -> None:
        self._mill = mill
        self._whole: Job[Any] = Job(mill, group_id)
        self._done = done  # where everything runs at once, in the caller
        self.id = group_id

    # -- looking --------------------------------------------------------------------------------

    def refresh(self) -> Record:
        """Read the record of the job that stands for the group.

        Raises:
            JobNotFound: there is no such group; JobPruned: it finished and is no longer kept.
        """
        record = self._whole.refresh()
        if record.envelope.task != GROUP:
            raise JobNotFound(f"{self.id} is the id of a job, and not of a group")
        return record

    @property
    def state(self) -> State:
        """``waiting`` until all have ended; then how they did."""
        return State.SUCCEEDED if self._done is not None else self.refresh().state

    @property
    def progress(self) -> tuple[int, int]:
        """(ended, all) members."""
        if self._done is not None:
            return len(self._done), len(self._done)
        record = self.refresh()
        count = size_of(self._mill.broker, record)
        if count is None:
            raise TidemillError(f"members of group {self.id} are still being put")
        return max(0, count - record.pending), count

    def __len__(self) -> int:
        """How many members there are."""
        return self.progress[1]

    def __bool__(self) -> bool:
        return True  # also when it is empty; and nothing is read for it

    def count(self, *, failures: bool = False) -> int:
        """How many members have ended; with ``failures``, how many of them not well."""
        if failures:
            return 0 if self._done is not None else self.refresh().failures
        return self.progress[0]

    @property
    def failures(self) -> list[Job[Any] | JobGroup[Any]]:
        """The members that ended otherwise than well, so far."""
        if self._done is not None or not self.count(failures=True):
            return []
        return [
            self._member(job_id, record)
            for job_id, record in self._records()
            if record is not None and record.state.finished and record.state is not State.SUCCEEDED
        ]

    def __getitem__(self, index: int) -> Job[R]:
        """The handle of a member, by its place."""
        if self._done is not None:
            return self._done[index]  # type: ignore[return-value]
        if index < 0:
            index += len(self)
        return Job(self._mill, member_id(self.id, index))

    def _records(self) -> Iterator[tuple[str, Record | None]]:
        return members_of(self._mill.broker, self.id, len(self))

    def _member(self, job_id: str, record: Record | None) -> Job[Any] | JobGroup[Any]:
        if record is not None and record.envelope.task == GROUP:
            return JobGroup(self._mill, job_id)
        job: Job[Any] = Job(self._mill, job_id)
        if record is not None and record.state.finished:
            job.remember(record)
        return job

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, timeout: Seconds | None = None, *, progress: bool = False) -> State:
        """Wait until all members have ended, however; the group's state.

        ``progress`` shows a bar meanwhile, in a terminal or a notebook.

        Raises:
            ResultTimeout: they have not after ``timeout`` seconds.
        """
        if self._done is not None:
            return State.SUCCEEDED
        if progress and not self._mill.in_batch():
            return self._watch(timeout)
        try:
            return self._whole.wait(timeout)
        except ResultTimeout as error:
            raise self._late(error) from None

    def _late(self, error: ResultTimeout) -> ResultTimeout:
        with contextlib.suppress(TidemillError):
            ended, count = self.progress
            return ResultTimeout(f"{ended} of {count} members of {self!r} have ended: {error}")
        return error

    def _watch(self, timeout: Seconds | None) -> State:
        from rich.progress import Progress

        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        until = time.monotonic() + seconds
        with Progress() as bar:
            row = bar.add_task("members", total=None)
            while True:
                left = until - time.monotonic()
                with contextlib.suppress(ResultTimeout):
                    self._whole.wait(max(0.0, min(0.2, left)))
                with contextlib.suppress(TidemillError):
                    ended, count = self.progress
                    bar.update(row, completed=ended, total=count)
                if left <= 0 or self._whole.state.finished:
                    return self._whole.wait(0)

    def results(
        self,
        timeout: Seconds | None = None,
        *,
        return_exceptions: bool = False,
        progress: bool = False,
    ) -> list[R]:
        """Wait for all and return their results in order, of nested groups lists.

        ``return_exceptions`` puts the error of a member that failed in its place.

        Raises:
            ResultTimeout: not all have ended after ``timeout`` seconds.
            JobFailed, JobCancelled, JobExpired: a member did; the first in order.
            JobPruned: a member is no longer kept.
        """
        self.wait(timeout, progress=progress)
        return self._results(return_exceptions)

    def result(self, timeout: Seconds | None = None) -> list[R]:
        """As ``results``, as the handle of a single job has it."""
        return self.results(timeout)

    def _results(self, return_exceptions: bool) -> list[Any]:
        found: list[Any] = []
        for member in self._done if self._done is not None else self._handles():
            try:
                if isinstance(member, JobGroup):
                    found.append(member._results(return_exceptions))
                else:
                    found.append(member.result(0))
            except TidemillError as error:
                if not return_exceptions:
                    raise
                found.append(error)
        return found

    def _handles(self) -> Iterator[Job[Any] | JobGroup[Any]]:
        for job_id, record in self._records():
            yield self._member(job_id, record)

    def as_completed(self, timeout: Seconds | None = None) -> Iterator[Job[R]]:
        """Each member as soon as it has ended, about in that order; so does iterating.

        Raises:
            ResultTimeout: not all have ended after ``timeout`` seconds.
        """
        if self._done is not None:
            yield from self._done  # type: ignore[misc]
            return
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        until, look = time.monotonic() + seconds, LOOK
        pending = [member_id(self.id, index) for index in range(len(self))]
        while pending:
            # A window: what is far behind need not be looked at each time.
            window, rest = pending[:PAGE], pending[PAGE:]
            left: list[str] = []
            for job_id, record in zip(window, self._mill.broker.wait_for(window, 0), strict=True):
                if record is not None and not record.state.finished:
                    left.append(job_id)
                else:
                    yield self._member(job_id, record)  # type: ignore[misc]
            look = LOOK if len(left) < len(window) else min(2 * look, LONGEST_LOOK)
            pending = left + rest
            if len(left) == len(window):
                seconds_left = until - time.monotonic()
                if seconds_left <= 0:
                    raise ResultTimeout(
                        f"{len(pending)} members of group {self.id} have not ended after "
                        f"{seconds:g} s"
                    )
                self._mill.broker.wait_for(left[:1], min(look, seconds_left))

    def __iter__(self) -> Iterator[Job[R]]:
        return self.as_completed()

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, terminate: bool = False) -> int:
        """Cancel all members that have not finished; how many that were.

        Those that run see ``current_job().cancelled``; ``terminate`` stops them. The group ends
        when they have, and its hooks fire.
        """
        if self._done is not None:
            return 0
        found = _cancel(self._mill, self.id, terminate)
        record = self.refresh()
        if size_of(self._mill.broker, record) is None:  # who put its members did not live to end it
            self._mill.broker.cancel([self.id])
        return found

    def retry(self) -> int:
        """Run the members again that did not succeed; how many those are."""
        members = self.failures
        return sum(1 for member in members if member.retry())

    def delete(self) -> bool:
        """Forget the group, its members and its hooks, whatever their states; False: none there."""
        return _delete(self._mill, self.id)

    # -- the same for asyncio -------------------------------------------------------------------

    async def await_state(self, timeout: Seconds | None = None) -> State:
        """As ``wait``."""
        if self._done is not None:
            return State.SUCCEEDED
        return await self._whole.await_state(timeout)

    async def aresults(
        self, timeout: Seconds | None = None, *, return_exceptions: bool = False
    ) -> list[R]:
        """As ``results``."""
        await self.await_state(timeout)
        return await self._mill.threaded(self._results, return_exceptions)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aresults().__await__()

    async def __aiter__(self) -> AsyncIterator[Job[R]]:
        members = self.as_completed()
        while True:
            member = await self._mill.patiently(lambda: next(members, None))
            if member is None:
                return
            yield member

    async def acount(self, *, failures: bool = False) -> int:
        """As ``count``."""
        return await self._mill.threaded(lambda: self.count(failures=failures))

    async def aprogress(self) -> tuple[int, int]:
        """As ``progress``."""
        return await self._mill.threaded(lambda: self.progress)

    async def acancel(self, terminate: bool = False) -> int:
        """As ``cancel``."""
        return await self._mill.threaded(self.cancel, terminate)

    async def aretry(self) -> int:
        """As ``retry``."""
        return await self._mill.threaded(self.retry)

    async def adelete(self) -> bool:
        """As ``delete``."""
        return await self._mill.threaded(self.delete)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobGroup) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<group {self.id}>"


def _parts(mill: Tidemill, whole: str) -> Iterator[list[Record]]:
    """Everything whose id follows from that of a whole, in pages."""
    cursor = ""
    while True:
        page = mill.broker.find(Filter(id_prefix=f"{whole}."), PAGE, cursor)
        yield page.records
        cursor = page.cursor
        if not cursor:
            return


def _cancel(mill: Tidemill, whole: str, terminate: bool) -> int:
    """Cancel all of a whole that does some work; hooks are not among it, nor groups, which end."""
    found = 0
    for records in _parts(mill, whole):
        ids = [
            r.envelope.id
            for r in records
            if not r.state.finished and ".on_" not in r.envelope.id and r.envelope.task != GROUP
        ]
        found += sum(mill.broker.cancel(ids, terminate=terminate))
    record = mill.broker.get(whole)
    if record is not None and record.envelope.task != GROUP:
        found += sum(mill.broker.cancel([whole], terminate=terminate))
    return found


def _delete(mill: Tidemill, whole: str) -> bool:
    """Delete all of a whole: hooks first, or they would fire for what follows."""
    ids = [record.envelope.id for records in _parts(mill, whole) for record in records]
    mill.broker.delete([job_id for job_id in ids if ".on_" in job_id])
    (found,) = mill.broker.delete([whole])
    rest = [job_id for job_id in ids if ".on_" not in job_id]
    for start in range(0, len(rest), PAGE):
        mill.broker.delete(rest[start : start + PAGE])
    return found
