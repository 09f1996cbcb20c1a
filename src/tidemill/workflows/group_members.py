"""Cancel or delete all jobs of a chain or a group: their ids begin with the id of the whole.

One page of jobs is one step of the store. A caller that dies between two pages leaves the rest;
the same call again completes the work.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.brokers.contract.inspection import Filter
from tidemill.client.results import PAGE, member_id, members_of, size_of
from tidemill.client.runtime import Runtime
from tidemill.core.job import GROUP, Record

__all__ = ["cancel_all", "delete_all", "is_hook", "lacks_members"]


def cancel_all(mill: Runtime, whole_id: str, terminate: bool) -> int:
    """Cancel the jobs of a chain or a group, and return how many were cancelled.

    Hooks are not cancelled. Nor are the jobs that stand for groups: they end with their members.
    """
    cancelled = 0
    for records in _pages(mill, whole_id):
        ids = [
            r.envelope.id
            for r in records
            if not r.state.finished and not is_hook(r) and r.envelope.task != GROUP
        ]
        cancelled += sum(mill.broker.cancel(ids, terminate=terminate))
    record = mill.broker.get(whole_id)
    if record is not None and record.envelope.task != GROUP:
        cancelled += sum(mill.broker.cancel([whole_id], terminate=terminate))
    return cancelled


def lacks_members(mill: Runtime, group: Record) -> bool:
    """True while the producer has not stored all members of a group."""
    broker, group_id = mill.broker, group.envelope.id
    count = size_of(broker, group)
    if count is None:
        return True
    if not count or broker.get(member_id(group_id, count - 1)) is not None:
        return False
    # The last member may also have been deleted: then the group waits for no lacking members. The
    # group is read last, so a member that ends meanwhile does not look like a lacking member.
    members = members_of(broker, group_id, count)
    unfinished = sum(member is not None and not member.state.finished for _, member in members)
    record = broker.get(group_id)
    return record is not None and unfinished < record.pending


def delete_all(mill: Runtime, whole_id: str) -> bool:
    """Delete the jobs of a chain or a group; False when there were none.

    Hooks go first, or the deletion of the others would start them. The job of the whole goes next,
    or the deletion of its members would end it.
    """
    deleted = 0
    for records in _pages(mill, whole_id):
        deleted += sum(mill.broker.delete([r.envelope.id for r in records if is_hook(r)]))
    deleted += sum(mill.broker.delete([whole_id]))
    for records in _pages(mill, whole_id):
        deleted += sum(mill.broker.delete([r.envelope.id for r in records]))
    return bool(deleted)


def _pages(mill: Runtime, whole_id: str) -> Iterator[list[Record]]:
    """The jobs whose ids begin with the id of the whole and a dot, in pages."""
    cursor = ""
    while True:
        page = mill.broker.find(Filter(id_prefix=f"{whole_id}."), PAGE, cursor)
        yield page.records
        cursor = page.cursor
        if not cursor:
            return


def is_hook(record: Record) -> bool:
    """True for a job that runs because other jobs ended (``on_success`` and its kin)."""
    return ".on_" in record.envelope.id
