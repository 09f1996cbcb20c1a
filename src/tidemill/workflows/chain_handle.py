"""The handle on a chain: the handle of its last step, with the steps before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.client.compositions import alter_all, cancel_all, delete_all
from tidemill.client.job_handle import Job
from tidemill.core.config import Seconds, check_alter
from tidemill.core.job import Record, State
from tidemill.errors import InvalidOption
from tidemill.workflows.handles import JobGroup

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

R = TypeVar("R")


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
        if record.state is not State.SUCCEEDED:
            for step in self.steps[:-1]:
                if step.state is not State.SUCCEEDED and step.state.finished:
                    step.result()
        return super()._outcome(record)

    def cancel(self, terminate: bool = False) -> bool:
        """Cancel all unfinished steps; False when all steps had finished."""
        if self._runtime.sync:
            return False
        done = [step.cancel(terminate) for step in self.steps[:-1]]
        return any([*done, bool(cancel_all(self._runtime, self.id, terminate))])

    def alter(self, *, priority: float | None = None, queue: str | None = None) -> bool:
        """Give the waiting steps another priority or queue; False when no step waits."""
        rank, name = check_alter(priority, queue)
        if self._runtime.sync:
            return False
        try:
            done = [step.alter(priority=priority, queue=queue) for step in self.steps[:-1]]
            return any([*done, bool(alter_all(self._runtime, self.id, rank, name))])
        finally:
            self._forget()

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
