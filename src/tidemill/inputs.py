"""Results of other jobs, put where a body refers to them.

How single jobs ended comes with the lease; the results of a group are read from the store, in
pages, when the job that takes them is about to run. Until then none of them is pruned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tidemill.brokers.base import Broker
from tidemill.codec import unpack
from tidemill.errors import JobPruned
from tidemill.hooks import Ended
from tidemill.job import GROUP, Envelope, Input, Lease, Record, Ref, State, Waits
from tidemill.retry import Fail

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["CENSUS", "Filler", "group_results", "member_id", "member_ids", "members_of", "size_of"]

PAGE = 1000
"""Members that are read at a time."""

CENSUS = "members"


def member_id(group_id: str, index: int) -> str:
    """The id of a group's member: no index is kept anywhere, since it can be told."""
    return f"{group_id}.{index:07d}"


def size_of(broker: Broker, record: Record) -> int | None:
    """How many members a group has; None while they are still being put."""
    count = record.envelope.headers.get(CENSUS)
    if count is None:
        (census,) = broker.wait_for([f"{record.envelope.id}.{CENSUS}"], 0)
        count = census.envelope.headers[CENSUS] if census is not None else None
    return None if count is None else int(count)


def member_ids(group_id: str, count: int) -> Iterator[list[str]]:
    """All of them, in pages."""
    for start in range(0, count, PAGE):
        stop = min(start + PAGE, count)
        yield [member_id(group_id, index) for index in range(start, stop)]


def members_of(broker: Broker, group_id: str, count: int) -> Iterator[tuple[str, Record | None]]:
    """Id and record of each member, in order; None for one that is not there (any more)."""
    for ids in member_ids(group_id, count):
        yield from zip(ids, broker.wait_for(ids, 0), strict=True)


def group_results(broker: Broker, group_id: str, *, lenient: bool = False) -> list[Any]:
    """The results of a group's members in order, of nested groups lists.

    Where ``lenient`` is true None stands for one that did not succeed.

    Raises:
        JobPruned: one is no longer kept; Fail: one did not succeed.
    """
    (record,) = broker.wait_for([group_id], 0)
    count = size_of(broker, record) if record is not None else None
    if count is None:
        raise JobPruned(f"group {group_id} is no longer kept")
    return [
        _result_of(broker, job_id, member, lenient=lenient)
        for job_id, member in members_of(broker, group_id, count)
    ]


def _result_of(broker: Broker, job_id: str, record: Record | None, *, lenient: bool) -> Any:
    if record is None:
        if lenient:
            return None
        raise JobPruned(f"job {job_id}, a member of a group, is no longer kept")
    if record.envelope.task == GROUP:
        return group_results(broker, job_id, lenient=lenient)
    return _value(Input(job_id, record.state, record.result, record.error), lenient=lenient)


def _value(end: Input, *, lenient: bool) -> Any:
    if end.state == State.SUCCEEDED:
        return unpack(end.result) if end.result else None
    if lenient:
        return None
    how = f"{end.state}: {end.error}" if end.state else "no longer kept"
    raise Fail(f"the result of job {end.id}, which it takes, is missing: that job is {how}")


class Filler:
    """Replaces what a body refers to, for one job."""

    def __init__(self, mill: Tidemill, lease: Lease, envelope: Envelope) -> None:
        self._mill = mill
        self._ends: Mapping[str, Input] = {end.id: end for end in lease.inputs}
        waits = envelope.links.waits if envelope.links is not None else ""
        self._lenient = waits in (Waits.ANY, Waits.FAILURE)

    def fill(self, value: Any) -> Any:
        """The value, with results in the place of references; in lists, tuples and dicts too.

        Raises:
            Fail: a result is missing, and the job does not go on without.
        """
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
        if not ref.group:
            return _value(self._ends.get(job_id, Input(job_id)), lenient=self._lenient)
        return self._group(job_id, lenient=self._lenient)

    def _group(self, group_id: str, *, lenient: bool) -> list[Any]:
        try:
            return group_results(self._mill.broker, group_id, lenient=lenient)
        except JobPruned as error:
            raise Fail(str(error)) from error

    def _end(self, ref: Ref) -> Ended:
        ends = [self._ends.get(job_id, Input(job_id)) for job_id in ref.ids]
        last = ends[-1]
        bad = None  # a step that is no longer kept had succeeded: it is needed no more
        if last.state != State.SUCCEEDED:  # else one may have been run again by itself
            known = (end for end in ends if end.state not in ("", State.SUCCEEDED))
            bad = next(known, last)
        shown = bad or last
        state = State(shown.state) if shown.state else None
        error = shown.error or ("" if state else "the job was deleted")
        load = functools.partial(self._group, last.id, lenient=True) if ref.group else None
        result = None
        if load is None and last.state == State.SUCCEEDED:
            result = _value(last, lenient=True)
        return Ended(
            last.id, state, result=result, error=error, failed=bad.id if bad else "", load=load
        )
