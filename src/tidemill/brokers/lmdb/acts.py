"""Acting on jobs by their ids, and on queues: what people, handles and the command line ask for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from tidemill.brokers.lmdb.carried import carried_in
from tidemill.brokers.lmdb.flows import finish_falls, flow, revive
from tidemill.brokers.lmdb.inspect import Holders
from tidemill.brokers.lmdb.keys import Key, find_key, forget_held, put_key, successors
from tidemill.brokers.lmdb.layout import DUE_JOB, DUE_KEY, MICRO, READY_KEY
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    SCHEDULED,
    SUCCEEDED,
    WAITING,
    Flag,
    Stored,
)
from tidemill.brokers.lmdb.roster import send
from tidemill.brokers.lmdb.verdicts import drop_lease, log
from tidemill.brokers.lmdb.wake import ALL, MESSAGES, SPACE, TASKS
from tidemill.gate import Terms
from tidemill.job import CANCEL_ASKED, NOT_STARTED, Command, Waits, decode_envelope

__all__ = ["cancel", "delete", "kick", "purge", "set_limit", "set_queue"]


def _each(moves: Moves, ids: Sequence[str], act: Callable[[Stored | None], bool]) -> list[bool]:
    """Act on jobs, each read when its turn comes: the one before may have changed it."""
    answers = []
    for job_id in ids:
        answers.append(act(moves.load(job_id.encode()) if job_id else None))
        flow(moves)
    return answers


def cancel(moves: Moves, ids: Sequence[str], *, terminate: bool) -> list[bool]:
    """Cancel jobs; running ones through their owners."""
    holders = Holders(moves.txn, moves.t)
    verb = "terminate" if terminate else "cancel"
    return _each(moves, ids, lambda stored: _cancel(moves, stored, holders, verb))


def _cancel(moves: Moves, stored: Stored | None, holders: Holders, verb: str) -> bool:
    if stored is None or stored.head.state >= SUCCEEDED:
        return False
    if moves.is_running(stored):
        stored.head.flags |= Flag.CANCELLING
        log(moves, stored, CANCEL_ASKED[verb == "terminate"], moves.wall / MICRO)
        moves.save(stored)
        owner, token = holders.lease_of(stored.id)
        send(moves, owner, Command(verb, token))
    else:
        moves.unplace(stored)
        moves.end(stored, CANCELLED, stored.tail, NOT_STARTED)
    return True


def kick(moves: Moves, ids: Sequence[str]) -> list[bool]:
    """Make jobs ready again."""
    finish_falls(moves)
    return _each(moves, ids, lambda stored: _kick(moves, stored))


def _kick(moves: Moves, stored: Stored | None) -> bool:
    if stored is None:
        return False
    head = stored.head
    if head.state == SCHEDULED:
        moves.unplace(stored)
        moves.place(stored, 0, 0)
        return True
    if head.state <= SUCCEEDED:
        return False
    envelope = decode_envelope(stored.envelope)
    if envelope.links is not None and envelope.links.waits == Waits.BARRIER:
        return False  # it is never run
    if envelope.key:
        key = envelope.key.encode()
        if find_key(moves, key) is not None:
            return False  # at most one unfinished job per key
        put_key(moves, key, Key(stored.id))
    revive(moves, stored)
    moves.unfinish(stored)
    policy = envelope.retries.max_attempts
    head.limit = head.attempt + policy if policy else 0
    head.losses, head.finished, head.prune, head.expires = 0, 0, 0, 0
    head.flags &= ~(Flag.CANCELLING | Flag.DROPPED)
    tail = stored.tail
    tail.error, tail.result = "", b""
    moves.place(stored, 0, 0, tail)
    return True


def delete(moves: Moves, ids: Sequence[str]) -> list[bool]:
    """Forget jobs in any state."""
    return _each(moves, ids, lambda stored: _delete(moves, stored))


def _delete(moves: Moves, stored: Stored | None) -> bool:
    if stored is None:
        return False
    if stored.head.state >= SUCCEEDED:
        if stored.head.flags & Flag.KEYED:
            forget_held(moves, stored)
        moves.unfinish(stored)
        moves.forget(stored)
        return True
    if moves.is_running(stored):
        owner, token = Holders(moves.txn, moves.t).lease_of(stored.id)
        drop_lease(moves, owner, token, stored)
    else:
        moves.unplace(stored)
    moves.vanish(stored)
    return True


def set_queue(moves: Moves, queue: str, *, paused: bool | None, max_size: int | None) -> None:
    """Change a queue's settings, and wake whoever they kept waiting."""
    row = moves.row(queue)
    row.paused = row.paused if paused is None else int(paused)
    row.max_size = row.max_size if max_size is None else max_size
    row.dirty = True
    moves.store.bells.ring(TASKS | MESSAGES | SPACE, ALL)


def set_limit(moves: Moves, name: str, terms: Terms | None, *, queue: bool, declared: bool) -> None:
    """Have other terms hold for a limit or a queue, and wake whoever they kept waiting."""
    if queue:
        moves.gates.set_queue(moves.row(name), terms, declared=declared)
    else:
        moves.gates.set_named(name, terms, declared=declared)


def purge(moves: Moves, queue: str, most: int) -> int:
    """Delete up to ``most`` jobs that wait in a queue; how many that were."""
    row = moves.existing_row(queue)
    if row is None:
        return 0
    lines = *row.lines, row.lost_line
    moves.sync()
    # Those behind others first: what is purged is not cancelled for what was purged before it.
    ids = _unready(moves, row.lines, most) if row.scheduled + row.waiting else []
    if len(ids) < most:
        ids += [job_id for line in lines for job_id in _ready(moves, line, most)]
        ids += moves.lanes.jobs_in(lines, most)
        ids += itertools.islice(carried_in(moves.txn, moves.t, lines), most)
        ids = list(dict.fromkeys(ids))[:most]
    return sum([_delete(moves, moves.load(job_id)) for job_id in ids])


def _ready(moves: Moves, line: int, most: int) -> list[bytes]:
    """The first jobs of a line."""
    cursor = moves.txn.cursor(moves.t.ready)
    found = cursor.set_range(READY_KEY.pack(line, 0, 0))
    ids: list[bytes] = []
    while found and READY_KEY.unpack(cursor.key())[0] == line and len(ids) < most:
        ids.append(cursor.value())
        found = cursor.next()
    return ids


def _unready(moves: Moves, lines: Sequence[int], most: int) -> list[bytes]:
    """Scheduled jobs of some lines, found by their due time, and waiting ones, by their key.

    In the order in which they were put, which is that of jobs that come behind one another.
    """
    ids: list[bytes] = []
    for key, job_id in moves.txn.cursor(moves.t.due):
        if DUE_KEY.unpack(key)[2] == DUE_JOB:
            ids.append(job_id)
    ids += successors(moves.txn, moves.t)
    ids += [job_id for job_id, _ in moves.txn.cursor(moves.t.wait)]
    jobs = ((job_id, moves.load(job_id)) for job_id in ids)
    mine = (
        (stored.head.seq, job_id)
        for job_id, stored in jobs
        if stored and stored.head.line in lines and stored.head.state in (WAITING, SCHEDULED)
    )
    return [job_id for _, job_id in heapq.nsmallest(most, mine)]
