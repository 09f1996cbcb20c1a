"""Actions on jobs by their ids, and on queues, for people, handles, commands and wire protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.brokers.lmdb.claim.claim import Leasing
from tidemill.brokers.lmdb.claim.due import come_due
from tidemill.brokers.lmdb.claim.limits import PartitionClaims
from tidemill.brokers.lmdb.engine.wakeup import ALL, MESSAGES, SPACE, TASKS, bloom
from tidemill.brokers.lmdb.layout import MICRO, NUMBER
from tidemill.brokers.lmdb.look.inspect import Holders
from tidemill.brokers.lmdb.owner_table import is_listed, owner_rows, send
from tidemill.brokers.lmdb.put.unique import Key, find_key, forget_held, put_key
from tidemill.brokers.lmdb.put.workflows import (
    finish_falls,
    flow,
    is_barrier,
    may_wait_anew,
    must_wait,
    revive,
    wait_anew,
)
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    FAILED,
    READY,
    SCHEDULED,
    SUCCEEDED,
    WAITING,
    Flag,
    Stored,
)
from tidemill.brokers.lmdb.settle import drop_lease, log
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.envelope import LimitSettings, decode_envelope
from tidemill.core.job import (
    CANCEL_ASKED,
    NOT_STARTED,
    RETRY_ASKED,
    Command,
    Lease,
    altered_text,
    purged,
)

_PURGED_ROOM = 400  # bytes that a purge may add to each job: its error, and its entry for pruning


def _each(
    commit: Transitions, ids: Sequence[str], act: Callable[[Stored | None], bool]
) -> list[bool]:
    """Act on each job. Each job is read just before its action: earlier actions may change it."""
    answers = []
    for job_id in ids:
        answers.append(act(commit.load(job_id.encode()) if job_id else None))
        flow(commit)
    return answers


def cancel(
    commit: Transitions, job_ids: Sequence[str], *, terminate: bool = False, purge: str = ""
) -> list[bool]:
    """Cancel jobs; ask the owner of a running job to cancel it, but not for a purge."""
    holders = Holders(commit.txn, commit.t)
    verb = "terminate" if terminate else "cancel"
    if purge:  # the commit writes each whole job again
        found = (
            commit.txn.get(job_id.encode(), b"", db=commit.t.job) for job_id in job_ids if job_id
        )
        commit.store.room.check(sum(len(data) + _PURGED_ROOM for data in found))
    return _each(commit, job_ids, lambda stored: _cancel(commit, stored, holders, verb, purge))


def _cancel(
    commit: Transitions, stored: Stored | None, holders: Holders, verb: str, purge: str
) -> bool:
    if stored is None or stored.head.state >= SUCCEEDED:
        return False
    if commit.is_running(stored):
        if purge:
            return False
        stored.head.flags |= Flag.CANCELLING
        log(commit, stored, CANCEL_ASKED[verb == "terminate"], commit.wall / MICRO)
        commit.save(stored)
        owner, token = holders.lease_of(stored.id)
        send(commit, owner, Command(verb, token))
    else:
        commit.unplace(stored)
        commit.end(stored, CANCELLED, stored.tail, purged(purge) if purge else NOT_STARTED)
        if purge:
            row = commit.row_of(stored.head.line)
            row.cancelled, row.purged = row.cancelled - 1, row.purged + 1
    return True


def retry(
    commit: Transitions,
    job_ids: Sequence[str],
    *,
    force: bool = False,
    due: float = 0.0,
    only_scheduled: bool = False,
) -> list[bool]:
    """Make jobs ready again, or scheduled for a wall time."""
    # With ``force``, also jobs that succeeded, and jobs whose key a succeeded job holds.
    finish_falls(commit)

    line = "" if only_scheduled else RETRY_ASKED

    def retry_one(stored: Stored | None) -> bool:
        if only_scheduled and (stored is None or stored.head.state != SCHEDULED):
            return False
        return _retry(commit, stored, force, int(due * MICRO), line)

    return _each(commit, job_ids, retry_one)


def _retry(
    commit: Transitions, stored: Stored | None, force: bool = False, due: int = 0, line: str = ""
) -> bool:
    """Retry one job; ``line`` goes to its log, unless the line is empty."""
    if stored is None:
        return False
    head = stored.head
    if head.state == SCHEDULED:
        commit.unplace(stored)
        if line:
            log(commit, stored, line, commit.wall / MICRO)
        commit.place(stored, due, Flag.WALL if due else 0)
        return True
    again = force and head.state == SUCCEEDED and not head.flags & Flag.LINKED
    if head.state <= SUCCEEDED and not again:
        return False
    envelope = decode_envelope(stored.envelope)
    if envelope.links is not None and not may_wait_anew(commit, stored):
        return False
    if envelope.key:
        name = envelope.key.encode()
        key = find_key(commit, name)
        if key is not None and (key.holder or not force):
            return False  # another job has the key
        put_key(commit, name, Key(stored.id, until=key.until if key is not None else 0))
    revive(commit, stored)
    commit.unfinish(stored)
    head.attempt, head.limit = 0, envelope.retries.max_attempts
    head.losses, head.finished, head.prune, head.expires = 0, 0, 0, 0
    head.flags &= ~(Flag.CANCELLING | Flag.DROPPED)
    tail = stored.tail
    tail.error, tail.result = "", b""
    if line:
        log(commit, stored, line, commit.wall / MICRO)
    if envelope.links is not None and must_wait(commit, stored):
        wait_anew(commit, stored)
    else:
        commit.place(stored, due, Flag.WALL if due else 0, tail)
    return True


def delete(commit: Transitions, job_ids: Sequence[str]) -> list[bool]:
    """Forget jobs in any state."""
    holders = Holders(commit.txn, commit.t)
    return _each(commit, job_ids, lambda stored: _delete(commit, stored, holders))


def _delete(commit: Transitions, stored: Stored | None, holders: Holders) -> bool:
    if stored is None:
        return False
    if stored.head.state >= SUCCEEDED:
        if stored.head.flags & Flag.KEYED:
            forget_held(commit, stored)
        commit.unfinish(stored)
        commit.forget(stored)
        return True
    if commit.is_running(stored):
        owner, token = holders.lease_of(stored.id)
        drop_lease(commit, owner, token, stored)
    else:
        commit.unplace(stored)
    commit.vanish(stored)
    return True


def alter(
    commit: Transitions,
    job_ids: Sequence[str],
    *,
    rank: int | None = None,
    queue: str | None = None,
) -> list[bool]:
    """Give waiting jobs a new rank, or move them to another queue while this queue has room."""
    return _each(commit, job_ids, lambda stored: _alter(commit, stored, rank, queue))


def _alter(commit: Transitions, stored: Stored | None, rank: int | None, queue: str | None) -> bool:
    if stored is None or stored.head.state >= SUCCEEDED or commit.is_running(stored):
        return False
    if is_barrier(stored):
        return False
    head, source, text = stored.head, commit.row_of(stored.head.line), altered_text(rank, queue)
    target = source if queue is None else commit.row(queue)
    rank = head.rank if rank is None else rank
    moves = target is not source
    if moves and head.state != WAITING and 0 < target.max_size <= target.size:
        return False
    if not moves and rank == head.rank:
        return True
    state, due, flags = head.state, head.due, head.flags
    commit.unplace(stored)
    log(commit, stored, text, commit.wall / MICRO)
    head.rank = rank
    if moves:
        stored.move_to(target.lines[bool(flags & Flag.MESSAGE)], target.name)
    if state == WAITING:
        commit.count(target, WAITING, +1)
        commit.save(stored)
    else:
        commit.place(stored, due if state == SCHEDULED else 0, flags & Flag.WALL)
    if moves and source.max_size:
        commit.store.wakeups.ring(SPACE, bloom([source.name]))
    return True


def set_queue(
    commit: Transitions, queue: str, *, paused: bool | None = None, max_size: int | None = None
) -> None:
    """Change a queue's settings, and wake all callers that the old settings kept waiting."""
    row = commit.row(queue)
    row.paused = row.paused if paused is None else int(paused)
    row.max_size = row.max_size if max_size is None else max_size
    row.forgotten, row.dirty = 0, True
    commit.store.wakeups.ring(TASKS | MESSAGES | SPACE, ALL)


def set_limit(
    commit: Transitions,
    name: str,
    terms: LimitSettings | None,
    *,
    queue: bool = False,
    declared: bool = False,
) -> None:
    """Change the limit of a queue or of a name; wake all callers that the limit kept waiting."""
    if queue:
        commit.limiters.set_queue(commit.row(name), terms, declared=declared)
    else:
        commit.limiters.set_named(name, terms, declared=declared)


def forget_queue(commit: Transitions, queue: str) -> bool:
    """Forget the counters and settings of a queue without unfinished jobs."""
    row = commit.existing_row(queue)
    if row is not None and row.size:
        return False
    if row is not None:
        row.forget()
    return True


def command(commit: Transitions, owner_id: str, command: Command) -> bool:
    """Leave a command for an owner; False when the owner is not on the list."""
    for number, owner in owner_rows(commit.txn, commit.t):
        if owner.id == owner_id:
            send(commit, number, command)
            return True
    return False


# -- numbers, and leases by id -------------------------------------------------------------------


def numbers(commit: Transitions, count: int) -> int:
    """Reserve ``count`` numbers for one caller; return the first of them."""
    key = commit.store.key("numbers")
    data = commit.txn.get(key)
    last = NUMBER.unpack(data)[0] if data else 0
    commit.txn.put(key, NUMBER.pack(last + count))
    return int(last) + 1


def lease_named(commit: Transitions, owner: int, job_ids: Sequence[str]) -> list[Lease | None]:
    """Lease jobs that are ready, or can be made ready."""
    if not is_listed(commit, owner):
        return [None] * len(job_ids)
    come_due(commit)
    return [_lease_one(commit, owner, job_id) for job_id in job_ids]


def _lease_one(commit: Transitions, owner: int, job_id: str) -> Lease | None:
    stored = commit.load(job_id.encode()) if job_id else None
    if stored is None or stored.head.flags & Flag.LIMITED:
        return None
    if stored.head.state in (SCHEDULED, FAILED):
        finish_falls(commit)
        _retry(commit, stored)
        stored = commit.load(stored.id)
        assert stored is not None
    head, row = stored.head, commit.row_of(stored.head.line)
    if head.state != READY or not commit.txn.delete(head.ready_key, db=commit.t.ready):
        return None  # the job runs or has ended
    row.ready -= 1
    row.dirty = True
    leasing = Leasing(commit, owner, deadlines=True)
    claims = PartitionClaims(commit, head.line)
    if not leasing.lend(row, head.ready_key, stored.id, stored.packed(), claims):
        return None  # the job had expired
    if row.has_limit:
        commit.limiters.take(row, 1)
    return leasing.leases[0]
