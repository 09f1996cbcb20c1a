"""A handle on one job: read its state, wait for its result, cancel it, retry it, delete it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import time
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.brokers.contract.features import Feature
from tidemill.client.context import waiting_for
from tidemill.client.results import group_results
from tidemill.client.runtime import Runtime
from tidemill.client.trail import Event, trail_of
from tidemill.core.codec import unpack
from tidemill.core.config import Seconds, check_seconds
from tidemill.core.errors import (
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobPruned,
    ResultTimeout,
    TidemillError,
)
from tidemill.core.foreign_names import our_result_attribute
from tidemill.core.job import GROUP, Attempt, Record, State

__all__ = ["FIRST_POLL", "FOREVER", "LONGEST_POLL", "Job", "no_such_attribute"]

R = TypeVar("R")
FOREVER = 1e9

FIRST_POLL, LONGEST_POLL = 1.0, 30.0
"""Seconds of the shortest and the longest wait of a thread on behalf of an event loop.

After each wait the thread checks whether the event loop still needs it.
"""


class Job(Generic[R]):
    """One job, by its id. ``await job`` waits for its result.

    Each access reads the store. The record of a finished job is read once and kept.

    Attributes:
        id: the job's id.
        placed: the effect of the put: ``created``, ``kept``, ``replaced``, ``merged`` or
            ``successor``; empty for a handle made from an id.
    """

    __slots__ = ("_acts", "_mill", "_record", "id", "placed")

    def __init__(self, mill: Runtime, job_id: str, placed: str = "") -> None:
        self._mill = mill
        self._record: Record | None = None
        self._acts = 0  # the number of changes that made the record stale
        self.id = job_id
        self.placed = placed

    # -- looking --------------------------------------------------------------------------------

    def refresh(self) -> Record:
        """Read the record from the store.

        Raises:
            JobNotFound: there is no such job.
            JobPruned: the job finished and is no longer kept.
        """
        batch = self._mill.current_batch
        if batch is not None and batch.holds(self.id):
            raise TidemillError(f"job {self.id} is not stored until the batch ends")
        self._mill.features.need(Feature.INSPECT, "looking at a job")
        acts = self._acts
        return self._keep(self._mill.broker.get(self.id), acts)

    def remember(self, record: Record) -> None:
        """Use a record that was read elsewhere."""
        self._record = record

    def _keep(self, record: Record | None, acts: int) -> Record:
        if record is None:
            if self._mill.broker.was_here(self.id):
                raise JobPruned(f"job {self.id} finished and is no longer kept, or was deleted")
            raise JobNotFound(f"no job has the id {self.id!r} here")
        if acts == self._acts:  # otherwise the record may be older than the change
            self._record = record
        return record

    def _forget(self) -> None:
        """Drop the record, also the record that another thread reads at this moment."""
        self._acts += 1
        self._record = None

    @property
    def record(self) -> Record:
        """The record of the job; a finished job is not read again."""
        if self._record is not None and self._record.state.finished:
            return self._record
        return self.refresh()

    @property
    def state(self) -> State:
        """The state of the job."""
        return self.record.state

    @property
    def attempts(self) -> list[Attempt]:
        """All runs so far: number, worker, times, outcome, error, traceback."""
        return self.record.attempts

    @property
    def error(self) -> str:
        """The error of the job or of its latest attempt; empty without an error."""
        record = self.record
        return record.error or (record.attempts[-1].error if record.attempts else "")

    @property
    def progress(self) -> tuple[float, float] | None:
        """(done, total) of the task's last report; None before its first report."""
        return self.record.progress

    @property
    def trail(self) -> list[Event]:
        """The events of the job, oldest first."""
        return trail_of(self.record)

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, timeout: Seconds | None = None) -> State:
        """Wait until the job has finished, well or not, and return its state.

        Raises:
            ResultTimeout: the job has not finished after ``timeout`` seconds.
            TidemillError: a task waits for a job that can never start: no slot is left for it.
        """
        return self._wait(timeout)

    def _wait(self, timeout: Seconds | None) -> State:
        if self._mill.in_batch():
            raise TidemillError("cannot wait inside a batch: its jobs are stored when it ends")
        if self._record is not None and self._record.state.finished:
            return self._record.state
        self._mill.features.need(Feature.RESULTS, "waiting for a job")
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        acts = self._acts
        if seconds:
            _warn_in_loop()
            with waiting_for(self.id):
                (record,) = self._mill.broker.wait_for([self.id], seconds)
        else:
            record = self._mill.broker.get(self.id)
        state = self._keep(record, acts).state
        if not state.finished:
            raise self._late(state, seconds)
        return state

    def _late(self, state: State, seconds: float) -> ResultTimeout:
        return ResultTimeout(
            f"job {self.id} is still {state} after {seconds:g} s and goes on; "
            f"tidemill explain {self.id} says why"
        )

    def result(self, timeout: Seconds | None = None) -> R:
        """Wait for the job and return the value that its task returned.

        Raises:
            ResultTimeout: the job has not finished after ``timeout`` seconds.
            JobFailed, JobCancelled, JobExpired: the job ended that way.
            JobNotFound: there is no such job.
        """
        self._wait(timeout)
        return self._outcome()

    def _outcome(self) -> R:
        record = self.record
        if record.state is State.SUCCEEDED:
            if record.envelope.task == GROUP:
                # The R of a group's handle is a list.
                return group_results(self._mill.broker, self.id)  # type: ignore[return-value]
            value: Any = unpack(record.result) if record.result else None
            task = self._mill.tasks.get(record.envelope.task)
            result: R = value if task is None else task.arguments.result(value)
            return result
        if record.state is State.CANCELLED:
            raise JobCancelled(f"job {self.id} was cancelled: {record.error}")
        if record.state is State.EXPIRED:
            raise JobExpired(f"job {self.id} expired: {record.error}")
        last = record.attempts[-1].traceback if record.attempts else ""
        raise JobFailed(self.id, record.error, last)

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, terminate: bool = False) -> bool:
        """Cancel the job; False for a finished job.

        A job that has not started never starts. The task of a running job sees
        ``current_job().cancelled`` and may stop; ``terminate`` stops it within a second.
        """
        self._mill.features.need(Feature.CANCEL, "cancel()")
        return not self._mill.sync and self._mill.broker.cancel([self.id], terminate=terminate)[0]

    def retry(self, force: bool = False) -> bool:
        """Start a failed, cancelled or expired job again, or make a scheduled job ready now.

        ``force`` also runs a job that succeeded, and a job whose key is held by another job that
        succeeded (``unique_for``). Returns False when the store refuses; ``tidemill retry ID`` says
        why.
        """
        try:
            return self._mill.broker.kick([self.id], force=force)[0]
        finally:
            self._forget()

    def delete(self) -> bool:
        """Delete the job in any state; False when there is no such job."""
        try:
            return self._mill.broker.delete([self.id])[0]
        finally:
            self._forget()

    # -- the same for asyncio -------------------------------------------------------------------

    async def arefresh(self) -> Record:
        """As ``refresh``."""
        return await self._mill.threaded(self.refresh)

    async def await_state(self, timeout: Seconds | None = None) -> State:
        """As ``wait``, without blocking the event loop. (``await`` is a word of the language.)"""
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        look, until = FIRST_POLL, time.monotonic() + seconds
        if self._mill.waiters.is_full:
            with contextlib.suppress(ResultTimeout):
                return await self._mill.threaded(self.wait, 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (left := until - time.monotonic()) > 0:
                    # Short waits: a cancelled wait frees its thread soon, and when more waits than
                    # threads exist, each wait gets a turn.
                    with contextlib.suppress(ResultTimeout):
                        return await self._mill.patiently(self.wait, min(look, left))
                    look = FIRST_POLL if self._mill.waiters.is_full else min(2 * look, LONGEST_POLL)
        try:
            return await self._mill.threaded(self.wait, 0)
        except ResultTimeout as error:
            record = self._record or await self.arefresh()
            raise self._late(record.state, seconds) from error

    async def aresult(self, timeout: Seconds | None = None) -> R:
        """As ``result``."""
        await self.await_state(timeout)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, R]:
        return self.aresult().__await__()

    async def acancel(self, terminate: bool = False) -> bool:
        """As ``cancel``."""
        return await self._mill.threaded(self.cancel, terminate)

    async def aretry(self, force: bool = False) -> bool:
        """As ``retry``."""
        return await self._mill.threaded(self.retry, force)

    async def adelete(self) -> bool:
        """As ``delete``."""
        return await self._mill.threaded(self.delete)

    async def astate(self) -> State:
        """As ``state``."""
        record: Record = await self._mill.threaded(lambda: self.record)
        return record.state

    if not TYPE_CHECKING:  # a checker would take it for leave to use any name

        def __getattr__(self, name: str) -> Any:
            raise no_such_attribute(self, name)

    # -- plumbing -------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        known: Any = self._record.state if self._record else self.placed or "?"
        return f"<job {self.id} {known}>"


def no_such_attribute(handle: object, name: str) -> AttributeError:
    """The error for an unknown attribute; names of other task queues are translated."""
    here = our_result_attribute(name)
    text = (
        f"a tidemill handle has no .{name}; write {here}"
        if here
        else f"{type(handle).__name__!r} object has no attribute {name!r}"
    )
    return AttributeError(text, name=name, obj=handle)


def _warn_in_loop() -> None:
    """Warn about a wait that blocks an event loop: nearly always ``await`` was meant.

    Python shows the warning once for each line. IPython and notebooks get none: their cells run in
    an event loop, and may block it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not hasattr(builtins, "__IPYTHON__"):
        text = "this wait blocks the running event loop; use `await job`"
        # The caller of wait or result, which call _wait.
        warnings.warn(text, RuntimeWarning, stacklevel=4)
