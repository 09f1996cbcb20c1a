"""Cancel, alter or delete all jobs of a chain or a group: their ids begin with its id.

Users choose ids, so another job may also have an id that begins with this id. So only jobs with
links, and with the id endings that :mod:`.planner` gives, count as parts of a chain or a group.

Each call of the store changes one page of jobs. If the caller dies between two pages, the other
jobs stay unchanged. The same call again completes the work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.results import MEMBER_COUNT, PAGE, member_id, members_of, size_of
from tidemill.client.runtime import Runtime
from tidemill.core.job import GROUP, WAITING_STATES, Record

__all__ = ["alter_all", "cancel_all", "delete_all", "is_hook", "lacks_members", "pages_of_parts"]

_PARTS = re.compile(rf"(\.(\d{{4}}|\d{{7}}|on_[a-z]+\d*|{MEMBER_COUNT}))+")


def cancel_all(mill: Runtime, whole_id: str, terminate: bool) -> int:
    """Cancel the jobs of a chain or a group, and return how many were cancelled.

    Hooks, and the jobs that stand for groups, are not cancelled: a group ends with its members.
    """
    cancelled = 0
    for records in pages_of_parts(mill, whole_id):
        ids = [
            r.envelope.id
            for r in records
            if not r.state.finished and not is_hook(r) and r.envelope.task != GROUP
        ]
        cancelled += sum(mill.job_store.cancel(ids, terminate=terminate))
    record = mill.job_store.get(whole_id)
    if record is not None and record.envelope.task != GROUP:
        cancelled += sum(mill.job_store.cancel([whole_id], terminate=terminate))
    return cancelled


def alter_all(mill: Runtime, whole_id: str, rank: int | None, queue: str | None) -> int:
    """Alter the jobs of a chain or a group, hooks too, and return how many were altered."""
    mill.features.need(Feature.ALTER, "alter()")
    altered = 0
    for records in pages_of_parts(mill, whole_id):
        ids = [r.envelope.id for r in records if r.state in WAITING_STATES]
        altered += sum(mill.job_store.alter(ids, rank=rank, queue=queue))
    return altered + sum(mill.job_store.alter([whole_id], rank=rank, queue=queue))


def lacks_members(mill: Runtime, group: Record) -> bool:
    """True while the producer has not stored all members of a group."""
    broker, group_id = mill.job_store, group.envelope.id
    count = size_of(broker, group)
    if count is None:
        return True
    if not count or broker.get(member_id(group_id, count - 1)) is not None:
        return False
    # The last member is missing: it was deleted, or never stored. The group also waits for members
    # that were never stored. So compare the number of jobs that the group waits for with the number
    # of unfinished members. The group is read last: a member that ends during these reads must not
    # count as a member that was never stored.
    members = members_of(broker, group_id, count)
    unfinished = sum(member is not None and not member.state.finished for _, member in members)
    record = broker.get(group_id)
    return record is not None and unfinished < record.pending


def delete_all(mill: Runtime, whole_id: str) -> bool:
    """Delete the jobs of a chain or a group; False when there were none.

    Hooks are deleted first, because the deletion of other jobs would start them. Next comes the job
    with the id of the chain or group, because the deletion of its members would end this job.
    """
    deleted = 0
    for records in pages_of_parts(mill, whole_id):
        deleted += sum(mill.job_store.delete([r.envelope.id for r in records if is_hook(r)]))
    deleted += sum(mill.job_store.delete([whole_id]))
    for records in pages_of_parts(mill, whole_id):
        deleted += sum(mill.job_store.delete([r.envelope.id for r in records]))
    return bool(deleted)


def pages_of_parts(mill: Runtime, whole_id: str) -> Iterator[list[Record]]:
    """The jobs of a chain, a group or a flow in pages, without the job ``whole_id``."""
    cursor = ""
    while True:
        page = mill.job_store.find(Filter(id_prefix=f"{whole_id}."), PAGE, cursor)
        yield [record for record in page.records if _is_part(record, whole_id)]
        cursor = page.cursor
        if not cursor:
            return


def is_hook(record: Record) -> bool:
    """True for the job of a hook, such as ``on_success``: it runs because other jobs ended."""
    is_part, last = record.envelope.links is not None, record.envelope.id.rpartition(".")[2]
    return is_part and last.startswith("on_")


def _is_part(record: Record, whole_id: str) -> bool:
    envelope = record.envelope
    return envelope.links is not None and bool(_PARTS.fullmatch(envelope.id, len(whole_id)))
