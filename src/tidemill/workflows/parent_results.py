"""Fill the arguments of a job with the results of its parents.

The body of a job holds a reference (``Ref``) in the place of each result. The ends of single
parents come with the job's lease. The results of a group are read from the store, in pages, just
before the job runs. Until then, the store prunes no parent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemill.client.compositions import group_results, result_of
from tidemill.client.task import Ended
from tidemill.core.envelope import Envelope, Ref
from tidemill.core.job import NOT_STARTED, WHILE_RUNNING, Input, Lease, RunOn, State
from tidemill.core.retry import Fail, Skip, Snooze
from tidemill.errors import JobPruned

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

LOOK_AGAIN = 1.0  # seconds until a job looks again at a parent that was retried before the job ran


class ParentResults:
    """The results and ends of one job's parents.

    Raises:
        Snooze: a parent runs again, since somebody retried it before this job ran.
        Skip: a hook for failures has nothing to tell: its parents succeeded after a retry.
    """

    def __init__(self, runtime: Runtime, lease: Lease, envelope: Envelope) -> None:
        self._runtime = runtime
        self._ends: Mapping[str, Input] = {end.id: end for end in lease.inputs}
        waits = envelope.links.waits if envelope.links is not None else ""
        self._lenient = waits in (RunOn.ANY, RunOn.FAILURE)
        for end in lease.inputs:
            if end.state and not State(end.state).finished:
                raise Snooze(LOOK_AGAIN, f"job {end.id}, for which it waited, was retried")
        states = {end.state for end in lease.inputs}
        if waits == RunOn.FAILURE and states == {State.SUCCEEDED}:
            raise Skip("the jobs for which it waited succeeded after a retry")

    def fill(self, value: Any) -> Any:
        """Replace the references in a value, also in lists, tuples and dicts. Raises Fail."""
        if isinstance(value, Ref):
            return self._end(value) if value.ended else self._result(value)
        if type(value) is list:
            return [self.fill(item) for item in value]
        if type(value) is tuple:
            return tuple([self.fill(item) for item in value])
        if type(value) is dict:
            return {key: self.fill(item) for key, item in value.items()}
        return value

    def _result(self, ref: Ref) -> Any:
        job_id = ref.ids[-1]
        if ref.group:
            return self._group_results(job_id, lenient=self._lenient)
        end = self._ends.get(job_id, Input(job_id))
        return result_of(end, lenient=self._lenient, keys=self._runtime.keys)

    def _group_results(self, group_id: str, *, lenient: bool) -> list[Any]:
        try:
            return group_results(
                self._runtime.broker, group_id, lenient=lenient, keys=self._runtime.keys
            )
        except JobPruned as error:
            raise Fail(str(error)) from error

    def _end(self, ref: Ref) -> Ended:
        """The argument of a hook: how a job, a chain or a group ended."""
        ends = [self._ends.get(job_id, Input(job_id)) for job_id in ref.ids]
        last = ends[-1]
        failed = None
        # If the last step succeeded, no step counts as failed: a failed step was retried.
        if last.state != State.SUCCEEDED:
            # A step without a state was deleted, and had succeeded before.
            known = [end for end in ends if end.state not in ("", State.SUCCEEDED)]
            # A chain was cancelled by hand if a step was; a group among its steps then failed.
            by_hand = (end for end in known if end.error in (NOT_STARTED, WHILE_RUNNING))
            failed = next(by_hand, known[0] if known else last)
        shown = failed or last
        state = State(shown.state) if shown.state else None
        error = shown.error or ("" if state else "the job was deleted")
        load, result = None, None
        if ref.group:
            load = functools.partial(self._group_results, last.id, lenient=True)
        elif last.state == State.SUCCEEDED:
            result = result_of(last, lenient=True, keys=self._runtime.keys)
        failed_id = failed.id if failed else ""
        return Ended(last.id, state, result=result, error=error, failed=failed_id, load=load)
