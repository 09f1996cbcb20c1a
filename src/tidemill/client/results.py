"""Read the members of a group and their results from the store, in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemill.client.inline_jobs import JobStore
from tidemill.core.codec import unpack
from tidemill.core.errors import JobPruned
from tidemill.core.job import GROUP, Input, Record, State
from tidemill.core.retry import Fail

__all__ = [
    "MEMBER_COUNT",
    "PAGE",
    "group_results",
    "member_id",
    "member_ids",
    "members_of",
    "result_of",
    "size_of",
]

PAGE = 1000
"""The number of members that one read returns."""

MEMBER_COUNT = "members"
"""The header of a group's job that holds the number of members.

A group of a long iterator lacks this header. Then the job ``<group>.members``, which is put after
the last member, has the header.
"""


def member_id(group_id: str, index: int) -> str:
    """The id of a group's member. The id follows from the index, so the store lists no members."""
    return f"{group_id}.{index:07d}"


def member_ids(group_id: str, count: int) -> Iterator[list[str]]:
    """The ids of all members, in pages."""
    for start in range(0, count, PAGE):
        stop = min(start + PAGE, count)
        yield [member_id(group_id, index) for index in range(start, stop)]


def size_of(broker: JobStore, record: Record) -> int | None:
    """The number of members of a group; None while the members are still being put."""
    count = record.envelope.headers.get(MEMBER_COUNT)
    if count is None:
        (counted,) = broker.wait_for([f"{record.envelope.id}.{MEMBER_COUNT}"], 0)
        count = counted.envelope.headers[MEMBER_COUNT] if counted is not None else None
    return None if count is None else int(count)


def members_of(broker: JobStore, group_id: str, count: int) -> Iterator[tuple[str, Record | None]]:
    """The id and record of each member, in order; None for a member that is not in the store."""
    for ids in member_ids(group_id, count):
        yield from zip(ids, broker.wait_for(ids, 0), strict=True)


def group_results(broker: JobStore, group_id: str, *, lenient: bool = False) -> list[Any]:
    """The results of a group's members in order; the result of a nested group is a list.

    With ``lenient`` the result of a member that did not succeed is None.

    Raises:
        JobPruned: the group or a member is no longer kept.
        Fail: a member did not succeed.
    """
    (record,) = broker.wait_for([group_id], 0)
    count = size_of(broker, record) if record is not None else None
    if count is None:
        raise JobPruned(f"group {group_id} is no longer kept")
    return [
        _member_result(broker, job_id, member, lenient=lenient)
        for job_id, member in members_of(broker, group_id, count)
    ]


def _member_result(broker: JobStore, job_id: str, record: Record | None, *, lenient: bool) -> Any:
    if record is None:
        if lenient:
            return None
        raise JobPruned(f"job {job_id}, a member of a group, is no longer kept")
    if record.envelope.task == GROUP:
        return group_results(broker, job_id, lenient=lenient)
    return result_of(Input(job_id, record.state, record.raw_result, record.error), lenient=lenient)


def result_of(end: Input, *, lenient: bool) -> Any:
    """The result of a finished job; with ``lenient`` None for a job that did not succeed.

    Raises:
        Fail: the job did not succeed, or is no longer kept.
    """
    if end.state == State.SUCCEEDED:
        return unpack(end.result) if end.result else None
    if lenient:
        return None
    how = f"{end.state}: {end.error}" if end.state else "no longer kept"
    raise Fail(f"the result of job {end.id}, which is an argument, is missing: that job is {how}")
