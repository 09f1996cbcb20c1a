"""Time: what comes due, and what has been kept for long enough."""

from __future__ import annotations

from tidemill.brokers.lmdb.flows import FALL_MOST, flow, go_on, is_needed
from tidemill.brokers.lmdb.kept import KEPT_LINKED, KEPT_OTHER, KEPT_PLAIN, KEPT_RESULT
from tidemill.brokers.lmdb.keys import sweep
from tidemill.brokers.lmdb.layout import (
    DUE_EXPIRY,
    DUE_FALL,
    DUE_GATE,
    DUE_JOB,
    DUE_KEY,
    DUE_LANE,
    DUE_LEASE,
    DUE_TERMS,
    DUE_UNKNOWN,
    FIN_KEY,
    LEASE_KEY,
    MICRO,
    NUMBER,
)
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.moving import is_sealed
from tidemill.brokers.lmdb.order import OURS
from tidemill.brokers.lmdb.record import EXPIRED, FAILED, READY, TOO_LATE, Flag, flags_of
from tidemill.brokers.lmdb.roster import name_of
from tidemill.brokers.lmdb.verdicts import settle
from tidemill.job import Outcome, Verdict
from tidemill.retry import BY_POLICY

__all__ = ["come_due", "prune"]

_PROMOTE_MOST = 5000
"""Jobs that become ready in one commit, some 40 ms; a job that ends counts for ``_END`` of them."""

_END = 10


def come_due(moves: Moves) -> bool:
    """Move everything whose time has come; True when that is more than one step should do."""
    if is_sealed(moves):
        return False
    cursor = moves.txn.cursor(moves.t.due)
    done = 0
    for clock, now in ((0, moves.now), (1, moves.wall)):
        while cursor.set_range(DUE_KEY.pack(clock, 0, 0, 0)):
            found, time, kind, number = DUE_KEY.unpack(cursor.key())
            if found != clock or time > now:
                break
            if done >= _PROMOTE_MOST or (kind == DUE_FALL and moves.fallen >= FALL_MOST):
                return True
            if kind == DUE_TERMS and moves.gates.pieces:
                return True
            done += _END if kind in (DUE_LEASE, DUE_EXPIRY, DUE_UNKNOWN) else 1
            reference = cursor.value()
            cursor.delete()
            if kind == DUE_LEASE:
                _time_out(moves, reference, number)
            elif kind == DUE_FALL:
                go_on(moves, reference)
            elif kind == DUE_TERMS:
                moves.gates.called(reference)
            elif kind == DUE_LANE:
                moves.lanes.came_due(reference)
            elif kind == DUE_GATE:
                moves.gates.came_due(moves.row(reference.decode()))
            else:
                _job_due(moves, reference, kind)
            if moves.ended:
                flow(moves)
    return False


def _time_out(moves: Moves, lease_key: bytes, token: int) -> None:
    owner = LEASE_KEY.unpack(lease_key)[0]
    ended = moves.wall / MICRO
    error = "ttr passed without an ack"
    verdict = Verdict(token, Outcome.RETRY, delay=BY_POLICY, error=error, ended=ended)
    settle(moves, owner, name_of(moves.txn, moves.t, owner), verdict)


def _job_due(moves: Moves, job_id: bytes, kind: int) -> None:
    """A scheduled job becomes ready, or a job expires, or nobody came that knows its task.

    An old entry changes nothing.
    """
    stored = moves.load(job_id)
    if stored is None or stored.head.state > READY:
        return
    if kind == DUE_JOB:
        moves.count(moves.row_of(stored.head.line), stored.head.state, -1)
        moves.place(stored, stored.head.due, stored.head.flags & Flag.WALL)
    elif kind == DUE_UNKNOWN:
        moves.unplace(stored)
        moves.end(stored, FAILED, stored.tail, stored.tail.error)
    elif not moves.is_running(stored):
        moves.unplace(stored)
        moves.end(stored, EXPIRED, stored.tail, TOO_LATE)


def prune(moves: Moves, most: int) -> int:
    """Forget finished jobs that are too old or too many; at most ``most`` of them."""
    if is_sealed(moves):
        return 0
    pruned = 0
    _part_from_flows(moves, most)
    for kept in (KEPT_PLAIN, KEPT_RESULT, KEPT_OTHER):
        if pruned < most and moves.kept[kept]:
            pruned += _prune_class(moves, kept, most - pruned)
    return pruned + sweep(moves, most - pruned)


def _part_from_flows(moves: Moves, most: int) -> None:
    """Look after finished jobs of flows: they stay as long as a job behind them needs them."""
    cursor = moves.txn.cursor(moves.t.fin)
    unfinished: dict[str, bool] = {}
    for _ in range(most):
        if not cursor.set_range(FIN_KEY.pack(KEPT_LINKED, 0, 0)):
            return
        kept, when, _ = FIN_KEY.unpack(cursor.key())
        if kept != KEPT_LINKED or when > moves.now:
            return
        stored = moves.load(cursor.value()[NUMBER.size :])
        cursor.delete()
        if stored is not None:
            needed = is_needed(moves, stored, unfinished)
            moves.keep(stored, stored.tail, parted=not needed)


def _prune_class(moves: Moves, kept: int, most: int) -> int:
    """The hot path: from the oldest on, until one may stay."""
    count, now, retention = moves.kept, moves.now, moves.retention
    cursor = moves.txn.cursor(moves.t.fin)
    found = cursor.set_range(FIN_KEY.pack(kept, 0, 0))
    young = now - int(retention.protect * MICRO)
    pruned, strays = 0, moves.order.mark.strays
    while found and pruned < most:
        key, value = cursor.item()
        whose, prune, seq = FIN_KEY.unpack(key)
        if whose != kept:
            break
        if prune > now:
            if kept == KEPT_OTHER or count[KEPT_PLAIN] + count[KEPT_RESULT] <= retention.count:
                break
            if kept == KEPT_RESULT and NUMBER.unpack_from(value)[0] > young:
                break
        cursor.delete()
        found = bool(cursor.key())
        job_id = value[NUMBER.size :]
        data = moves.txn.pop(job_id, db=moves.t.job)
        if strays or len(job_id) != OURS:
            moves.order.forget(seq, job_id)
        if data and flags_of(data) & (Flag.NOTED | Flag.LINKED):
            moves.forget_more(job_id, flags_of(data))
        count[kept] -= 1
        pruned += 1
    return pruned
