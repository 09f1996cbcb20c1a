"""Handles on what is more than one job: a chain, whose result is its last step's, and a group."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from tidemill.bar import Bar, open_bar
from tidemill.completed import Completed, Waited
from tidemill.config import Seconds, check_seconds
from tidemill.errors import InvalidOption, JobNotFound, ResultTimeout, TidemillError
from tidemill.handle import FOREVER, Job, no_such_attribute
from tidemill.inputs import PAGE, member_id, member_ids, members_of, size_of
from tidemill.job import GROUP, Record, State
from tidemill.wholes import cancel_whole, delete_whole

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["JobChain", "JobGroup", "as_completed"]

H = TypeVar("H")
R = TypeVar("R")

PICTURE = 0.2
"""Seconds between two pictures of a bar that somebody sees."""


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
            # R is what the last step returns; the list of steps cannot say so.
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
        return any([*done, bool(cancel_whole(self._mill, self.id, terminate))])

    def delete(self) -> bool:
        """Forget all steps and hooks."""
        try:
            found = delete_whole(self._mill, self.id)
            for step in self.steps[:-1]:
                step.delete()
            return found
        finally:
            self._forget()

    def retry(self, force: bool = False) -> bool:
        """Run the step again that stopped the chain, and then those after it.

        Raises:
            InvalidOption: ``force`` is given, and no part that succeeded runs again.
        """
        if force:
            raise InvalidOption("force runs no step of a chain again that succeeded; leave it out")
        try:
            for step in self.steps[:-1]:
                if step.state is not State.SUCCEEDED:
                    return bool(step.retry())
            return super().retry()
        finally:
            self._forget()


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
            # Members that ran here and now; their list is typed for all kinds of them.
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
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        until = time.monotonic() + seconds
        with open_bar(None, show=True) as bar:
            while bar.shown:
                left = until - time.monotonic()
                with contextlib.suppress(ResultTimeout):
                    self._whole.wait(max(0.0, min(PICTURE, left)))
                self._picture(bar)
                if left <= 0 or self._whole.state.finished:
                    break
        return self._whole.wait(max(0.0, until - time.monotonic()))

    def _picture(self, bar: Bar) -> None:
        with contextlib.suppress(TidemillError):
            record = self.refresh()
            count = size_of(self._mill.broker, record)
            bar.move(max(0, (count or 0) - record.pending), record.failures, count)

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

    def as_completed(
        self, timeout: Seconds | None = None, *, progress: bool = False
    ) -> Completed[Job[R]]:
        """Each member as soon as it has ended, for ``for`` and ``async for``; so does iterating.

        ``progress`` shows a bar meanwhile, in a terminal or a notebook.

        Raises:
            ResultTimeout: not all have ended after ``timeout`` seconds.
        """
        if self._done is not None:
            done: Any = self._done
            return as_completed(done, timeout, progress=progress)
        count = len(self)

        def members() -> Iterator[Waited[Job[R]]]:
            for ids in member_ids(self.id, count):
                for job_id in ids:
                    # The method that makes the handle of an id, whatever its R.
                    yield job_id, self._member  # type: ignore[misc]

        return Completed(self._mill, members, count, timeout, progress)

    def __iter__(self) -> Iterator[Job[R]]:
        return iter(self.as_completed())

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, terminate: bool = False) -> int:
        """Cancel all members that have not finished; how many that were.

        Those that run see ``current_job().cancelled``; ``terminate`` stops them. The group ends
        when they have, and its hooks fire.
        """
        if self._done is not None:
            return 0
        found = cancel_whole(self._mill, self.id, terminate)
        record = self.refresh()
        if size_of(self._mill.broker, record) is None:  # who put its members did not live to end it
            self._mill.broker.cancel([self.id])
        return found

    def retry(self) -> int:
        """Run the members again that did not succeed; how many those are."""
        members = self.failures
        ids = [member.id for member in members if isinstance(member, Job)]
        pages = [ids[at : at + PAGE] for at in range(0, len(ids), PAGE)]
        kicked = sum(sum(self._mill.broker.kick(page)) for page in pages)
        return kicked + sum(1 for one in members if isinstance(one, JobGroup) and one.retry())

    def delete(self) -> bool:
        """Forget the group, its members and its hooks, whatever their states; False: none there."""
        return delete_whole(self._mill, self.id)

    # -- the same for asyncio -------------------------------------------------------------------

    async def await_state(self, timeout: Seconds | None = None, *, progress: bool = False) -> State:
        """As ``wait``."""
        if self._done is not None:
            return State.SUCCEEDED
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        until = time.monotonic() + seconds
        with open_bar(None, show=progress) as bar:
            while bar.shown and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(ResultTimeout):
                    await self._whole.await_state(min(PICTURE, left))
                await self._mill.threaded(self._picture, bar)
                if (await self._whole.astate()).finished:
                    break
        return await self._whole.await_state(max(0.0, until - time.monotonic()))

    async def aresults(
        self,
        timeout: Seconds | None = None,
        *,
        return_exceptions: bool = False,
        progress: bool = False,
    ) -> list[R]:
        """As ``results``."""
        await self.await_state(timeout, progress=progress)
        return await self._mill.threaded(self._results, return_exceptions)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aresults().__await__()

    async def __aiter__(self) -> AsyncIterator[Job[R]]:
        completed = await self._mill.threaded(self.as_completed)
        async for member in completed:
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

    if not TYPE_CHECKING:  # a checker would take it for leave to use any name

        def __getattr__(self, name: str) -> Any:
            raise no_such_attribute(self, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobGroup) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<group {self.id}>"


@overload
def as_completed(
    jobs: JobGroup[R], timeout: Seconds | None = None, *, progress: bool = False
) -> Completed[Job[R]]: ...
@overload
def as_completed(
    jobs: Iterable[H], timeout: Seconds | None = None, *, progress: bool = False
) -> Completed[H]: ...
def as_completed(
    jobs: Any, timeout: Seconds | None = None, *, progress: bool = False
) -> Completed[Any]:
    """Handles in the order in which their jobs end, for ``for`` and for ``async for``.

    ``jobs`` is a group, for its members, or any handles, of chains and groups too. ``progress``
    shows a bar meanwhile, in a terminal or a notebook.

    Raises:
        InvalidOption: they are no handles, or of several apps.
        ResultTimeout: while iterating: not all have ended after ``timeout`` seconds.
    """
    if isinstance(jobs, JobGroup):
        return jobs.as_completed(timeout, progress=progress)
    handles = list(jobs)
    for handle in handles:
        if not isinstance(handle, (Job, JobGroup)):
            raise InvalidOption(f"as_completed takes handles of jobs, not {handle!r}")
        if handle._mill is not handles[0]._mill:
            raise InvalidOption("as_completed takes the jobs of one app at a time")
    mill = handles[0]._mill if handles else None

    def waited() -> Iterator[Waited[Any]]:
        return ((handle.id, functools.partial(_as_read, handle)) for handle in handles)

    return Completed(mill, waited, len(handles), timeout, progress)


def _as_read(handle: Any, _: str, record: Record | None) -> Any:
    """A handle of which that record was read."""
    if record is not None and isinstance(handle, Job):
        handle.remember(record)
    return handle
