"""Changes of leases: settled, renewed, noted, given back, timed out or lost.

A lease may end without a verdict of its owner: when the time to run (ttr) of its message is over,
or when its owner leaves or dies. The jobs go back. A job that a dead owner ran gets the cause of
the death as its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.brokers.contract.broker import KEEP_ATTEMPTS, SMALL_RESULT
from tidemill.brokers.lmdb.claim.claim import put_deadline
from tidemill.brokers.lmdb.layout import (
    DUE_KEY,
    DUE_LEASE,
    FIN_KEY,
    LEASE_KEY,
    LEASE_VALUE,
    MICRO,
    NUMBER,
    tokens_of,
)
from tidemill.brokers.lmdb.owner_table import forget_last_reply, name_of, strike_owner
from tidemill.brokers.lmdb.put.put import follow
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    EXPIRED,
    FAILED,
    HEADER,
    KEPT_PLAIN,
    KEPT_RESULT,
    RUNNING,
    SUCCEEDED,
    TOO_LATE,
    Flag,
    Header,
    Notes,
    Stored,
    Tail,
    encode,
    envelope_of,
    notes_of,
)
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.shared.lost_jobs import LostJob, lost_line, lost_text
from tidemill.core.envelope import RESULT_NOT_KEPT, decode_envelope
from tidemill.core.job import (
    CONSUMER_DIED,
    DEFAULT_TTR,
    NOT_STARTED,
    WHILE_RUNNING,
    Attempt,
    Note,
    Outcome,
    Owner,
    Verdict,
    delay_of,
    run_of,
    was_held,
)
from tidemill.core.retry import BY_POLICY
from tidemill.errors import StoreFull

_END: dict[int, int] = {
    Outcome.FAIL: FAILED,
    Outcome.CANCELLED: CANCELLED,
    Outcome.EXPIRED: EXPIRED,
}
_SUCCESS, _RETRY, _FAIL = int(Outcome.SUCCESS), int(Outcome.RETRY), int(Outcome.FAIL)
_RELEASE, _SNOOZE = int(Outcome.RELEASE), int(Outcome.SNOOZE)
_BACK = (_RELEASE, _SNOOZE)
_LIMITED, _CANCELLING = Flag.LIMITED, Flag.CANCELLING
_BOUND = Flag.LIMITED | Flag.LINKED | Flag.KEYED | Flag.MESSAGE | Flag.RESULT_TTL
_LOG_MOST = 100


def settle_all(
    commit: Transitions, owner: int, worker: str, verdicts: Sequence[Verdict]
) -> list[bool]:
    """End leases by their verdicts, in order; False for each lease that was lost. The hot path."""
    if not verdicts:
        return []
    pop, leases, pack = commit.txn.pop, commit.t.lease, LEASE_KEY.pack
    plain, answers = PlainSuccess(commit, worker).settle, list[bool]()
    for verdict in verdicts:
        key = pack(owner, verdict.token)
        lease = pop(key, db=leases)
        answers.append(lease is not None)
        if lease is not None and not plain(verdict, lease):
            _settle(commit, owner, worker, verdict, key, lease)
    return answers


class PlainSuccess:
    """The success of a plain task at its first attempt, as a straight line."""

    # Most verdicts are such. The same bytes are written as by :func:`settle`.

    __slots__ = ("_commit", "_get", "_jobs", "_kept", "_now", "_prune", "_put", "_worker")

    def __init__(self, commit: Transitions, worker: str) -> None:
        self._commit = commit
        self._worker = worker
        self._get, self._put = commit.txn.get, commit.txn.put
        self._jobs = commit.t.job
        self._now = NUMBER.pack(commit.now)
        self._kept = commit.kept
        self._prune = [
            commit.now + int(commit.retention.of_success(-1.0, has_result) * MICRO)
            for has_result in (False, True)  # KEPT_PLAIN and KEPT_RESULT
        ]

    def settle(self, verdict: Verdict, lease: bytes) -> bool:
        """End the job of a lease; False, and nothing is written, if verdict or job is not plain."""
        result, commit = verdict.result, self._commit
        if verdict.outcome != _SUCCESS or verdict.followers or len(result) > SMALL_RESULT:
            return False
        _, _, _, leased, deadline = LEASE_VALUE.unpack_from(lease)
        job_id = lease[LEASE_VALUE.size :]
        data = self._get(job_id, db=self._jobs)
        assert data is not None
        _, flags, attempt, *rest, size = HEADER.unpack_from(data)
        losses, limit, rank, line, seq, due, expires, _, _, ttr, timeout = rest
        row, end = commit.row_of(line), HEADER.size + size
        bound = flags & _BOUND or expires or deadline or row.has_limit or row.max_size
        if bound or len(data) > end:  # the job has a trail of earlier attempts
            return False
        row.running -= 1
        row.succeeded += 1
        row.dirty = True
        kept = KEPT_RESULT if result else KEPT_PLAIN
        self._kept[kept] += 1
        if verdict.rank >= 0:
            rank = verdict.rank
        prune = self._prune[kept]
        times = due, 0, commit.wall, prune, ttr, timeout
        counts = attempt + 1, losses, limit
        head = HEADER.pack(SUCCEEDED, flags, *counts, rank, line, seq, *times, size)
        trail = _attempt(attempt + 1, self._worker, leased / MICRO, verdict, 1)
        data = head + data[HEADER.size : end] + encode(("", result, (trail,)))
        self._put(job_id, data, db=self._jobs)
        self._put(FIN_KEY.pack(kept, prune, seq), self._now + job_id, db=commit.t.fin)
        commit.finished.append(job_id)
        return True


def settle(commit: Transitions, owner: int, worker: str, verdict: Verdict) -> bool:
    """End a lease by its verdict; False when the lease was lost, and nothing changed."""
    key = LEASE_KEY.pack(owner, verdict.token)
    lease = commit.txn.pop(key, db=commit.t.lease)
    if lease is None:
        return False
    _settle(commit, owner, worker, verdict, key, lease)
    return True


def _settle(
    commit: Transitions, owner: int, worker: str, verdict: Verdict, key: bytes, lease: bytes
) -> None:
    """Settle the job of a lease, which is taken off the table of leases."""
    _, _, _, leased, deadline = LEASE_VALUE.unpack_from(lease)
    if deadline:
        commit.txn.delete(DUE_KEY.pack(0, deadline, DUE_LEASE, verdict.token), db=commit.t.due)
    stored = commit.load(lease[LEASE_VALUE.size :])
    assert stored is not None
    if _close_attempt(commit, stored, worker, leased / MICRO, verdict):
        if deadline:
            put_deadline(commit, deadline, owner, verdict.token)
        commit.txn.put(key, lease, db=commit.t.lease)
    if verdict.followers:
        follow(commit, verdict.followers)


def _close_attempt(
    commit: Transitions, stored: Stored, worker: str, leased: float, verdict: Verdict
) -> bool:
    """Count and record the attempt, and place the job or end it."""
    # Returns True when the job is neither placed nor ended, since its lease stays.
    head, outcome, tail = stored.head, verdict.outcome, stored.tail
    row = commit.row_of(head.line)
    row.running -= 1
    row.dirty = True
    if row.has_limit or head.flags & _LIMITED:
        _leave_limits(commit, stored, tail, leased, verdict)
    if verdict.rank >= 0:
        head.rank = verdict.rank
    if outcome not in _BACK:
        outcome = _count_attempt(head, tail, worker, leased, verdict)
    if outcome == _SUCCESS:
        tail.result = _affordable(commit, verdict.result)
        commit.end(stored, SUCCEEDED, tail)
    elif outcome in _END:
        commit.end(stored, _END[outcome], tail, verdict.error)
    elif head.flags & _CANCELLING:
        reason = verdict.error if outcome == _RELEASE else ""
        commit.end(stored, CANCELLED, tail, reason or WHILE_RUNNING)
    elif head.expires and head.expires <= commit.now:
        commit.end(stored, EXPIRED, tail, TOO_LATE)
    else:
        if outcome == _RETRY:
            row.retried += 1
            if verdict.hold:
                _hold(commit, stored, tail)
                return True
        # A snoozed job has the reason as its error.
        tail.error = verdict.error if outcome == _SNOOZE else ""
        commit.place(stored, _due_after(commit, stored, verdict), 0, tail)
    return False


def _leave_limits(
    commit: Transitions, stored: Stored, tail: Tail, leased: float, verdict: Verdict
) -> None:
    """Free the job's places in its limits; return the tokens of a job that never ran."""
    outcome, row = verdict.outcome, commit.row_of(stored.head.line)
    back = 0  # the time of the lease if the job never ran, else 0
    if outcome in _BACK and not verdict.started and not was_held(tail.attempts, leased):
        back = commit.now - commit.wall + round(leased * MICRO)
    if row.has_limit:
        commit.limiters.ended(row, outcome, back)
    if stored.head.flags & _LIMITED:
        commit.partitions.ended(stored, verdict.token, back)


def _count_attempt(head: Header, tail: Tail, worker: str, leased: float, verdict: Verdict) -> int:
    """Count and record an attempt. Return the outcome: without an attempt left, RETRY is FAIL."""
    attempts = tail.attempts
    head.attempt += 1
    run = run_of(attempts, head.attempt)
    attempts.append(_attempt(head.attempt, worker, leased, verdict, run))
    del attempts[:-KEEP_ATTEMPTS]
    if verdict.outcome == _RETRY and head.limit and head.attempt >= head.limit:
        return _FAIL
    return verdict.outcome


def _hold(commit: Transitions, stored: Stored, tail: Tail) -> None:
    """Keep the lease of a stuck job, whose attempt is counted: the old run is not over yet."""
    commit.row_of(stored.head.line).running += 1
    if stored.head.flags & _LIMITED:
        commit.partitions.goes_on(stored)
    commit.save(stored, tail)


def _due_after(commit: Transitions, stored: Stored, verdict: Verdict) -> int:
    """The time at which a job is due again after its lease; 0 for at once."""
    delay = verdict.delay
    if verdict.outcome == _RETRY and (delay < 0 or stored.head.flags & Flag.MESSAGE):
        delay = delay_of(verdict, envelope_of(stored), stored.head.attempt)
    return commit.now + int(delay * MICRO) if delay > 0 else 0


def _affordable(commit: Transitions, result: bytes) -> bytes:
    """The result, or a text that says that the disk had no room for a large result."""
    if len(result) <= SMALL_RESULT:
        return result
    try:
        commit.store.room.check(len(result))
    except StoreFull:
        commit.store.room.log_lost_results()
        return RESULT_NOT_KEPT
    return result


def _attempt(number: int, worker: str, leased: float, verdict: Verdict, run: int) -> Attempt:
    v = verdict
    return Attempt(number, worker, leased, v.started, v.ended, v.outcome, v.error, v.traceback, run)


def touch(commit: Transitions, owner: int, token: int, seconds: float) -> bool:
    """Restart the ttr (time to run) of a message's lease; False when the lease was lost."""
    key = LEASE_KEY.pack(owner, token)
    lease = commit.txn.get(key, db=commit.t.lease)
    if lease is None:
        return False
    line, rank, seq, leased, deadline = LEASE_VALUE.unpack_from(lease)
    if deadline:
        job_id = lease[LEASE_VALUE.size :]
        stored = commit.load(job_id)
        assert stored is not None
        ttr = seconds or (stored.head.ttr if stored.head.ttr > 0 else DEFAULT_TTR)
        commit.txn.delete(DUE_KEY.pack(0, deadline, DUE_LEASE, token), db=commit.t.due)
        deadline = commit.now + int(ttr * MICRO)
        put_deadline(commit, deadline, owner, token)
        value = LEASE_VALUE.pack(line, rank, seq, leased, deadline) + job_id
        commit.txn.put(key, value, db=commit.t.lease)
    return True


def note(commit: Transitions, owner: int, note: Note) -> None:
    """Keep the progress and log of a running job."""
    stored = _leased(commit, owner, note.token)
    if stored is None:
        return
    fresh = not stored.head.flags & Flag.NOTED
    if note.done >= 0:
        notes = _notes_of(commit, stored)
        notes.progress, notes.text = (note.done, note.total), note.text
        _keep_notes(commit, stored, notes)
    if note.line:
        log(commit, stored, note.line, note.time)
    if fresh:
        commit.save(stored)


def log(commit: Transitions, stored: Stored, line: str, time: float) -> None:
    """Add a line to a job's log; the caller saves the job."""
    notes = _notes_of(commit, stored)
    notes.log.append((time, line))
    del notes.log[:-_LOG_MOST]
    _keep_notes(commit, stored, notes)


def _notes_of(commit: Transitions, stored: Stored) -> Notes:
    data = commit.txn.get(stored.id, db=commit.t.note)
    return notes_of(data) if data else Notes()


def _keep_notes(commit: Transitions, stored: Stored, notes: Notes) -> None:
    commit.txn.put(stored.id, encode(notes), db=commit.t.note)
    stored.head.flags |= Flag.NOTED


def _leased(commit: Transitions, owner: int, token: int) -> Stored | None:
    """The job of a lease, or None when the lease was lost."""
    lease = commit.txn.get(LEASE_KEY.pack(owner, token), db=commit.t.lease)
    return commit.load(lease[LEASE_VALUE.size :]) if lease else None


# -- without a verdict of the owner --------------------------------------------------------------


def drop_lease(commit: Transitions, owner: int, token: int, stored: Stored) -> None:
    """Take a running job from its owner; a later verdict of the owner changes nothing."""
    lease = commit.txn.pop(LEASE_KEY.pack(owner, token), db=commit.t.lease)
    if lease:
        deadline = LEASE_VALUE.unpack_from(lease)[4]
        if deadline:
            commit.txn.delete(DUE_KEY.pack(0, deadline, DUE_LEASE, token), db=commit.t.due)
    commit.count(commit.row_of(stored.head.line), RUNNING, -1)
    if stored.head.flags & Flag.LIMITED:
        commit.partitions.ended(stored, token)


def release_owner(
    commit: Transitions, owner: int, worker: str, causes: Mapping[int, str] | None
) -> int:
    """Give back the leases of a dead owner, by the causes of a witness; return their number."""
    tokens = tokens_of(commit.txn, commit.t, owner)
    for token in tokens:
        if causes is None:
            _lose(commit, owner, worker, token)
        elif token in causes:
            fail = Verdict(token, Outcome.RETRY, error=causes[token], ended=commit.wall / MICRO)
            settle(commit, owner, worker, fail)
        else:
            settle(commit, owner, worker, Verdict(token, Outcome.RELEASE, error=NOT_STARTED))
    return len(tokens)


def _lose(commit: Transitions, owner: int, worker: str, token: int) -> None:
    """Give back a vanished owner's lease: a message with a failed attempt, a task with a loss."""
    # A task fails after as many losses as it has attempts.
    stored = _leased(commit, owner, token)
    if stored is None:
        return
    head = stored.head
    if head.flags & Flag.MESSAGE:
        died = Verdict(token, Outcome.RETRY, error=CONSUMER_DIED, ended=commit.wall / MICRO)
        settle(commit, owner, worker, died)
        return
    head.losses += 1
    lease = commit.txn.get(LEASE_KEY.pack(owner, token), db=commit.t.lease)
    assert lease is not None
    line = lost_line((commit.wall - LEASE_VALUE.unpack_from(lease)[3]) / MICRO, worker)
    log(commit, stored, line, commit.wall / MICRO)
    if head.limit and head.losses >= head.limit:
        drop_lease(commit, owner, token, stored)
        why = lost_text(head.losses, head.limit)
        commit.lost.append(LostJob(decode_envelope(stored.envelope), why))
        commit.end(stored, FAILED, stored.tail, why)
    else:
        commit.save(stored)
        # Without a witness, nobody knows whether the task ran.
        settle(commit, owner, worker, Verdict(token, Outcome.RELEASE, started=commit.wall / MICRO))


def expire_lease(commit: Transitions, lease_key: bytes, token: int) -> None:
    """End a lease whose time to run has passed: the attempt failed."""
    owner = LEASE_KEY.unpack(lease_key)[0]
    ended = commit.wall / MICRO
    error = "ttr passed without an ack"
    verdict = Verdict(token, Outcome.RETRY, delay=BY_POLICY, error=error, ended=ended)
    settle(commit, owner, name_of(commit.txn, commit.t, owner), verdict)


def strike(commit: Transitions, number: int, owner: Owner, causes: Mapping[int, str] | None) -> int:
    """Remove an owner from the list, with its leases and commands; return the number of leases."""
    held = release_owner(commit, number, owner.name, causes)
    strike_owner(commit, number)
    forget_last_reply(commit, number)
    return held
