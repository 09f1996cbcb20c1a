"""Groups that are put in pieces: what becomes of one whose producer dies between two of them.

With the first piece comes a guard, a job that is due an hour later and is deleted after the last.
If it runs, it counts the members that are there: while they get more, it sleeps on; when nothing
was put for as long, and the group is still held, its producer is dead, and what was put is
cancelled. So the group ends, and its hooks are called.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from tidemill.brokers.base import Filter
from tidemill.codec import pack_call, pack_pickle_call
from tidemill.context import current_job
from tidemill.inputs import PAGE, member_id, member_ids
from tidemill.job import GUARD, Envelope, State
from tidemill.retry import Snooze
from tidemill.wholes import is_hook

if TYPE_CHECKING:
    from tidemill.app import Tidemill

__all__ = ["PATIENCE", "guard_of", "keep_guard"]

log = logging.getLogger("tidemill")

PATIENCE = 3600.0
"""Seconds in which a producer must put something, or it is taken for dead."""


def guard_of(mill: Tidemill, groups: Collection[str], jobs: Collection[Envelope]) -> Envelope:
    """The guard of groups that are put with some jobs, and have members to come."""
    outer = [one for one in groups if not any(one.startswith(f"{other}.") for other in groups)]
    queue = next(job.queue for job in jobs if job.id == outer[0])
    encode = pack_pickle_call if mill.pickles else pack_call
    envelope = Envelope(
        id=f"{outer[0]}.open",
        queue=queue,
        task=GUARD,
        body=encode((sorted(outer),), {}),
        text=f"{', '.join(sorted(outer))} is being put",
        delay=PATIENCE,
        result_ttl=0.0,
    )
    return mill.seal(envelope)


def keep_guard(mill: Tidemill, groups: list[str]) -> None:
    """The guard's task."""
    job = current_job()
    assert job is not None
    waiting = [group for group in groups if _waits(mill, group)]
    if not waiting:
        return
    count = sum(_count(mill, group) for group in waiting)
    progress = mill.job(job.id).progress
    held = [group for group in waiting if _is_held(mill, group)]
    if not held or progress is None or progress[0] != count:
        job.progress(count)
        raise Snooze(PATIENCE, f"{count} members are put so far")
    log.error("who put the members of %s died, or put no more: what is put is cancelled", held)
    for group in held:
        _give_up(mill, group)


def _waits(mill: Tidemill, group: str) -> bool:
    record = mill.broker.get(group)
    return record is not None and record.state is State.WAITING


def _is_held(mill: Tidemill, group: str) -> bool:
    """True when more stands before a group than its unfinished members: it is not let go yet.

    A member that ends while they are counted can make this say no, and never yes.
    """
    unfinished = 0
    for ids in member_ids(group, _count(mill, group)):
        records = mill.broker.wait_for(ids, 0)
        unfinished += sum(1 for r in records if r is not None and not r.state.finished)
    record = mill.broker.get(group)
    return record is not None and unfinished < record.pending


def _count(mill: Tidemill, group: str) -> int:
    """How many members are there: they came in order, and none goes before the group has ended."""
    low, high = 0, 1
    while mill.broker.get(member_id(group, high - 1)) is not None:
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if mill.broker.get(member_id(group, middle)) is None:
            high = middle
        else:
            low = middle + 1
    return low


def _give_up(mill: Tidemill, group_id: str) -> None:
    """Cancel what has been put of a group, and then it; its hooks are called."""
    cursor = ""
    while True:
        page = mill.broker.find(Filter(id_prefix=f"{group_id}."), PAGE, cursor)
        unfinished = [r for r in page.records if not r.state.finished and not is_hook(r)]
        mill.broker.cancel([record.envelope.id for record in unfinished])
        cursor = page.cursor
        if not cursor:
            break
    mill.broker.cancel([group_id])
