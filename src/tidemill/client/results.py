"""Read the members of a group and their results from the store, in pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tidemill.client.inline_jobs import JobStore
from tidemill.core.codec import unpack, verify, verify_result
from tidemill.core.errors import JobPruned
from tidemill.core.job import GROUP, Input, Record, State
from tidemill.core.retry import Fail

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


def size_of(broker: JobStore, record: Record, keys: Sequence[bytes] = ()) -> int | None:
    """The number of members of a group; None while the members are still being put.

    Raises:
        BadSignature: the number is not signed with one of the ``keys``.
    """
    job_id, counted = record.envelope.id, record
    if MEMBER_COUNT not in record.envelope.headers:
        job_id = f"{job_id}.{MEMBER_COUNT}"
        (found,) = broker.wait_for([job_id], 0)
        if found is None:
            return None
        counted = found
    if not keys:
        return int(counted.envelope.headers[MEMBER_COUNT])
    verify(msgspec.structs.replace(counted.envelope, id=job_id), keys)
    _, named = unpack(counted.envelope.body)
    return int(named[MEMBER_COUNT])


def members_of(broker: JobStore, group_id: str, count: int) -> Iterator[tuple[str, Record | None]]:
    """The id and record of each member, in order; None for a member that is not in the store."""
    for ids in member_ids(group_id, count):
        yield from zip(ids, broker.wait_for(ids, 0), strict=True)


def group_results(
    broker: JobStore, group_id: str, *, lenient: bool = False, keys: Sequence[bytes] = ()
) -> list[Any]:
    """The results of a group's members in order; the result of a nested group is a list.

    With ``lenient`` the result of a member that did not succeed is None. With ``keys`` the results
    must be signed.

    Raises:
        JobPruned: the group or a member is no longer kept.
        Fail: a member did not succeed.
        BadSignature: a result, or the number of members, is not signed with one of the keys.
    """
    (record,) = broker.wait_for([group_id], 0)
    if record is not None:
        record.envelope.id = group_id  # a signature for another id is not accepted
    count = size_of(broker, record, keys) if record is not None else None
    if count is None:
        raise JobPruned(f"group {group_id} is no longer kept")
    return [
        _member_result(broker, job_id, member, lenient=lenient, keys=keys)
        for job_id, member in members_of(broker, group_id, count)
    ]


def _member_result(
    broker: JobStore, job_id: str, record: Record | None, *, lenient: bool, keys: Sequence[bytes]
) -> Any:
    if record is None:
        if lenient:
            return None
        raise JobPruned(f"job {job_id}, a member of a group, is no longer kept")
    if record.envelope.task == GROUP:
        return group_results(broker, job_id, lenient=lenient, keys=keys)
    end = Input(job_id, record.state, record.raw_result, record.error)
    return result_of(end, lenient=lenient, keys=keys)


def result_of(end: Input, *, lenient: bool, keys: Sequence[bytes]) -> Any:
    """The result of a finished job; with ``lenient`` None for a job that did not succeed.

    Raises:
        Fail: the job did not succeed, or is no longer kept.
        BadSignature: there are keys, and none of them signed the result.
    """
    if end.state == State.SUCCEEDED:
        if keys:
            verify_result(end.id, end.result, keys)
        return unpack(end.result) if end.result else None
    if lenient:
        return None
    how = f"{end.state}: {end.error}" if end.state else "no longer kept"
    raise Fail(f"the result of job {end.id}, which is an argument, is missing: that job is {how}")
