"""What becomes of a lease: settled, renewed, noted, given back, timed out or lost."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.brokers.base import DEFAULT_TTR, KEEP_ATTEMPTS, SMALL_RESULT
from tidemill.brokers.lmdb.carrying import carry
from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_LEASE, LEASE_KEY, LEASE_VALUE, MICRO
from tidemill.brokers.lmdb.leases import put_deadline
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.puts import follow
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    EXPIRED,
    FAILED,
    NOTES,
    RUNNING,
    SUCCEEDED,
    TOO_LATE,
    Flag,
    Notes,
    Stored,
    Tail,
    encode,
    envelope_of,
)
from tidemill.brokers.lmdb.unknown import put_aside
from tidemill.errors import StoreFull
from tidemill.job import (
    CONSUMER_DIED,
    NOT_STARTED,
    RESULT_NOT_KEPT,
    WHILE_RUNNING,
    Attempt,
    Note,
    Outcome,
    Verdict,
    delay_of,
    run_of,
    was_held,
)

__all__ = ["drop_lease", "leases_of", "log", "note", "release_owner", "settle", "touch"]

_END: dict[int, int] = {
    Outcome.FAIL: FAILED,
    Outcome.CANCELLED: CANCELLED,
    Outcome.EXPIRED: EXPIRED,
}
_SUCCESS, _RETRY, _FAIL = int(Outcome.SUCCESS), int(Outcome.RETRY), int(Outcome.FAIL)
_RELEASE, _SNOOZE, _CARRY = int(Outcome.RELEASE), int(Outcome.SNOOZE), int(Outcome.CARRY)
_UNKNOWN = int(Outcome.UNKNOWN)
_BACK = (_RELEASE, _SNOOZE, _UNKNOWN)
_UNSTARTED = (_RELEASE, _UNKNOWN)
_LIMITED, _CANCELLING = Flag.LIMITED, Flag.CANCELLING
_LOG_MOST = 100


def settle(moves: Moves, owner: int, worker: str, verdict: Verdict) -> bool:
    """Close a lease. False: it was lost, and nothing changed."""
    key = LEASE_KEY.pack(owner, verdict.token)
    lease = moves.txn.pop(key, db=moves.t.lease)
    if lease is None:
        return False
    _, _, _, leased, deadline = LEASE_VALUE.unpack_from(lease)
    if deadline:
        moves.txn.delete(DUE_KEY.pack(0, deadline, DUE_LEASE, verdict.token), db=moves.t.due)
    if verdict.outcome == _CARRY:
        if carry(moves, lease, verdict.token):
            if verdict.followers:
                follow(moves, verdict.followers)
            return True
        followers = verdict.followers
        verdict = Verdict(verdict.token, _RELEASE, error=NOT_STARTED, followers=followers)
    stored = moves.load(lease[LEASE_VALUE.size :])
    assert stored is not None
    if _close_attempt(moves, stored, worker, leased / MICRO, verdict):
        if deadline:
            put_deadline(moves, deadline, owner, verdict.token)
        moves.txn.put(key, lease, db=moves.t.lease)
    if verdict.followers:
        follow(moves, verdict.followers)
    return True


def _close_attempt(
    moves: Moves, stored: Stored, worker: str, leased: float, verdict: Verdict
) -> bool:
    """The hot path: count and write down the attempt, and place the job or end it.

    True when it is neither: the lease is held.
    """
    head, outcome, tail = stored.head, verdict.outcome, stored.tail
    row = moves.row_of(head.line)
    row.running -= 1
    row.dirty = True
    back = 0  # when it was leased, if it never ran
    if outcome in _UNSTARTED and not verdict.started and not was_held(tail.attempts, leased):
        back = moves.now - moves.wall + round(leased * MICRO)
    if row.gated:
        moves.gates.ended(row, outcome, back)
    if head.flags & _LIMITED:
        moves.lanes.ended(stored, verdict.token, back)
    if verdict.rank >= 0:
        head.rank = verdict.rank
    if outcome not in _BACK:
        head.attempt += 1
        run = run_of(tail.attempts, head.attempt)
        tail.attempts.append(_attempt(head.attempt, worker, leased, verdict, run))
        del tail.attempts[:-KEEP_ATTEMPTS]
        if outcome == _RETRY and head.limit and head.attempt >= head.limit:
            outcome = _FAIL
    if outcome == _SUCCESS:
        tail.result = _affordable(moves, verdict.result)
        moves.end(stored, SUCCEEDED, tail)
    elif outcome in _END:
        moves.end(stored, _END[outcome], tail, verdict.error)
    elif head.flags & _CANCELLING:
        said = {_RELEASE: verdict.error, _UNKNOWN: NOT_STARTED}.get(outcome, "")
        moves.end(stored, CANCELLED, tail, said or WHILE_RUNNING)
    elif head.expires and head.expires <= moves.now:
        moves.end(stored, EXPIRED, tail, TOO_LATE)
    elif outcome == _UNKNOWN:
        tail.error = verdict.error
        until = moves.now + int(verdict.delay * MICRO) if verdict.delay > 0 else 0
        put_aside(moves, stored, tail, until)
    else:
        if outcome == _RETRY:
            row.retried += 1
            if verdict.hold:
                _hold(moves, stored, tail)
                return True
        tail.error = verdict.error if outcome == _SNOOZE else ""  # why it waits, for who asks
        moves.place(stored, _due_after(moves, stored, verdict), 0, tail)
    return False


def _hold(moves: Moves, stored: Stored, tail: Tail) -> None:
    """The attempt is counted, and the lease stays."""
    moves.row_of(stored.head.line).running += 1
    if stored.head.flags & _LIMITED:
        moves.lanes.goes_on(stored)
    moves.save(stored, tail)


def _due_after(moves: Moves, stored: Stored, verdict: Verdict) -> int:
    """The time at which the job of a closed lease is due again; 0 for at once."""
    delay = verdict.delay
    if verdict.outcome == _RETRY and (delay < 0 or stored.head.flags & Flag.MESSAGE):
        delay = delay_of(verdict, envelope_of(stored), stored.head.attempt)
    return moves.now + int(delay * MICRO) if delay > 0 else 0


def _affordable(moves: Moves, result: bytes) -> bytes:
    """The result, or word that it was not kept: large results leave the reserve, as puts do."""
    if len(result) <= SMALL_RESULT:
        return result
    try:
        moves.store.room.check(len(result))
    except StoreFull:
        moves.store.room.say_lost()
        return RESULT_NOT_KEPT
    return result


def _attempt(number: int, worker: str, leased: float, verdict: Verdict, run: int) -> Attempt:
    v = verdict
    return Attempt(number, worker, leased, v.started, v.ended, v.outcome, v.error, v.traceback, run)


def touch(moves: Moves, owner: int, token: int, seconds: float) -> bool:
    """Start a message lease's ttr anew. False: it was lost."""
    key = LEASE_KEY.pack(owner, token)
    lease = moves.txn.get(key, db=moves.t.lease)
    if lease is None:
        return False
    line, rank, seq, leased, deadline = LEASE_VALUE.unpack_from(lease)
    if deadline:
        job_id = lease[LEASE_VALUE.size :]
        stored = moves.load(job_id)
        assert stored is not None
        ttr = seconds or (stored.head.ttr if stored.head.ttr > 0 else DEFAULT_TTR)
        moves.txn.delete(DUE_KEY.pack(0, deadline, DUE_LEASE, token), db=moves.t.due)
        deadline = moves.now + int(ttr * MICRO)
        put_deadline(moves, deadline, owner, token)
        value = LEASE_VALUE.pack(line, rank, seq, leased, deadline) + job_id
        moves.txn.put(key, value, db=moves.t.lease)
    return True


def note(moves: Moves, owner: int, note: Note) -> None:
    """Keep what a running job said."""
    stored = _leased(moves, owner, note.token)
    if stored is None:
        return
    fresh = not stored.head.flags & Flag.NOTED
    if note.done >= 0:
        _keep_notes(moves, stored, progress=(note.done, note.total))
    if note.line:
        log(moves, stored, note.line, note.time)
    if fresh:
        moves.save(stored)


def log(moves: Moves, stored: Stored, line: str, time: float) -> None:
    """Add a line to a job's trail; who calls this saves the job."""
    _keep_notes(moves, stored, line=(time, line))


def _keep_notes(
    moves: Moves,
    stored: Stored,
    *,
    progress: tuple[float, float] | None = None,
    line: tuple[float, str] | None = None,
) -> None:
    data = moves.txn.get(stored.id, db=moves.t.note)
    notes = NOTES.decode(data) if data else Notes()
    notes.progress = progress or notes.progress
    if line is not None:
        notes.log.append(line)
        del notes.log[:-_LOG_MOST]
    moves.txn.put(stored.id, encode(notes), db=moves.t.note)
    stored.head.flags |= Flag.NOTED


def _leased(moves: Moves, owner: int, token: int) -> Stored | None:
    """The job of a lease, or None when it was lost."""
    lease = moves.txn.get(LEASE_KEY.pack(owner, token), db=moves.t.lease)
    return moves.load(lease[LEASE_VALUE.size :]) if lease else None


# -- without the owner's word --------------------------------------------------------------------


def drop_lease(moves: Moves, owner: int, token: int, stored: Stored) -> None:
    """Take a running job from its owner: whatever the owner says of it now is too late."""
    lease = moves.txn.pop(LEASE_KEY.pack(owner, token), db=moves.t.lease)
    if lease:
        deadline = LEASE_VALUE.unpack_from(lease)[4]
        if deadline:
            moves.txn.delete(DUE_KEY.pack(0, deadline, DUE_LEASE, token), db=moves.t.due)
    moves.count(moves.row_of(stored.head.line), RUNNING, -1)
    if stored.head.flags & Flag.LIMITED:
        moves.lanes.ended(stored, token)


def leases_of(moves: Moves, owner: int) -> list[int]:
    """The token of every lease an owner has."""
    cursor = moves.txn.cursor(moves.t.lease)
    found = cursor.set_range(LEASE_KEY.pack(owner, 0))
    tokens = []
    while found:
        whose, token = LEASE_KEY.unpack(cursor.key())
        if whose != owner:
            break
        tokens.append(token)
        found = cursor.next()
    return tokens


def release_owner(moves: Moves, owner: int, worker: str, causes: Mapping[int, str] | None) -> int:
    """Give back all that a dead owner held, by the witness's account; how many that was."""
    tokens = leases_of(moves, owner)
    for token in tokens:
        if causes is None:
            _lose(moves, owner, worker, token)
        elif token in causes:
            fail = Verdict(token, Outcome.RETRY, error=causes[token], ended=moves.wall / MICRO)
            settle(moves, owner, worker, fail)
        else:
            settle(moves, owner, worker, Verdict(token, Outcome.RELEASE, error=NOT_STARTED))
    return len(tokens)


def _lose(moves: Moves, owner: int, worker: str, token: int) -> None:
    """Give back a lease whose owner vanished: a message with a failed attempt, a task with a loss.

    A task fails after as many losses as it has attempts.
    """
    stored = _leased(moves, owner, token)
    if stored is None:
        return
    head = stored.head
    if head.flags & Flag.MESSAGE:
        died = Verdict(token, Outcome.RETRY, error=CONSUMER_DIED, ended=moves.wall / MICRO)
        settle(moves, owner, worker, died)
        return
    head.losses += 1
    if head.limit and head.losses >= head.limit:
        drop_lease(moves, owner, token, stored)
        moves.end(stored, FAILED, stored.tail, f"lost {head.losses} times with its worker")
    else:
        moves.save(stored)
        # It may have run.
        settle(moves, owner, worker, Verdict(token, Outcome.RELEASE, started=moves.wall / MICRO))
