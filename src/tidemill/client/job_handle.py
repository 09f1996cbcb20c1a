"""A handle on one job: read it, wait for its result, cancel, retry, alter or delete it.

``as_completed`` iterates over handles in the order in which their jobs end.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import logging
import string
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.brokers.contract.features import Feature
from tidemill.client.compositions import (
    PAGE,
    alter_jobs,
    cancel_jobs,
    cause_of,
    cause_text,
    delete_jobs,
    end_of,
    group_results,
    retry_job,
    stopped_by,
)
from tidemill.client.context import LIBRARIES, users_frames, waiting_for
from tidemill.client.display import html_table, job_facts, open_bar
from tidemill.client.explain import Event, no_worker, trail_of
from tidemill.client.inline_jobs import KEPT_MOST, move_due
from tidemill.client.threads import in_thread, is_in_event_loop
from tidemill.core.clock import new_id
from tidemill.core.config import Seconds, check_alter, check_seconds
from tidemill.core.envelope import Envelope
from tidemill.core.job import GROUP, Attempt, Record, State
from tidemill.core.words import counted
from tidemill.errors import (
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobPruned,
    ResultTimeout,
    TidemillError,
)

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

R = TypeVar("R")
log = logging.getLogger("tidemill")
FOREVER = 1e9  # seconds of a wait without a timeout

KEPT_HERE = f"among the last {KEPT_MOST:,} jobs that ran in this process (sync=True)"

UNCOMMITTED = "its transaction has not been committed, or was rolled back"

FRESH = 1.0  # seconds for which a record that a search has read counts as read now

FIRST_POLL, LONGEST_POLL = 1.0, 30.0
"""Seconds of the shortest and the longest wait of a thread on behalf of an event loop.

A wait that has ended frees its thread. The event loop starts another wait if it needs one.
"""


class Job(Generic[R]):
    """One job, by its id. ``await job`` waits for its result.

    Each use of ``state``, ``progress``, ``error``, ``attempts`` or ``trail`` reads the store again.
    To show several of them, read once: ``record = job.refresh()``. The handle of a finished job
    that a search or ``as_completed`` has found uses the record that was just read, for a second. A
    search reads no results, logs and arguments.

    A chain has the id of its last step. ``state``, ``error``, ``wait`` and ``result`` are those of
    the job that stopped the chain. All else is of the last step, which is then ``cancelled``. The
    handle that a search has found is of the last step alone.

    Attributes:
        id: the job's id.
        placed: the effect of the put: ``created``, ``kept``, ``replaced``, ``merged`` or
            ``successor``; empty for a handle made from an id.
    """

    __slots__ = ("_end", "_fresh", "_is_step", "_pending", "_record", "_runtime", "id", "placed")

    def __init__(
        self, runtime: Runtime, job_id: str, placed: str = "", *, pending: str = ""
    ) -> None:
        self._runtime = runtime
        self._record: Record | None = None  # as it was read last
        self._fresh = 0.0  # until this time, the record counts as read now
        self._pending = pending  # why the store may not have the job
        self._is_step = False  # True for the last step of a chain alone, not the chain
        self._end: tuple[Record, Record] | None = None  # a record, and the record of its end
        self.id = job_id
        self.placed = placed

    # -- looking --------------------------------------------------------------------------------

    def refresh(self) -> Record:
        """Read the job once: a record with state, progress, result, error, attempts and log.

        The record does not change: call this again to see the job's progress.

        Raises:
            JobNotFound: there is no such job, or its transaction has not been committed.
            JobPruned: the job finished and is no longer kept.
            FeatureMissing: the broker cannot look into its queues.
        """
        batch = self._runtime.current_batch
        if batch is not None and batch.holds(self.id):
            raise TidemillError(f"job {self.id} is not stored until the batch ends")
        self._runtime.features.need(Feature.INSPECT, "looking at a job")
        return self._read()

    def remember(self, record: Record) -> None:
        """Use a record that was just read elsewhere."""
        self._record, self._fresh = record, time.monotonic() + FRESH

    def confirm(self, job_id: str, placed: str, *, pending: str) -> None:
        """Take in the store's answer to the put, which may still wait for a commit."""
        self.id, self.placed, self._pending = job_id, placed, pending

    def _read(self) -> Record:
        record = self._runtime.job_store.get(self.id)
        if record is not None and record.has_timer:
            move_due(self._runtime.job_store)
            record = self._runtime.job_store.get(self.id)
        return self._keep(record)

    def _keep(self, record: Record | None) -> Record:
        if record is None:
            if self._pending and self._record is None:
                raise JobNotFound(f"job {self.id} is not stored: {self._pending}")
            if self._runtime.job_store.was_here(self.id):
                raise JobPruned(f"job {self.id} finished and is no longer kept, or was deleted")
            here = KEPT_HERE if self._runtime.sync else "here"
            raise JobNotFound(f"no job has the id {self.id!r} {here}{_whole_id_hint(self.id)}")
        self._record = record
        return record

    def _forget(self) -> None:
        """Read anew next time: a call has changed the job."""
        self._fresh = 0.0

    def _just_read(self, *, listed: bool = False) -> Record | None:
        """The record of a finished job that was just read; ``listed``: perhaps without its body."""
        record = self._record
        if record is None or not record.state.finished:
            return None
        if not self._runtime.sync and Feature.INSPECT not in self._runtime.broker.features:
            return record
        is_fresh = time.monotonic() < self._fresh
        return record if is_fresh and (listed or not record.listed) else None

    @property
    def record(self) -> Record:
        """The record of the job, read now."""
        return self._just_read() or self.refresh()

    @property
    def _facts(self) -> Record:
        """The record of the job, read now; it may be the record of a list."""
        return self._just_read(listed=True) or self.refresh()

    @property
    def state(self) -> State:
        """The state of the job, or of the chain."""
        return self._ended(self._facts).state

    def _prefixes(self) -> tuple[str, ...]:
        """What the ids of the steps before this step begin with, if it stands for a chain."""
        return () if self._is_step else (f"{self.id}.",)

    def _ended(self, record: Record) -> Record:
        """The record that tells how the job, or the chain, ended."""
        known = self._end
        if known is None or known[0] is not record:
            known = self._end = record, end_of(self._runtime.job_store, record, self._prefixes())
        return known[1]

    @property
    def attempts(self) -> list[Attempt]:
        """All ended attempts: number, worker, times, outcome, error, traceback."""
        return self._facts.attempts

    @property
    def error(self) -> str:
        """The error of the job or of its latest attempt; empty without an error."""
        return self._ended(self._facts).latest_error

    @property
    def progress(self) -> tuple[int, int] | None:
        """(done, total) of the task's last report, whole numbers; None before its first report.

        The total is 0 when it is unknown.
        """
        return self._facts.progress

    @property
    def progress_text(self) -> str:
        """The text of the task's last report of progress; empty without a text."""
        return self._facts.progress_text

    @property
    def trail(self) -> list[Event]:
        """The events of the job, oldest first."""
        return trail_of(self.record)

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, timeout: Seconds | None = None) -> State:
        """Wait until the job has finished, with or without success, and return its state.

        A job that the store no longer keeps counts as succeeded, because stores keep jobs
        without success longer. So does a deleted job. For both, ``result()`` raises ``JobPruned``.

        Raises:
            ResultTimeout: the job has not finished after ``timeout`` seconds.
            JobNotFound: there is no such job.
            FeatureMissing: the broker keeps no results.
            TidemillError: a task waits for a job that can never start: no slot is left for it.
        """
        try:
            record = self._wait(timeout)
        except JobPruned:
            return State.SUCCEEDED
        return State.SUCCEEDED if record is None else self._ended(record).state

    def _wait(self, timeout: Seconds | None) -> Record | None:
        """The record of the finished job; None for a chain that has run in the caller."""
        if self._runtime.in_batch():
            raise TidemillError("cannot wait inside a batch: its jobs are stored when it ends")
        if (known := self._just_read()) is not None:
            return known
        self._runtime.features.need(Feature.RESULTS, "waiting for a job")
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        has_ended = self._record is not None and self._record.state.finished
        record = self._read() if has_ended or not seconds else None
        if record is None or (seconds and not record.state.finished):
            _warn_in_loop()
            with waiting_for(self._runtime, self.id):
                (found,) = self._runtime.job_store.wait_for([self.id], seconds)
            record = self._keep(found)
        if not record.state.finished:
            raise self._late(record, seconds)
        return record

    def _late(self, record: Record, seconds: float) -> ResultTimeout:
        text = f"job {self.id} is still {record.state} after {seconds:g} s"
        if missing := no_worker(self._runtime, record):
            return ResultTimeout(f"{text}: {missing}")
        where = self._runtime.broker.features
        hint = f"; tidemill explain {self.id} says why" if Feature.PROCESSES in where else ""
        return ResultTimeout(f"{text} and goes on{hint}")

    def result(self, timeout: Seconds | None = None) -> R:
        """Wait for the job and return the value that its task returned.

        Raises:
            ResultTimeout: the job has not finished after ``timeout`` seconds.
            JobFailed, JobCancelled, JobExpired: the job ended that way.
            JobNotFound: there is no such job.
            JobPruned: the job finished and is no longer kept.
            ResultNotKept: the job succeeded, and the store had no room for its result.
        """
        return self._outcome(self._wait(timeout))

    def _outcome(self, record: Record | None) -> R:
        assert record is not None  # only a chain has no record
        if record.state is State.SUCCEEDED:
            if record.envelope.task == GROUP:
                # R is the type of the result, and the result of a group is a list.
                return group_results(self._runtime.job_store, self.id)  # type: ignore[return-value]
            value: Any = record.result
            task = self._runtime.tasks.get(record.envelope.task)
            result: R = value if task is None else task.arguments.result(value)
            return result
        raise self._unsuccessful(record)

    def _unsuccessful(self, record: Record) -> TidemillError:
        """The error of a job that did not succeed; its cause is the failed job before this job."""
        record = self._ended(record)
        cause = cause_of(self._runtime.job_store, record)
        if cause is not None and cause.state is State.FAILED and record.envelope.task == GROUP:
            record, cause = cause, None
        job_id = record.envelope.id
        why = record.error if cause is None else f"{record.error}; {cause_text(cause)}"
        error: TidemillError
        if record.state is State.CANCELLED:
            error = JobCancelled(f"job {job_id} was cancelled: {why}")
        elif record.state is State.EXPIRED:
            error = JobExpired(f"job {job_id} expired: {why}")
        else:
            error = JobFailed(job_id, why, record.latest_traceback)
        if cause is not None and cause.state is State.FAILED:
            id_, text = cause.envelope.id, cause.error
            error.__cause__ = JobFailed(id_, text, cause.latest_traceback)
        return error

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, terminate: bool = False) -> bool:
        """Ask the store to cancel the job; False for a finished job.

        True means that the request was stored. A job that has not started by then never starts. A
        running job may still succeed or fail: its task sees ``this_job().cancelled`` and may
        stop; ``terminate`` stops it within a second. ``wait()`` returns how the job ended. The id
        of a chain or group stands for its jobs, here and in ``alter`` and ``delete``.
        """
        self._runtime.features.need(Feature.CANCEL, "cancel()")
        return cancel_jobs(self._runtime, [self.id], terminate=terminate)[0]

    def retry(self, force: bool = False) -> bool:
        """Start a failed, cancelled or expired job again, or make a scheduled job ready now.

        The id of a chain or group stands for its jobs: the jobs that failed run again, and then the
        jobs that were cancelled because of them. ``force`` also runs a job that succeeded, and a
        job whose key another succeeded job holds (``hold``). Returns False when the store
        refuses; ``tidemill retry ID`` says why.

        Raises:
            RetryRefused: another job prevents the retry; the text names it.
            InvalidOption: ``force`` is given for a chain or group.
        """
        try:
            return retry_job(self._runtime, self.id, force=force)
        finally:
            self._forget()

    def alter(self, *, priority: float | None = None, queue: str | None = None) -> bool:
        """Give the job another priority, or move it to another queue, while it waits.

        The job keeps its place in the order of acceptance, as if it had first been put into the
        other queue. Its due time, key, limit and history stay. Returns False when the job runs, has
        finished, or finds no room in the other queue (``max_size``).

        Raises:
            InvalidOption: no priority and no queue is given, or a value cannot be used.
        """
        rank, name = check_alter(priority, queue)
        self._runtime.features.need(Feature.ALTER, "alter()")
        try:
            return alter_jobs(self._runtime, [self.id], rank=rank, queue=name)[0]
        finally:
            self._forget()

    def delete(self) -> bool:
        """Delete the job in any state; False when there is no such job."""
        try:
            return delete_jobs(self._runtime, [self.id])[0]
        finally:
            self._forget()

    # -- the same for asyncio -------------------------------------------------------------------

    arefresh = in_thread(refresh)

    async def await_end(self, timeout: Seconds | None = None) -> State:
        """As ``wait``, without blocking the event loop. (``await`` is a reserved word.)"""
        try:
            record = await self._await_end(timeout)
        except JobPruned:
            return State.SUCCEEDED
        if record is None or record.state is State.SUCCEEDED:
            return State.SUCCEEDED
        return (await self._runtime.threaded(self._ended, record)).state

    async def _await_end(self, timeout: Seconds | None) -> Record | None:
        import asyncio

        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        look, until = FIRST_POLL, time.monotonic() + seconds
        if self._runtime.waiters.is_full:
            with contextlib.suppress(ResultTimeout):
                return await self._runtime.threaded(self._wait, 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (left := until - time.monotonic()) > 0:
                    # Each wait is short, so that a cancelled wait soon frees its thread. With more
                    # waits than threads, the waits take turns.
                    with contextlib.suppress(ResultTimeout):
                        return await self._runtime.patiently(self._wait, min(look, left))
                    look = (
                        FIRST_POLL if self._runtime.waiters.is_full else min(2 * look, LONGEST_POLL)
                    )
        try:
            return await self._runtime.threaded(self._wait, 0)
        except ResultTimeout as error:
            late = self._record or await self.arefresh()
            raise await self._runtime.threaded(self._late, late, seconds) from error

    async def aresult(self, timeout: Seconds | None = None) -> R:
        """As ``result``."""
        return self._outcome(await self._await_end(timeout))

    def __await__(self) -> Generator[Any, None, R]:
        return self.aresult().__await__()

    acancel = in_thread(cancel)
    aretry = in_thread(retry)
    aalter = in_thread(alter)
    adelete = in_thread(delete)

    async def astate(self) -> State:
        """As ``state``."""
        return await self._runtime.threaded(lambda: self.state)

    async def aprogress(self) -> tuple[int, int] | None:
        """As ``progress``."""
        return await self._runtime.threaded(lambda: self.progress)

    async def aerror(self) -> str:
        """As ``error``."""
        return await self._runtime.threaded(lambda: self.error)

    # -- plumbing -------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        known: Any = self.placed or "?"
        if self._end is not None and self._end[0] is self._record:
            known = self._end[1].state
        elif self._record is not None and not stopped_by(self._record, self._prefixes()):
            known = self._record.state
        return f"<job {self.id} {known}>"

    def _repr_html_(self) -> str:
        return html_table(self, lambda: job_facts(record := self.refresh(), self._ended(record)))


def leave_out(envelopes: Sequence[Envelope]) -> str:
    """Log that a put is left out, with its line; return why its jobs are not stored."""
    frames = [f for f in users_frames(sys._getframe()) if not f.filename.startswith(LIBRARIES)]
    at = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "an unknown line"
    what = f"task {envelopes[0].task}" if envelopes and envelopes[0].task else "a message"
    log.warning(
        "%s is put while the app is imported (%s), so the put is left out: each process of a "
        "worker imports the app; move the line under if __name__ == '__main__'",
        what,
        at,
    )
    return f"it was put while the app was imported ({at})"


def _whole_id_hint(job_id: str) -> str:
    """The hint for a short id, as lists show it: give the whole id."""
    if len(job_id) >= len(new_id()) or not set(job_id) <= set(string.hexdigits):
        return ""
    return f"; Python needs the whole id; to find it: tidemill job {job_id}"


def _warn_in_loop() -> None:
    """Warn about a wait that blocks an event loop; cells of IPython and notebooks may block it."""
    if is_in_event_loop() and not hasattr(builtins, "__IPYTHON__"):
        text = "this wait blocks the running event loop; use `await job`"
        # Level 4 is the code that calls wait or result, which call _wait.
        warnings.warn(text, RuntimeWarning, stacklevel=4)


# -- as_completed: jobs in the order in which they end ---------------------------------------------


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
