"""The handles on a group and on a chain, and ``as_completed`` over several handles."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from tidemill.client.compositions import (
    alter_all,
    cancel_all,
    cancel_group,
    delete_all,
    member_id,
    member_ids,
    members_of,
    retry_all,
    size_of,
    some_failed,
)
from tidemill.client.display import LINES_MOST, Bar, html_table, open_bar
from tidemill.client.explain import no_worker
from tidemill.client.job_handle import FOREVER, Completed, Job, Waited
from tidemill.client.threads import in_thread
from tidemill.core.config import Seconds, check_alter, check_seconds
from tidemill.core.job import GROUP, Record, State
from tidemill.core.words import counted
from tidemill.errors import InvalidOption, JobNotFound, ResultTimeout, TidemillError

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

H = TypeVar("H")
R = TypeVar("R")

REDRAW = 0.2  # seconds between two updates of a visible progress bar


class JobGroup(Generic[R]):
    """A group, or a flow, by its id. ``await group`` waits for its results.

    Attributes:
        id: the group's id. The ids of the members begin with it.
    """

    __slots__ = ("_done", "_runtime", "_size", "_whole", "id")

    def __init__(
        self,
        runtime: Runtime,
        group_id: str,
        done: Sequence[Job[Any] | JobGroup[Any]] | None = None,
        size: int | None = None,
        *,
        pending: str = "",
    ) -> None:
        self._runtime = runtime
        self._whole: Job[Any] = Job(runtime, group_id, pending=pending)
        self._size = size  # the number of members; None when the caller does not know it
        self._done = done  # the handles of members that have run in the caller
        self.id = group_id

    # -- reading --------------------------------------------------------------------------------

    def refresh(self) -> Record:
        """Read the record of the job that stands for the group.

        Raises:
            JobNotFound, JobPruned: there is no such group, or it is no longer kept.
        """
        record = self._whole.refresh()
        if record.envelope.task != GROUP:
            raise JobNotFound(f"{self.id} is the id of a job, not of a group")
        return record

    @property
    def state(self) -> State:
        """``waiting`` until all members have ended, and then their combined state."""
        return State.SUCCEEDED if self._done is not None else self.refresh().state

    @property
    def progress(self) -> tuple[int, int]:
        """The numbers of ended members and of all members.

        Raises:
            TidemillError: the members are still being put, so their number is not known.
        """
        if self._done is not None:
            return len(self._done), len(self._done)
        record = self.refresh()
        count = size_of(self._runtime.job_store, record)
        if count is None:
            raise TidemillError(f"members of group {self.id} are still being put")
        return max(0, count - record.pending), count

    def __len__(self) -> int:
        """The number of members."""
        return self.progress[1] if self._size is None else self._size

    def __bool__(self) -> bool:
        # Without this method, bool() would read the store, and be False for an empty group.
        return True

    def count(self, *, failures: bool = False) -> int:
        """The number of ended members; with ``failures`` the number of failed members."""
        if failures:
            return 0 if self._done is not None else self.refresh().failures
        return self.progress[0]

    @property
    def failures(self) -> list[Job[Any] | JobGroup[Any]]:
        """The members that have ended without success so far."""
        if self._done is not None or not self.count(failures=True):
            return []
        return [
            self._member(job_id, record)
            for job_id, record in self._records()
            if record is not None and record.state.finished and record.state is not State.SUCCEEDED
        ]

    def __getitem__(self, index: int) -> Job[R]:
        """The handle of a member, by its index."""
        if self._done is not None:
            # The list may hold jobs and groups of any type, which the annotation hides.
            return self._done[index]  # type: ignore[return-value]
        if index < 0:
            index += len(self)
        return Job(self._runtime, member_id(self.id, index), pending=self._whole._pending)

    def _records(self) -> Iterator[tuple[str, Record | None]]:
        return members_of(self._runtime.job_store, self.id, len(self))

    def _member(self, job_id: str, record: Record | None) -> Job[Any] | JobGroup[Any]:
        if record is not None and record.envelope.task == GROUP:
            return JobGroup(self._runtime, job_id)
        job: Job[Any] = Job(self._runtime, job_id)
        if record is not None and record.state.finished:
            job.remember(record)
        return job

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, timeout: Seconds | None = None, *, progress: bool = False) -> State:
        """Wait until all members have ended, with or without success, and return the group's state.

        ``progress`` shows a progress bar in a terminal or a notebook. As in ``Job.wait``, a group
        that the store no longer keeps counts as succeeded.

        Raises:
            ResultTimeout: some members have not ended after ``timeout`` seconds.
        """
        if self._done is not None:
            return State.SUCCEEDED
        if progress and not self._runtime.in_batch():
            return self._watch(timeout)
        try:
            return self._whole.wait(timeout)
        except ResultTimeout as error:
            raise self._late(error) from None

    def _late(self, error: ResultTimeout) -> ResultTimeout:
        with contextlib.suppress(TidemillError):
            ended, count = self.progress
            left = (r for _, r in self._records() if r is not None and not r.state.finished)
            member = next((record for record in left if record.envelope.task != GROUP), None)
            why = no_worker(self._runtime, member) if member is not None else ""
            text = f"{ended} of {counted(count, 'member')} of {self!r} ended"
            return ResultTimeout(f"{text}: {why or error}")
        return error

    def _watch(self, timeout: Seconds | None) -> State:
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        until = time.monotonic() + seconds
        with open_bar(None, show=True) as bar:
            ended = False
            while bar.shown and not ended and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(ResultTimeout):
                    ended = self._whole.wait(min(REDRAW, left)).finished
                self._redraw(bar)
        return self._whole.wait(max(0.0, until - time.monotonic()))

    def _redraw(self, bar: Bar) -> None:
        with contextlib.suppress(TidemillError):
            record = self.refresh()
            count = size_of(self._runtime.job_store, record)
            bar.move(max(0, (count or 0) - record.pending), record.failures, count)
            if bar.shown and len(bar.told) < min(record.failures, LINES_MOST):
                bar.tell(some_failed(self._runtime.job_store, self.id, LINES_MOST))

    def result(
        self,
        timeout: Seconds | None = None,
        *,
        return_exceptions: bool = False,
        progress: bool = False,
    ) -> list[R]:
        """Wait for all members and return their results in order. A nested group gives a list.

        With ``return_exceptions`` the result of a failed member is its error.

        Raises:
            ResultTimeout: some members have not ended after ``timeout`` seconds.
            JobFailed, JobCancelled, JobExpired: a member ended without success. The first of these
                members decides which error.
            JobPruned: a member is no longer kept.
        """
        self.wait(timeout, progress=progress)
        return self._results(return_exceptions)

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
        """Iterate over the members as they end, with ``for`` or ``async for``.

        The handle itself is iterable in the same way. ``progress`` shows a progress bar in a
        terminal or a notebook.

        Raises:
            ResultTimeout: some members have not ended after ``timeout`` seconds.
        """
        if self._done is not None:
            done: Any = self._done
            return as_completed(done, timeout, progress=progress)
        count = len(self)

        def members() -> Iterator[Waited[Job[R]]]:
            for ids in member_ids(self.id, count):
                for job_id in ids:
                    # ``_member`` may also return a JobGroup, which the annotation hides.
                    yield job_id, self._member  # type: ignore[misc]

        return Completed(self._runtime, members, count, timeout, progress)

    def __iter__(self) -> Iterator[Job[R]]:
        return iter(self.as_completed())

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, terminate: bool = False) -> int:
        """Cancel all unfinished members and return their number.

        Running members see ``this_job().cancelled``; ``terminate`` stops them. The group ends
        with its last member, and then its hooks run. If the producer has not stored all members,
        because it died or still puts them, the group ends at once.
        """
        if self._done is not None:
            return 0
        self.refresh()
        return cancel_group(self._runtime, self.id, terminate)

    def retry(self) -> int:
        """Run again the jobs that failed, and return their number.

        The jobs that were cancelled because of them follow.

        Raises:
            RetryRefused: a job prevents the retry; the text names it.
        """
        return 0 if self._done is not None else retry_all(self._runtime, self.id)

    def alter(self, *, priority: float | None = None, queue: str | None = None) -> int:
        """Give the members that wait another priority or queue, and return their number."""
        rank, queue = check_alter(priority, queue)
        return 0 if self._done is not None else alter_all(self._runtime, self.id, rank, queue)

    def delete(self) -> bool:
        """Delete the group, its members and its hooks in any state; False if there are none."""
        return delete_all(self._runtime, self.id)

    # -- the same for asyncio -------------------------------------------------------------------

    async def await_end(self, timeout: Seconds | None = None, *, progress: bool = False) -> State:
        """As ``wait``."""
        if self._done is not None:
            return State.SUCCEEDED
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        until = time.monotonic() + seconds
        with open_bar(None, show=progress) as bar:
            ended = False
            while bar.shown and not ended and (left := until - time.monotonic()) > 0:
                with contextlib.suppress(ResultTimeout):
                    ended = (await self._whole.await_end(min(REDRAW, left))).finished
                await self._runtime.threaded(self._redraw, bar)
        try:
            return await self._whole.await_end(max(0.0, until - time.monotonic()))
        except ResultTimeout as error:
            raise await self._runtime.threaded(self._late, error) from None

    async def aresult(
        self,
        timeout: Seconds | None = None,
        *,
        return_exceptions: bool = False,
        progress: bool = False,
    ) -> list[R]:
        """As ``result``."""
        await self.await_end(timeout, progress=progress)
        return await self._runtime.threaded(self._results, return_exceptions)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aresult().__await__()

    async def __aiter__(self) -> AsyncIterator[Job[R]]:
        completed = await self._runtime.threaded(self.as_completed)
        async for member in completed:
            yield member

    arefresh, acount = in_thread(refresh), in_thread(count)

    async def aprogress(self) -> tuple[int, int]:
        """As ``progress``."""
        return await self._runtime.threaded(lambda: self.progress)

    acancel = in_thread(cancel)
    aretry = in_thread(retry)
    aalter = in_thread(alter)
    adelete = in_thread(delete)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobGroup) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<group {self.id}>"

    def _repr_html_(self) -> str:
        def facts() -> dict[str, str]:
            (ended, count), failures = self.progress, self.count(failures=True)
            progress = {"state": str(self.state), "ended": f"{ended:,} of {count:,}"}
            return {"group": self.id, **progress, "without success": f"{failures or ''}"}

        return html_table(self, facts)


class JobChain(Job[R]):
    """A chain, which has the id and the result of its last step.

    Attributes:
        steps: the handles of the steps, in order. The handle of a group is a ``JobGroup``.
    """

    __slots__ = ("steps",)

    def __init__(
        self,
        runtime: Runtime,
        job_id: str,
        steps: Sequence[Job[Any] | JobGroup[Any]],
        *,
        pending: str = "",
    ) -> None:
        super().__init__(runtime, job_id, pending=pending)
        self.steps = tuple(steps)
        if type(steps[-1]) is Job:
            steps[-1]._is_step = True

    def _prefixes(self) -> tuple[str, ...]:
        last = self.steps[-1]
        after = last._prefixes() if isinstance(last, Job) else ()
        return (*[step.id for step in self.steps[:-1]], *after)

    @classmethod
    def done(cls, runtime: Runtime, job_id: str, steps: Sequence[Any]) -> JobChain[R]:
        """The handle of a chain that has run in the caller (``sync=True``)."""
        chain = cls(runtime, job_id, steps)
        if isinstance(steps[-1], Job):
            chain.remember(steps[-1].record)
        return chain

    def _wait(self, timeout: Seconds | None) -> Record | None:
        return None if self._runtime.sync else super()._wait(timeout)

    def _outcome(self, record: Record | None) -> R:
        """The result of the last step, or the error of the step that stopped the chain."""
        if record is None:
            # The types do not say that the result of the last step has the type R.
            return self.steps[-1].result()  # type: ignore[return-value]
        return super()._outcome(record)

    def cancel(self, terminate: bool = False) -> bool:
        """Cancel all unfinished steps; False when all steps had finished."""
        if self._runtime.sync:
            return False
        done = [step.cancel(terminate) for step in self.steps[:-1]]
        return any([*done, bool(cancel_all(self._runtime, self.id, terminate))])

    def delete(self) -> bool:
        """Delete all steps and hooks."""
        try:
            found = delete_all(self._runtime, self.id)
            for step in self.steps[:-1]:
                step.delete()
            return found
        finally:
            self._forget()

    def retry(self, force: bool = False) -> bool:
        """Run again the jobs that failed, and then the jobs that were cancelled because of them.

        Raises:
            InvalidOption: ``force`` is given; steps that succeeded never run again.
            RetryRefused: a job prevents the retry; the text names it.
        """
        if force:
            raise InvalidOption("a step that succeeded never runs again; leave force out")
        return super().retry()


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
    """Iterate over handles as their jobs end, with ``for`` or ``async for``.

    ``jobs`` is a group, or an iterable of handles of jobs, chains and groups. A single group stands
    for its members.
    ``progress`` shows a progress bar in a terminal or a notebook.

    Raises:
        InvalidOption: a value is no handle, or the handles belong to several apps.
        ResultTimeout: during the iteration: some jobs have not ended after ``timeout`` seconds.
    """
    if isinstance(jobs, JobGroup):
        return jobs.as_completed(timeout, progress=progress)
    handles = list(jobs)
    for handle in handles:
        if not isinstance(handle, (Job, JobGroup)):
            raise InvalidOption(f"as_completed takes handles of jobs, not {handle!r}")
        if handle._runtime is not handles[0]._runtime:
            raise InvalidOption("as_completed takes the jobs of one app at a time")
    runtime = handles[0]._runtime if handles else None

    def waited() -> Iterator[Waited[Any]]:
        return ((handle.id, functools.partial(_as_read, handle)) for handle in handles)

    return Completed(runtime, waited, len(handles), timeout, progress)


def _as_read(handle: Any, _: str, record: Record | None) -> Any:
    """Let the handle use the record that was read, and return the handle."""
    if record is not None and isinstance(handle, Job):
        handle.remember(record)
    return handle
