"""Accepting jobs: new ones, and those whose key an unfinished job has already."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.brokers.links import check_links
from tidemill.brokers.lmdb.flows import link
from tidemill.brokers.lmdb.keys import NOBODY, Key, find_key, put_key
from tidemill.brokers.lmdb.layout import DUE_EXPIRY, DUE_KEY, MICRO, READY_KEY
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    HEADER,
    READY,
    SCHEDULED,
    WAITING,
    Flag,
    Stored,
)
from tidemill.brokers.schedules import LeftOut
from tidemill.errors import DuplicateJob, QueueFull
from tidemill.job import Conflict, Envelope, Placed, Put, encode_envelope

__all__ = ["OVERHEAD", "follow", "may_refuse", "put", "put_if_it_fits"]

OVERHEAD = 400
"""Bytes a job takes up besides its body, about."""


def may_refuse(moves: Moves, jobs: Sequence[Envelope]) -> bool:
    """True when unfinished jobs may refuse one of these: by their key, or by filling a queue."""
    if any(job.key for job in jobs):
        return True
    queues = dict.fromkeys([job.queue for job in jobs])  # in order: new ones are numbered
    return any(moves.row(queue).max_size for queue in queues)


def put(
    moves: Moves, jobs: Sequence[Envelope], hold: Collection[str] = (), also: Collection[str] = ()
) -> list[Put]:
    """Accept jobs, all or none; nothing more comes before those that wait, and before ``also``."""
    moves.store.room.check(sum([OVERHEAD + len(job.body) for job in jobs]))
    moves.linked = bool(also)
    puts = [_put_one(moves, job) for job in jobs]
    if moves.linked:
        link(moves, jobs, hold, also)
    return puts


def follow(moves: Moves, jobs: Sequence[Envelope]) -> None:
    """Puts that must not fail, since settling must not: no limit holds, a taken id is kept."""
    begun = []
    for job in jobs:
        if moves.txn.get(job.id.encode(), db=moves.t.job) is None:
            try:
                _put_one(moves, job, limited=False)
            except DuplicateJob:
                continue  # its key rejects it; nothing was written yet
            begun.append(job)
    if any(job.links for job in begun):
        link(moves, begun, strict=False)


def put_if_it_fits(moves: Moves, job: Envelope) -> str:
    """Put a schedule's job, or say why it was left out."""
    held = bool(job.key) and find_key(moves, job.key.encode()) is not None
    row = moves.existing_row(job.queue)
    if moves.txn.get(job.id.encode(), db=moves.t.job) is not None:
        return LeftOut.ID
    if held and job.on_conflict == Conflict.REJECT:
        return LeftOut.KEY
    if not held and row is not None and 0 < row.max_size <= row.size:
        return LeftOut.FULL
    placed = _put_one(moves, job, limited=False).placed
    return LeftOut.KEY if placed in (Placed.KEPT, Placed.MERGED) else ""


def _put_one(moves: Moves, job: Envelope, *, limited: bool = True) -> Put:
    if job.key:
        check_links(job)
        key = find_key(moves, job.key.encode())
        if key is not None:
            return _put_beside(moves, job, key, limited=limited)
        _put_last(moves, job, NOBODY, running=False, limited=limited)
    elif job.links is None:
        _insert(moves, job, READY, limited=limited)
    else:
        moves.linked = True
        waits = bool(job.links.waits)
        _insert(moves, job, WAITING if waits else READY, limited=limited and not waits)
    return Put(job.id, Placed.CREATED)


def _put_beside(moves: Moves, job: Envelope, key: Key, *, limited: bool) -> Put:
    """A job has the key already."""
    if job.on_conflict == Conflict.REJECT:
        raise DuplicateJob.of_key(job.key, job.id)
    if moves.txn.get(job.id.encode(), db=moves.t.job) is not None:
        raise _id_taken(job)
    if key.over:
        return Put(key.over.decode(), Placed.KEPT)
    current = moves.load(key.holder)
    assert current is not None
    running = moves.is_running(current)
    if job.on_conflict == Conflict.MERGE and not running:
        _merge(moves, current, job)
        return Put(key.holder.decode(), Placed.MERGED)
    if job.on_conflict != Conflict.REPLACE:
        return Put(key.holder.decode(), Placed.KEPT)
    if key.successor:
        _displace(moves, moves.load(key.successor), job)
    if not running:
        _displace(moves, current, job)
    _put_last(moves, job, key, running=running, limited=limited)
    return Put(job.id, Placed.SUCCESSOR if running else Placed.REPLACED)


def _put_last(moves: Moves, job: Envelope, key: Key, *, running: bool, limited: bool) -> None:
    """Store a job that is the last in line for its key."""
    key = key.with_last(moves, job, running)
    latest = 0
    if key.since and job.unique is not None:
        latest = key.since + int(job.unique.max_wait * MICRO)
    _insert(moves, job, WAITING if running else READY, limited=limited, latest=latest)
    put_key(moves, job.key.encode(), key)


def _displace(moves: Moves, stored: Stored | None, by: Envelope) -> None:
    """Cancel a job whose key goes to another."""
    assert stored is not None
    moves.unplace(stored)
    moves.end(stored, CANCELLED, stored.tail, f"replaced by {by.id}", promote=False)


def _merge(moves: Moves, stored: Stored, job: Envelope) -> None:
    """pyspider's rule: the higher priority and the earlier time win, the data stay."""
    head = stored.head
    due, wall = head.due, head.flags & Flag.WALL
    if head.flags & Flag.UNKNOWN:
        due = 0  # a worker that does not know it sets it aside again
    elif head.state == SCHEDULED:
        mine = _due_of(moves, job)
        if moves.left(*mine) < moves.left(due, wall):
            due, wall = mine
    moves.unplace(stored)
    head.rank = min(head.rank, job.rank)
    moves.place(stored, due, wall)


def _due_of(moves: Moves, job: Envelope) -> tuple[int, int]:
    """(due time, ``Flag.WALL`` or 0); zeros when due at once."""
    if job.delay > 0:
        return moves.now + int(job.delay * MICRO), 0
    if job.at > 0:
        return int(job.at * MICRO), Flag.WALL
    return 0, 0


def _id_taken(job: Envelope) -> DuplicateJob:
    return DuplicateJob(f"a job with the id {job.id!r} is kept already", job.id)


def _insert(moves: Moves, job: Envelope, state: int, *, limited: bool, latest: int = 0) -> None:
    """The hot path: write one new job, and place it unless it waits for another.

    Whatever delay it has, it is due at ``latest``, unless that is 0.
    """
    row = moves.row(job.queue)
    job_id = job.id.encode()
    if row.max_size and row.size >= row.max_size and limited:
        if moves.txn.get(job_id, db=moves.t.job) is not None:
            raise _id_taken(job)
        raise QueueFull(f"queue {job.queue!r} holds max_size={row.max_size} jobs already")
    due, flags = _due_of(moves, job) if job.delay or job.at else (0, 0)
    if latest and moves.left(due, flags & Flag.WALL) > max(0, latest - moves.now):
        due, flags = latest if latest > moves.now else 0, 0
    line = row.number * 2
    if not job.task:
        line += 1
        flags |= Flag.MESSAGE
    if job.key:
        flags |= Flag.KEYED
    if job.links is not None:
        flags |= Flag.LINKED
    if job.result_ttl >= 0:
        flags |= Flag.RESULT_TTL
    seq = moves.order.accept(job_id)
    expires = 0
    if job.expires:
        expires = moves.now + int(job.expires * MICRO)
        moves.txn.put(DUE_KEY.pack(0, expires, DUE_EXPIRY, seq), job_id, db=moves.t.due)
        moves.untimed = True
    if job.limit is not None:
        flags |= Flag.LIMITED
        moves.gates.declare(job.limit, anew=job.planned is None)
    if state == READY and due and moves.left(due, flags & Flag.WALL) > 0:
        state = SCHEDULED
    envelope = encode_envelope(job)
    header = HEADER.pack(
        state,
        flags,
        0,
        0,
        job.retries.limit + 1,
        job.rank,
        line,
        seq,
        due,
        expires,
        0,
        0,
        job.ttr,
        job.timeout,
        len(envelope),
    )
    if not moves.txn.put(job_id, header + envelope, overwrite=False, db=moves.t.job):
        raise _id_taken(job)
    row.accepted += 1
    if state == READY:
        moves.enter_ready(row, line, READY_KEY.pack(line, job.rank, seq), job_id, job.limit)
    elif state == SCHEDULED:
        moves.enter_scheduled(row, due, flags & Flag.WALL, seq, job_id)
    else:
        moves.count(row, state, +1)
