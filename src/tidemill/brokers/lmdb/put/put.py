"""Accepting new jobs, also jobs whose key an unfinished job already has.

A put with a nonce may be repeated: the store keeps its answer for at least ten minutes. The key of
an answer is its time span and its nonce. The answers of an old span are deleted together, from the
start of the table. Nonces that grow with time, like ids, are added at the end of the table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence

import msgspec

from tidemill.brokers.contract.dependencies import check_links
from tidemill.brokers.contract.exchange import check_nonce
from tidemill.brokers.contract.schedules import LeftOut
from tidemill.brokers.lmdb.layout import DUE_EXPIRY, DUE_KEY, MICRO, READY_KEY
from tidemill.brokers.lmdb.put.unique import NOBODY, Key, find_key, put_key
from tidemill.brokers.lmdb.put.workflows import link
from tidemill.brokers.lmdb.record import CANCELLED, HEADER, READY, SCHEDULED, WAITING, Flag, Stored
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Conflict, Placed, Put
from tidemill.errors import DuplicateJob, QueueFull

OVERHEAD = 400  # bytes that a job takes up besides its body, approximately


def may_refuse(commit: Transitions, jobs: Sequence[Envelope]) -> bool:
    """True when the put may be refused: a job has a key, or a queue has a ``max_size``."""
    if any(job.key for job in jobs):
        return True
    # A dictionary keeps the order of the jobs: new queues get their numbers in this order.
    queues = dict.fromkeys([job.queue for job in jobs])
    return any(commit.row(queue).max_size for queue in queues)


def put(
    commit: Transitions,
    jobs: Sequence[Envelope],
    hold: Collection[str] = (),
    also: Collection[str] = (),
) -> list[Put]:
    """Accept all jobs or none."""
    # After this put, its waiting jobs except ``hold``, and the jobs ``also``, get no more parents.
    commit.store.room.check(sum([OVERHEAD + len(job.body) for job in jobs]))
    commit.linked = bool(also)
    puts = [_put_one(commit, job) for job in jobs]
    if commit.linked:
        link(commit, jobs, hold, also)
    return puts


def follow(commit: Transitions, jobs: Sequence[Envelope]) -> None:
    """Put jobs without failing, since settling must not fail."""
    # ``max_size`` does not apply here. A job is left out if its id is taken.
    begun = []
    for job in jobs:
        if commit.txn.get(job.id.encode(), db=commit.t.job) is None:
            try:
                _put_one(commit, job, limited=False)
            except DuplicateJob:
                continue  # nothing was written: its key is taken
            begun.append(job)
    if any(job.links for job in begun):
        link(commit, begun, strict=False)


def put_if_it_fits(commit: Transitions, job: Envelope) -> str:
    """Put a schedule's job, or return the reason why it is left out."""
    held = bool(job.key) and find_key(commit, job.key.encode()) is not None
    row = commit.existing_row(job.queue)
    if commit.txn.get(job.id.encode(), db=commit.t.job) is not None:
        return LeftOut.ID
    if held and job.on_conflict == Conflict.REJECT:
        return LeftOut.KEY
    if not held and row is not None and 0 < row.max_size <= row.size:
        return LeftOut.FULL
    placed = _put_one(commit, job, limited=False).placed
    return LeftOut.KEY if placed in (Placed.KEPT, Placed.MERGED) else ""


def _put_one(commit: Transitions, job: Envelope, *, limited: bool = True) -> Put:
    if job.key:
        check_links(job)
        key = find_key(commit, job.key.encode())
        if key is not None:
            return _put_beside(commit, job, key, limited=limited)
        _put_last(commit, job, NOBODY, running=False, limited=limited)
    elif job.links is None:
        _insert(commit, job, READY, limited=limited)
    else:
        commit.linked = True
        waits = bool(job.links.waits)
        _insert(commit, job, WAITING if waits else READY, limited=limited and not waits)
    return Put(job.id, Placed.CREATED)


def _put_beside(commit: Transitions, job: Envelope, key: Key, *, limited: bool) -> Put:
    """Put a job whose key another job already has."""
    if job.on_conflict == Conflict.REJECT:
        raise DuplicateJob.of_key(job.key, job.id)
    if commit.txn.get(job.id.encode(), db=commit.t.job) is not None:
        raise id_taken(job)
    if key.over:
        return Put(key.over.decode(), Placed.KEPT)
    current = commit.load(key.holder)
    assert current is not None
    running = commit.is_running(current)
    if job.on_conflict == Conflict.MERGE and not running:
        _merge(commit, current, job)
        return Put(key.holder.decode(), Placed.MERGED)
    if job.on_conflict != Conflict.REPLACE:
        return Put(key.holder.decode(), Placed.KEPT)
    if key.successor:
        _displace(commit, commit.load(key.successor), job)
    if not running:
        _displace(commit, current, job)
    _put_last(commit, job, key, running=running, limited=limited)
    return Put(job.id, Placed.SUCCESSOR if running else Placed.REPLACED)


def _put_last(
    commit: Transitions, job: Envelope, key: Key, *, running: bool, limited: bool
) -> None:
    """Store a job as the holder of its key, or as the successor of the running holder."""
    key = key.with_last(commit, job, running)
    latest = 0
    if key.since and job.unique is not None:
        latest = key.since + int(job.unique.max_wait * MICRO)
    _insert(commit, job, WAITING if running else READY, limited=limited, latest=latest)
    put_key(commit, job.key.encode(), key)


def _displace(commit: Transitions, stored: Stored | None, by: Envelope) -> None:
    """Cancel a job whose key goes to another job."""
    assert stored is not None
    commit.unplace(stored)
    commit.end(stored, CANCELLED, stored.tail, f"replaced by {by.id}", promote=False)


def _merge(commit: Transitions, stored: Stored, job: Envelope) -> None:
    """Merge a put into a job: the higher priority and the earlier time win, the body stays."""
    head = stored.head
    due, wall = head.due, head.flags & Flag.WALL
    if head.state == SCHEDULED:
        mine = _due_of(commit, job)
        if commit.left(*mine) < commit.left(due, wall):
            due, wall = mine
    commit.unplace(stored)
    head.rank = min(head.rank, job.rank)
    commit.place(stored, due, wall)


def _due_of(commit: Transitions, job: Envelope) -> tuple[int, int]:
    """(due time, ``Flag.WALL`` or 0); zeros when due at once."""
    if job.delay > 0:
        return commit.now + int(job.delay * MICRO), 0
    if job.at > 0:
        return int(job.at * MICRO), Flag.WALL
    return 0, 0


def id_taken(job: Envelope) -> DuplicateJob:
    return DuplicateJob(f"a job with the id {job.id!r} exists already", job.id)


def _insert(
    commit: Transitions, job: Envelope, state: int, *, limited: bool, latest: int = 0
) -> None:
    """Write one new job, and place it unless it waits for other jobs. The hot path."""
    # Unless ``latest`` is 0, the job is due at this time or earlier, even with a longer delay.
    row = commit.row(job.queue)
    job_id = job.id.encode()
    if row.max_size and row.size >= row.max_size and limited:
        if commit.txn.get(job_id, db=commit.t.job) is not None:
            raise id_taken(job)
        raise QueueFull(f"queue {job.queue!r} holds max_size={row.max_size} jobs already")
    due, flags = _due_of(commit, job) if job.delay or job.at else (0, 0)
    if latest and commit.left(due, flags & Flag.WALL) > max(0, latest - commit.now):
        due, flags = latest if latest > commit.now else 0, 0
    flags |= flags_of_job(job)
    line = row.number * 2 + (not job.task)
    seq = commit.next_number()
    flags |= commit.order.accept(seq, job_id)
    expires = commit.now + int(job.expires * MICRO) if job.expires else 0
    if expires:
        commit.txn.put(DUE_KEY.pack(0, expires, DUE_EXPIRY, seq), job_id, db=commit.t.due)
        commit.untimed = True
    if job.limit is not None:
        commit.limiters.declare(job.limit, anew=job.planned is None)
    if state == READY and due and commit.left(due, flags & Flag.WALL) > 0:
        state = SCHEDULED
    envelope = encode_envelope(job)
    most, size = job.retries.limit + 1, len(envelope)
    times = due, expires, 0, 0, job.ttr, job.timeout
    header = HEADER.pack(state, flags, 0, 0, most, job.rank, line, seq, *times, size)
    if not commit.txn.put(job_id, header + envelope, overwrite=False, db=commit.t.job):
        raise id_taken(job)
    row.accepted += 1
    if state == READY:
        commit.enter_ready(row, line, READY_KEY.pack(line, job.rank, seq), job_id, job.limit)
    elif state == SCHEDULED:
        commit.enter_scheduled(row, due, flags & Flag.WALL, seq, job_id)
    else:
        commit.count(row, state, +1)


def flags_of_job(job: Envelope) -> int:
    flags = 0
    if not job.task:
        flags |= Flag.MESSAGE
    if job.key:
        flags |= Flag.KEYED
    if job.links is not None:
        flags |= Flag.LINKED
    if job.result_ttl >= 0:
        flags |= Flag.RESULT_TTL
    if job.limit is not None:
        flags |= Flag.LIMITED
    return flags


# -- puts with a nonce ---------------------------------------------------------------------------


_KEY = struct.Struct(">cI")  # the nonce follows
_NONCES = b"n"
_SPAN = 300 * MICRO
_SPANS = 2  # the number of past time spans that are kept
_SWEEP_MOST = 20_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Put]).decode


def put_once(
    nonce: str, jobs: Sequence[Envelope], accept: Callable[[Transitions], list[Put]]
) -> Callable[[Transitions], list[Put]]:
    """Put, or return the answer to an earlier put with this nonce."""
    check_nonce(nonce)
    name = nonce.encode()

    def once(commit: Transitions) -> list[Put]:
        span = commit.now // _SPAN
        for earlier in range(_SPANS + 1):
            data = commit.txn.get(_KEY.pack(_NONCES, span - earlier) + name, db=commit.t.said)
            if data is not None:
                return _decode(data) if data else [Put(job.id, Placed.CREATED) for job in jobs]
        puts = accept(commit)
        # An empty value means that all jobs of the put were created.
        plain = all(put.placed is Placed.CREATED for put in puts)
        commit.txn.put(
            _KEY.pack(_NONCES, span) + name, b"" if plain else _encode(puts), db=commit.t.said
        )
        return puts

    return once


def sweep_nonces(commit: Transitions) -> bool:
    """Forget old answers, as many as one commit should; True when more are left."""
    first = _KEY.pack(_NONCES, max(0, commit.now // _SPAN - _SPANS))
    cursor = commit.txn.cursor(commit.t.said)
    found = cursor.set_range(_NONCES)
    for _ in range(_SWEEP_MOST):
        if not found or not _NONCES < cursor.key() < first:
            return False
        cursor.delete()
        found = bool(cursor.key())
    return True
