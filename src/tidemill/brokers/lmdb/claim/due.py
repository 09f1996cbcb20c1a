"""Due times: entries that come due, and finished jobs to prune."""

from __future__ import annotations

from tidemill.brokers.lmdb.layout import (
    DUE_EXPIRY,
    DUE_FALL,
    DUE_JOB,
    DUE_KEY,
    DUE_LEASE,
    DUE_LIMITER,
    DUE_PARTITION,
    FIN_KEY,
    MICRO,
    NUMBER,
)
from tidemill.brokers.lmdb.put.workflows import FALL_MOST, flow, go_on, is_needed
from tidemill.brokers.lmdb.record import (
    EXPIRED,
    KEPT_LINKED,
    KEPT_OTHER,
    KEPT_PLAIN,
    KEPT_RESULT,
    READY,
    TOO_LATE,
    Flag,
    flags_of,
)
from tidemill.brokers.lmdb.settle import expire_lease
from tidemill.brokers.lmdb.transitions import Transitions

_PROMOTE_MOST = 5000  # jobs that become ready in one commit (40 ms); an end counts as ``_END`` jobs

_END = 10

_BESIDE = Flag.APART | Flag.NOTED | Flag.LINKED

_JUMPS = 32  # the most groups of young results that one look skips


def come_due(commit: Transitions) -> bool:
    """Handle due entries, as many as one step should; True when more are left."""
    if commit.is_sealed:
        return False
    cursor = commit.txn.cursor(commit.t.due)
    done = 0
    for clock, now in ((0, commit.now), (1, commit.wall)):
        while cursor.set_range(DUE_KEY.pack(clock, 0, 0, 0)):
            found, time, kind, number = DUE_KEY.unpack(cursor.key())
            if found != clock or time > now:
                break
            if done >= _PROMOTE_MOST or (kind == DUE_FALL and commit.fallen >= FALL_MOST):
                return True
            done += _END if kind in (DUE_LEASE, DUE_EXPIRY) else 1
            reference = cursor.value()
            cursor.delete()
            _handle_due(commit, kind, reference, number)
            if commit.ended:
                flow(commit)
    return False


def _handle_due(commit: Transitions, kind: int, reference: bytes, number: int) -> None:
    """Handle one entry of the due table, which is deleted already."""
    if kind == DUE_LEASE:
        expire_lease(commit, reference, number)
    elif kind == DUE_FALL:
        go_on(commit, reference)
    elif kind == DUE_PARTITION:
        commit.partitions.came_due(reference)
    elif kind == DUE_LIMITER:
        commit.limiters.came_due(commit.row(reference.decode()))
    else:
        _job_due(commit, reference, kind)


def _job_due(commit: Transitions, job_id: bytes, kind: int) -> None:
    """Make a scheduled job ready, or end an expired job."""
    # An entry that is no longer right for its job changes nothing.
    stored = commit.load(job_id)
    if stored is None or stored.head.state > READY:
        return
    if kind == DUE_JOB:
        commit.count(commit.row_of(stored.head.line), stored.head.state, -1)
        commit.place(stored, stored.head.due, stored.head.flags & Flag.WALL)
    elif not commit.is_running(stored):
        commit.unplace(stored)
        commit.end(stored, EXPIRED, stored.tail, TOO_LATE)


def prune(commit: Transitions, most: int) -> int:
    """Forget finished jobs that are too old or too many; at most ``most`` of them."""
    if commit.is_sealed:
        return 0
    pruned = 0
    _part_from_flows(commit, most)
    for kept in (KEPT_PLAIN, KEPT_RESULT, KEPT_OTHER):
        if pruned < most and commit.kept[kept]:
            pruned += _prune_class(commit, kept, most - pruned)
    return pruned


def _part_from_flows(commit: Transitions, most: int) -> None:
    """Look again at finished jobs of flows; a job stays while a dependent needs its result."""
    cursor = commit.txn.cursor(commit.t.fin)
    unfinished: dict[str, bool] = {}
    for _ in range(most):
        if not cursor.set_range(FIN_KEY.pack(KEPT_LINKED, 0, 0)):
            return
        kept, when, _ = FIN_KEY.unpack(cursor.key())
        if kept != KEPT_LINKED or when > commit.now:
            return
        stored = commit.load(cursor.value()[NUMBER.size :])
        cursor.delete()
        if stored is not None:
            needed = is_needed(commit, stored, unfinished)
            commit.keep(stored, stored.tail, needed=needed)


def _prune_class(commit: Transitions, kept: int, most: int) -> int:
    """Forget jobs, the first to go first, until a job may stay. The hot path."""
    # A young result stays, although there are too many. The results behind it may be older if their
    # jobs set ``result_ttl``. All young results that are kept as long lie together, and are
    # skipped.
    count, now, retention = commit.kept, commit.now, commit.retention
    cursor = commit.txn.cursor(commit.t.fin)
    found = cursor.set_range(FIN_KEY.pack(kept, 0, 0))
    young = now - int(retention.protect * MICRO)
    pruned, jumps = 0, _JUMPS
    while found and pruned < most:
        key, value = cursor.item()
        whose, prune, seq = FIN_KEY.unpack(key)
        if whose != kept:
            break
        if prune > now:
            if kept == KEPT_OTHER or count[KEPT_PLAIN] + count[KEPT_RESULT] <= retention.count:
                break
            if kept == KEPT_RESULT and (ended := NUMBER.unpack_from(value)[0]) > young:
                jumps -= 1
                found = cursor.set_range(FIN_KEY.pack(kept, now + prune - ended + 1, 0))
                if not jumps:
                    break
                continue
        cursor.delete()
        found = bool(cursor.key())
        job_id = value[NUMBER.size :]
        data = commit.txn.pop(job_id, db=commit.t.job)
        flags = flags_of(data) if data else 0
        if flags & _BESIDE:
            commit.forget_more(job_id, flags, seq)
        count[kept] -= 1
        pruned += 1
    return pruned
