"""Jobs that wait for other jobs: the commit that ends a job counts down the jobs that wait for it.

A separate table has two counts for each job: its parents that have not ended, and its parents that
did not succeed. So the end of a group's member changes only counts, and no record of a job. The
counts stay right even after the waiting job itself has ended. So when a failed job is made ready
again, its children wait again, too.

A *fall* is a long count-down, as when the first job of a chain of many steps is cancelled. Each
commit does a piece of a fall. For the rest the commit adds an entry to the due table, due at once.
So the next caller continues the fall, even if the process that began it dies.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Iterator, Sequence

import lmdb
import msgspec

from tidemill.brokers.contract.dependencies import not_waiting
from tidemill.brokers.lmdb.layout import DUE_EXPIRY, DUE_FALL, DUE_KEY, MICRO, Tables, rows_of
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    EXPIRED,
    FAILED,
    RUNNING,
    STATES,
    SUCCEEDED,
    WAITING,
    Flag,
    Stored,
    encode,
    envelope_of,
    state_and_line,
)
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Input, RunOn

_HOW = {FAILED: "failed", CANCELLED: "was cancelled", EXPIRED: "expired"}
_COUNTS = struct.Struct(">II")  # pending, failures
_LEFT = msgspec.msgpack.Decoder(tuple[str, tuple[int, int, str]])
NO_LINKS = Links()

FALL_MOST = 2000  # the most jobs that one commit counts down, which takes some 0.1 s


def links_of(stored: Stored) -> Links:
    if not stored.head.flags & Flag.LINKED:
        return NO_LINKS
    return envelope_of(stored).links or NO_LINKS


# -- putting -------------------------------------------------------------------------------------


def link(
    commit: Transitions,
    jobs: Sequence[Envelope],
    hold: Collection[str] = (),
    also: Collection[str] = (),
    *,
    strict: bool = True,
) -> None:
    """Have children wait for the jobs that were put, and record which jobs get no more parents."""
    # Waiting jobs of this put that are not in ``hold``, and the jobs ``also``, get no more parents.
    for name in also:
        if not _is_waiting(commit, name.encode()):
            raise not_waiting(name)
    begun = list(also)
    for job in jobs:
        links = job.links or NO_LINKS
        for name in links.next:
            _expect_one_more(commit, name, strict)
        if links.waits:
            put_counts(commit, job.id.encode(), 1, 0)  # 1 stands for parents that may still come
            if job.id not in hold:
                begun.append(job.id)
    for name in begun:
        count_down(commit, name.encode(), 1, 0, "")
    flow(commit)


def _expect_one_more(commit: Transitions, name: str, strict: bool) -> None:
    child = name.encode()
    if _is_waiting(commit, child):
        pending, failures = _counts(commit, child)
        put_counts(commit, child, pending + 1, failures)
    elif strict:
        raise not_waiting(name)


def _is_waiting(commit: Transitions, job_id: bytes) -> bool:
    if commit.txn.get(job_id, db=commit.t.wait) is None:
        return False
    data = commit.txn.get(job_id, db=commit.t.job)
    return data is not None and state_and_line(data)[0] == WAITING


def counts_of(txn: lmdb.Transaction[bytes], tables: Tables, job_id: bytes) -> tuple[int, int]:
    """The numbers of a job's parents that have not ended, and that did not succeed."""
    data = txn.get(job_id, db=tables.wait)
    pending, failures = _COUNTS.unpack(data) if data is not None else (0, 0)
    return pending, failures


def _counts(commit: Transitions, job_id: bytes) -> tuple[int, int]:
    return counts_of(commit.txn, commit.t, job_id)


def put_counts(commit: Transitions, job_id: bytes, pending: int, failures: int) -> None:
    commit.txn.put(job_id, _COUNTS.pack(pending, failures), db=commit.t.wait)


# -- ending --------------------------------------------------------------------------------------


def flow(commit: Transitions) -> None:
    """Count down the children of all ended jobs, and of jobs that end because of them."""
    while commit.ended:
        ended, commit.ended = commit.ended, []
        counts: dict[str, tuple[int, int, str]] = {}
        for stored, state in ended:
            failed = state != SUCCEEDED
            how = _HOW.get(state, "was deleted")
            why = f"not run, since job {stored.id.decode()} {how}" if failed else ""
            for name in links_of(stored).next:
                number, failures, first = counts.get(name, (0, 0, ""))
                counts[name] = number + 1, failures + failed, first or why
        for name, count in counts.items():
            if commit.fallen < FALL_MOST:
                commit.fallen += 1
                count_down(commit, name.encode(), *count)
            else:
                key = DUE_KEY.pack(0, commit.now, DUE_FALL, commit.next_number())
                commit.txn.put(key, encode((name, count)), db=commit.t.due)
                commit.untimed = True


def go_on(commit: Transitions, left: bytes) -> None:
    """Count down a child that an earlier commit left."""
    name, count = _LEFT.decode(left)
    commit.fallen += 1
    count_down(commit, name.encode(), *count)


def finish_falls(commit: Transitions) -> None:
    """Finish all falls, however long, for a step that must find the final counts."""
    commit.fallen = -FALL_MOST * 1_000_000
    due = rows_of(commit.txn, commit.t.due, DUE_KEY.pack(0, 0, 0, 0)[:1])
    over = itertools.takewhile(lambda row: DUE_KEY.unpack(row[0])[1] <= commit.now, due)
    for key, value in [row for row in over if DUE_KEY.unpack(row[0])[2] == DUE_FALL]:
        commit.txn.delete(key, db=commit.t.due)
        go_on(commit, value)
    flow(commit)


def count_down(commit: Transitions, job_id: bytes, number: int, failures: int, why: str) -> None:
    """Count down a job by ``number`` parents; ``failures`` of them did not succeed."""
    data = commit.txn.get(job_id, db=commit.t.wait)
    if data is None:
        return
    pending, failed = _COUNTS.unpack(data)
    pending, failed = max(0, pending - number), failed + failures
    put_counts(commit, job_id, pending, failed)
    if pending and (not failures or failed > failures):
        # Nothing follows: no parent failed now, or an earlier failure has already ended the job. So
        # the record of the job, which may be large, need not be read.
        return
    stored = commit.load(job_id)
    if stored is None or stored.head.state != WAITING:
        return
    waits = links_of(stored).waits
    if waits == RunOn.SUCCESS and failed:
        _drop(commit, stored, CANCELLED, why)
    elif not pending:
        _begin(commit, stored, waits, failed)


def _begin(commit: Transitions, stored: Stored, waits: str, failed: int) -> None:
    """Start, end or delete a job whose parents have all ended."""
    if waits == RunOn.BARRIER:
        if failed:
            _drop(commit, stored, FAILED, f"{failed} of its jobs did not succeed")
        else:
            commit.unplace(stored)
            commit.end(stored, SUCCEEDED, stored.tail)
    elif waits == RunOn.FAILURE and not failed:
        commit.unplace(stored)
        commit.vanish(stored)
    else:
        commit.unplace(stored)
        envelope = envelope_of(stored)
        due = commit.now + int(envelope.delay * MICRO) if envelope.delay > 0 else 0
        wall = Flag.WALL if not due and envelope.at > 0 else 0
        commit.place(stored, due or int(envelope.at * MICRO), wall)


def is_barrier(stored: Stored) -> bool:
    """True for a job that stands for a group, and never runs."""
    return links_of(stored).waits == RunOn.BARRIER


def may_wait_anew(commit: Transitions, stored: Stored) -> bool:
    """False for a job that can only end as before, because of how its parents ended."""
    if is_barrier(stored):
        return not stored.head.flags & Flag.DROPPED
    return links_of(stored).waits != RunOn.SUCCESS or not _counts(commit, stored.id)[1]


def must_wait(commit: Transitions, stored: Stored) -> bool:
    """True for a job with unfinished parents, and for a barrier, which never runs."""
    return is_barrier(stored) or _counts(commit, stored.id)[0] > 0


def wait_anew(commit: Transitions, stored: Stored) -> None:
    """Make an ended job wait for its parents again, or start it if they have ended."""
    _wait_again(commit, stored)
    pending, failed = _counts(commit, stored.id)
    if not pending:
        waiting = commit.load(stored.id)
        assert waiting is not None
        _begin(commit, waiting, links_of(waiting).waits, failed)


def _drop(commit: Transitions, stored: Stored, state: int, why: str) -> None:
    """End a job that cannot start, because of how its parents ended."""
    stored.head.flags |= Flag.DROPPED
    commit.unplace(stored)
    commit.end(stored, state, stored.tail, why)


def revive(commit: Transitions, stored: Stored) -> None:
    """Let dependents that ended because of this job wait again, since this job will run again."""
    revived = [stored]
    while revived:
        for name in links_of(revived.pop()).next:
            child = name.encode()
            behind = commit.load(child)
            if behind is None or commit.txn.get(child, db=commit.t.wait) is None:
                continue  # the job is gone, or another job has its id now
            pending, failures = _counts(commit, child)
            failures = max(0, failures - 1)
            put_counts(commit, child, pending + 1, failures)
            if not behind.head.flags & Flag.DROPPED:
                continue
            if not failures or links_of(behind).waits == RunOn.BARRIER:
                _wait_again(commit, behind)
                revived.append(behind)


def _wait_again(commit: Transitions, stored: Stored) -> None:
    commit.unfinish(stored)
    head, tail = stored.head, stored.tail
    head.state, head.finished, head.prune = WAITING, 0, 0
    head.flags &= ~Flag.DROPPED
    tail.error = ""
    if head.expires:
        key = DUE_KEY.pack(0, head.expires, DUE_EXPIRY, head.seq)
        commit.txn.put(key, stored.id, db=commit.t.due)
        commit.untimed = True
    commit.count(commit.row_of(head.line), WAITING, +1)
    commit.save(stored, tail)


# -- what a flow needs ---------------------------------------------------------------------------


def is_needed(commit: Transitions, stored: Stored, unfinished: dict[str, bool]) -> bool:
    """True while a dependent of this job has not ended, and may need this job's result."""
    # A job that waits for a barrier depends on all jobs before the barrier. ``unfinished`` caches
    # the answers, since many jobs may have the same dependent.
    for name in links_of(stored).next:
        if name not in unfinished:
            unfinished[name] = _goes_on(commit, name.encode(), unfinished)
        if unfinished[name]:
            return True
    return False


def is_unfinished(commit: Transitions, job_id: bytes) -> bool:
    """True while a job exists and has not ended."""
    data = commit.txn.get(job_id, db=commit.t.job)
    return data is not None and state_and_line(data)[0] < SUCCEEDED


def _goes_on(commit: Transitions, job_id: bytes, unfinished: dict[str, bool]) -> bool:
    """True while a job has not ended, or is a barrier for which an unended job waits."""
    if is_unfinished(commit, job_id):
        return True
    stored = commit.load(job_id)
    barrier = stored is not None and links_of(stored).waits == RunOn.BARRIER
    return barrier and stored is not None and is_needed(commit, stored, unfinished)


def inputs_of(commit: Transitions, stored: Stored) -> tuple[Input, ...]:
    """The outcomes of the jobs whose results this job gets."""
    return tuple(_inputs(commit, links_of(stored).inputs))


def _inputs(commit: Transitions, names: Sequence[str]) -> Iterator[Input]:
    for name in names:
        before = commit.load(name.encode())
        if before is None:
            yield Input(name)
        else:
            state = RUNNING if commit.is_running(before) else before.head.state
            tail = before.tail
            yield Input(name, STATES[state].value, tail.result, tail.error)
