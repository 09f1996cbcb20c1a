"""A handle on one job: ask how it is, wait for it, cancel it, read its trail."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import time
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.brokers.base import Feature
from tidemill.codec import unpack
from tidemill.config import Seconds, check_seconds
from tidemill.context import waiting_for
from tidemill.elsewhere import handle_elsewhere
from tidemill.errors import (
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobPruned,
    ResultTimeout,
    TidemillError,
)
from tidemill.inputs import group_results
from tidemill.job import GROUP, Attempt, Record, State
from tidemill.trail import Event, trail_of

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["FIRST_LOOK", "FOREVER", "LONGEST_LOOK", "Job", "no_such_attribute"]

R = TypeVar("R")
FOREVER = 1e9

FIRST_LOOK, LONGEST_LOOK = 1.0, 30.0
"""Seconds after which a thread that waits for an event loop looks whether anybody still does."""


class Job(Generic[R]):
    """One job, by its id. Attributes are read from the store when asked for; a finished job's once.

    ``await job`` waits for its result.

    Attributes:
        id: the job's id.
        placed: what the put did: ``created``, ``kept``, ``replaced``, ``merged``, ``successor``;
            empty for a handle made from an id.
    """

    __slots__ = ("_acts", "_mill", "_record", "id", "placed")

    def __init__(self, mill: Tidemill, job_id: str, placed: str = "") -> None:
        self._mill = mill
        self._record: Record | None = None
        self._acts = 0  # how often the record was made out of date
        self.id = job_id
        self.placed = placed

    # -- looking --------------------------------------------------------------------------------

    def refresh(self) -> Record:
        """Read the record anew.

        Raises:
            JobNotFound: there is no such job; JobPruned: it finished and is no longer kept.
        """
        batch = self._mill.current_batch
        if batch is not None and batch.holds(self.id):
            raise TidemillError(f"job {self.id} is not stored before the batch ends")
        self._mill.features.need(Feature.INSPECT, "looking at a job")
        acts = self._acts
        return self._keep(self._mill.broker.get(self.id), acts)

    def remember(self, record: Record) -> None:
        """Take a record as read."""
        self._record = record

    def _keep(self, record: Record | None, acts: int) -> Record:
        if record is None:
            if self._mill.broker.was_here(self.id):
                raise JobPruned(f"job {self.id} finished and is no longer kept, or was deleted")
            raise JobNotFound(f"no job has the id {self.id!r} here")
        if acts == self._acts:  # else it may show the job as it was before
            self._record = record
        return record

    def _forget(self) -> None:
        """What was read is out of date, also what another thread is just reading."""
        self._acts += 1
        self._record = None

    @property
    def record(self) -> Record:
        """The record as last read; a finished one is not read again."""
        if self._record is not None and self._record.state.finished:
            return self._record
        return self.refresh()

    @property
    def state(self) -> State:
        """Where the job is."""
        return self.record.state

    @property
    def attempts(self) -> list[Attempt]:
        """Every run so far: number, worker, times, outcome, error, traceback."""
        return self.record.attempts

    @property
    def error(self) -> str:
        """Why the job failed, or why its latest attempt did; empty when nothing went wrong."""
        record = self.record
        return record.error or (record.attempts[-1].error if record.attempts else "")

    @property
    def progress(self) -> tuple[float, float] | None:
        """(done, total) as the task last said; None when it said nothing."""
        return self.record.progress

    @property
    def trail(self) -> list[Event]:
        """Everything that happened to the job, in order."""
        return trail_of(self.record)

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, timeout: Seconds | None = None) -> State:
        """Wait until the job has finished, however; its state.

        Raises:
            ResultTimeout: it has not after ``timeout`` seconds.
            TidemillError: a task waits for a job that nobody is left to run.
        """
        return self._wait(timeout)

    def _wait(self, timeout: Seconds | None) -> State:
        if self._mill.in_batch():
            raise TidemillError("waiting inside a batch would wait for the batch's own end")
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
            f"job {self.id} is {state} still after {seconds:g} s and goes on; "
            f"tidemill explain {self.id} says why"
        )

    def result(self, timeout: Seconds | None = None) -> R:
        """Wait for the job and return what its task returned.

        Raises:
            ResultTimeout: it has not finished after ``timeout`` seconds.
            JobFailed, JobCancelled, JobExpired: it ended that way.
            JobNotFound: there is no such job.
        """
        self._wait(timeout)
        return self._outcome()

    def _outcome(self) -> R:
        record = self.record
        if record.state is State.SUCCEEDED:
            if record.envelope.task == GROUP:
                # The R of a group's handle is a list of its members'.
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
        """Cancel the job; False when it had finished.

        A job that does not run yet never will. A running one sees ``current_job().cancelled`` and
        stops when it suits; ``terminate`` stops it within a second.
        """
        self._mill.features.need(Feature.CANCEL, "cancel()")
        return not self._mill.sync and self._mill.broker.cancel([self.id], terminate=terminate)[0]

    def retry(self, force: bool = False) -> bool:
        """Begin a new run of a failed, cancelled or expired job, or make a scheduled one ready.

        ``force`` runs a job again that succeeded, and one whose key another success holds
        (``unique_for``). False: the job is refused; ``tidemill retry ID`` says why.
        """
        try:
            return self._mill.broker.kick([self.id], force=force)[0]
        finally:
            self._forget()

    def delete(self) -> bool:
        """Forget the job, whatever its state; False when there is none."""
        try:
            return self._mill.broker.delete([self.id])[0]
        finally:
            self._forget()

    # -- the same for asyncio -------------------------------------------------------------------

    async def arefresh(self) -> Record:
        """As ``refresh``."""
        return await self._mill.threaded(self.refresh)

    async def await_state(self, timeout: Seconds | None = None) -> State:
        """As ``wait``, whose name with an a in front the language keeps for itself."""
        seconds = FOREVER if timeout is None else check_seconds("timeout", timeout)
        look, until = FIRST_LOOK, time.monotonic() + seconds
        if self._mill.waiters.crowded:
            with contextlib.suppress(ResultTimeout):
                return await self._mill.threaded(self.wait, 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (left := until - time.monotonic()) > 0:
                    # In slices, so that a wait that was cancelled does not keep its thread for
                    # ever, and where there are more of them than threads, each has its turn.
                    with contextlib.suppress(ResultTimeout):
                        return await self._mill.patiently(self.wait, min(look, left))
                    look = FIRST_LOOK if self._mill.waiters.crowded else min(2 * look, LONGEST_LOOK)
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
    """The error for a name that a handle does not have; one of another queue's is translated."""
    here = handle_elsewhere(name)
    text = (
        f"a tidemill handle has no .{name}; write {here}"
        if here
        else f"{type(handle).__name__!r} object has no attribute {name!r}"
    )
    return AttributeError(text, name=name, obj=handle)


def _warn_in_loop() -> None:
    """A wait that blocks an event loop is nearly always meant to be awaited.

    Said once for each place. Not in IPython and notebooks: their cells run in a loop, and may wait.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if not hasattr(builtins, "__IPYTHON__"):
        text = "waiting for a job blocks the running event loop: `await job` does not"
        # Up through _wait and wait or result.
        warnings.warn(text, RuntimeWarning, stacklevel=4)
