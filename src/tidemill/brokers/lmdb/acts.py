"""Acting on jobs by their ids, and on queues: what people, handles and the command line ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tidemill.brokers.lmdb.flows import finish_falls, flow, revive
from tidemill.brokers.lmdb.inspect import Holders
from tidemill.brokers.lmdb.keys import Key, find_key, forget_held, put_key
from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.purge import ready_ids, still_unready, unready_ids
from tidemill.brokers.lmdb.record import (
    CANCELLED,
    SCHEDULED,
    SUCCEEDED,
    Flag,
    Stored,
)
from tidemill.brokers.lmdb.roster import send
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.verdicts import drop_lease, log
from tidemill.brokers.lmdb.wake import ALL, MESSAGES, SPACE, TASKS, UNKNOWN
from tidemill.gate import Terms
from tidemill.job import CANCEL_ASKED, NOT_STARTED, Command, Waits, decode_envelope

__all__ = ["cancel", "delete", "forget_queue", "kick", "purge", "set_limit", "set_queue"]

_PURGE_MOST = 1000
"""Jobs deleted in one commit."""


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


def kick(moves: Moves, ids: Sequence[str], *, force: bool = False) -> list[bool]:
    """Make jobs ready again.

    With ``force`` also those that succeeded, or whose key a success holds.
    """
    finish_falls(moves)
    return _each(moves, ids, lambda stored: _kick(moves, stored, force))


def _kick(moves: Moves, stored: Stored | None, force: bool) -> bool:
    if stored is None:
        return False
    head = stored.head
    if head.state == SCHEDULED:
        moves.unplace(stored)
        moves.place(stored, 0, 0)
        return True
    again = force and head.state == SUCCEEDED and not head.flags & Flag.LINKED
    if head.state <= SUCCEEDED and not again:
        return False
    envelope = decode_envelope(stored.envelope)
    if envelope.links is not None and envelope.links.waits == Waits.BARRIER:
        return False  # it is never run
    if envelope.key:
        name = envelope.key.encode()
        key = find_key(moves, name)
        if key is not None and (key.holder or not force):
            return False  # at most one unfinished job per key
        put_key(moves, name, Key(stored.id, until=key.until if key is not None else 0))
    revive(moves, stored)
    moves.unfinish(stored)
    head.attempt, head.limit = 0, envelope.retries.max_attempts
    head.losses, head.finished, head.prune, head.expires = 0, 0, 0, 0
    head.flags &= ~(Flag.CANCELLING | Flag.DROPPED)
    tail = stored.tail
    tail.error, tail.result = "", b""
    moves.place(stored, 0, 0, tail)
    return True


def delete(moves: Moves, ids: Sequence[str]) -> list[bool]:
    """Forget jobs in any state."""
    holders = Holders(moves.txn, moves.t)
    return _each(moves, ids, lambda stored: _delete(moves, stored, holders))


def _delete(moves: Moves, stored: Stored | None, holders: Holders) -> bool:
    if stored is None:
        return False
    if stored.head.state >= SUCCEEDED:
        if stored.head.flags & Flag.KEYED:
            forget_held(moves, stored)
        moves.unfinish(stored)
        moves.forget(stored)
        return True
    if moves.is_running(stored):
        owner, token = holders.lease_of(stored.id)
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
    row.forgotten, row.dirty = 0, True
    moves.store.bells.ring(TASKS | MESSAGES | SPACE | UNKNOWN, ALL)


def set_limit(moves: Moves, name: str, terms: Terms | None, *, queue: bool, declared: bool) -> None:
    """Have other terms hold for a limit or a queue, and wake whoever they kept waiting."""
    if queue:
        moves.gates.set_queue(moves.row(name), terms, declared=declared)
    else:
        moves.gates.set_named(name, terms, declared=declared)


def purge(commit: Callable[[Callable[[Moves], int]], int], store: Store, queue: str) -> int:
    """Delete what waits in a queue, some of it in each commit; how many jobs that were."""
    removed, unready = 0, unready_ids(store, queue)
    # Those behind others first: what is purged is not cancelled for what was purged before it.
    while unready:
        some, unready = unready[:_PURGE_MOST], unready[_PURGE_MOST:]
        removed += commit(partial(_purge_some, queue=queue, unready=some))
    while batch := commit(partial(_purge_some, queue=queue)):
        removed += batch
    return removed


def _purge_some(moves: Moves, queue: str, unready: Sequence[bytes] = ()) -> int:
    """Delete these unready jobs of a queue, or some ready ones; how many that were."""
    row = moves.existing_row(queue)
    if row is None:
        return 0
    moves.sync()
    ids = still_unready(moves, row, unready) if unready else ready_ids(moves, row, _PURGE_MOST)
    holders = Holders(moves.txn, moves.t)
    purged = sum([_delete(moves, moves.load(job_id), holders) for job_id in ids])
    row.purged += purged
    row.dirty = True
    return purged


def forget_queue(moves: Moves, queue: str) -> bool:
    """Forget the counters and settings of a queue without unfinished jobs."""
    row = moves.existing_row(queue)
    if row is not None and row.size:
        return False
    if row is not None:
        moves.order.mark.counted -= row.accepted
        row.forget()
    return True
