"""All the jobs of a chain or a group at once: those whose ids follow from that of the whole.

A page is one step of the store. Killed between two, some is done; done again, the rest is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.brokers.base import Filter
from tidemill.inputs import PAGE
from tidemill.job import GROUP, GUARD, Record

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["cancel_whole", "delete_whole", "is_hook"]


def cancel_whole(mill: Tidemill, whole: str, terminate: bool) -> int:
    """Cancel all of a whole that does some work; hooks are not among it, nor groups, which end."""
    found = 0
    for records in _parts(mill, whole):
        ids = [
            r.envelope.id
            for r in records
            if not r.state.finished and not is_hook(r) and r.envelope.task != GROUP
        ]
        found += sum(mill.broker.cancel(ids, terminate=terminate))
    record = mill.broker.get(whole)
    if record is not None and record.envelope.task != GROUP:
        found += sum(mill.broker.cancel([whole], terminate=terminate))
    return found


def delete_whole(mill: Tidemill, whole: str) -> bool:
    """Delete all of a whole; False when there was nothing.

    Hooks first, or they would fire for what follows; then the whole, or it would end for it.
    """
    deleted = 0
    for records in _parts(mill, whole):
        deleted += sum(mill.broker.delete([r.envelope.id for r in records if is_hook(r)]))
    deleted += sum(mill.broker.delete([whole]))
    for records in _parts(mill, whole):
        deleted += sum(mill.broker.delete([r.envelope.id for r in records]))
    return bool(deleted)


def _parts(mill: Tidemill, whole: str) -> Iterator[list[Record]]:
    """Everything whose id follows from that of a whole, in pages."""
    cursor = ""
    while True:
        page = mill.broker.find(Filter(id_prefix=f"{whole}."), PAGE, cursor)
        yield page.records
        cursor = page.cursor
        if not cursor:
            return


def is_hook(record: Record) -> bool:
    """True for a job that is called for how others ended, or looks after them: it does no work."""
    return ".on_" in record.envelope.id or record.envelope.task == GUARD
