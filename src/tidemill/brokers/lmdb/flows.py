"""Jobs that wait for others: counted down when those end, in the same commit.

What a job still waits for lies in a table of its own, so that a group's end is counted without
touching the record. The two numbers always tell how those before it stand, also after it has ended
itself; so a failed job that is made ready again gives those behind it another chance.

A long fall (the head of a chain of many steps is cancelled) goes in pieces: what one commit leaves
is due at once, so that whoever comes next goes on with it, also when its cause was killed.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence

import lmdb
import msgspec

from tidemill.brokers.links import not_waiting
from tidemill.brokers.lmdb.layout import DUE_FALL, DUE_KEY, MICRO, Tables
from tidemill.brokers.lmdb.moves import Moves
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
from tidemill.job import Envelope, Input, Links, Waits

__all__ = [
    "FALL_MOST",
    "NO_LINKS",
    "count_down",
    "counts_of",
    "finish_falls",
    "flow",
    "go_on",
    "inputs_of",
    "is_needed",
    "is_unfinished",
    "link",
    "put_counts",
    "revive",
]

_HOW = {FAILED: "failed", CANCELLED: "was cancelled", EXPIRED: "expired"}
_COUNTS = struct.Struct(">II")  # pending, failures
_LEFT = msgspec.msgpack.Decoder(tuple[str, tuple[int, int, str]])
NO_LINKS = Links()

FALL_MOST = 2000
"""Jobs that are counted down in one commit: some 0.1 s."""


def links_of(stored: Stored) -> Links:
    """How a stored job hangs together with others."""
    if not stored.head.flags & Flag.LINKED:
        return NO_LINKS
    return envelope_of(stored).links or NO_LINKS


# -- putting -------------------------------------------------------------------------------------


def link(
    moves: Moves,
    jobs: Sequence[Envelope],
    hold: Collection[str] = (),
    also: Collection[str] = (),
    *,
    strict: bool = True,
) -> None:
    """Jobs were put: those behind them wait for more, and nothing more comes before some.

    Those are the jobs that wait themselves, but for ``hold``, and ``also``.
    """
    for name in also:
        if not _is_waiting(moves, name.encode()):
            raise not_waiting(name)
    begun = list(also)
    for job in jobs:
        links = job.links or NO_LINKS
        for name in links.next:
            _expect_one_more(moves, name, strict)
        if links.waits:
            put_counts(moves, job.id.encode(), 1, 0)  # until it is let go
            if job.id not in hold:
                begun.append(job.id)
    for name in begun:
        count_down(moves, name.encode(), 1, 0, "")
    flow(moves)


def _expect_one_more(moves: Moves, name: str, strict: bool) -> None:
    child = name.encode()
    if _is_waiting(moves, child):
        pending, failures = _counts(moves, child)
        put_counts(moves, child, pending + 1, failures)
    elif strict:
        raise not_waiting(name)


def _is_waiting(moves: Moves, job_id: bytes) -> bool:
    if moves.txn.get(job_id, db=moves.t.wait) is None:
        return False
    data = moves.txn.get(job_id, db=moves.t.job)
    return data is not None and state_and_line(data)[0] == WAITING


def counts_of(txn: lmdb.Transaction[bytes], tables: Tables, job_id: bytes) -> tuple[int, int]:
    """How many before a job have not ended, and how many did not succeed."""
    data = txn.get(job_id, db=tables.wait)
    pending, failures = _COUNTS.unpack(data) if data is not None else (0, 0)
    return pending, failures


def _counts(moves: Moves, job_id: bytes) -> tuple[int, int]:
    return counts_of(moves.txn, moves.t, job_id)


def put_counts(moves: Moves, job_id: bytes, pending: int, failures: int) -> None:
    """Say how those before a job stand."""
    moves.txn.put(job_id, _COUNTS.pack(pending, failures), db=moves.t.wait)


# -- ending --------------------------------------------------------------------------------------


def flow(moves: Moves) -> None:
    """Count down behind all that has ended, and behind what ends for that."""
    while moves.ended:
        ended, moves.ended = moves.ended, []
        counts: dict[str, tuple[int, int, str]] = {}
        for stored, state in ended:
            failed = state != SUCCEEDED
            how = _HOW.get(state, "was deleted")
            why = f"not run, since job {stored.id.decode()} {how}" if failed else ""
            for name in links_of(stored).next:
                number, failures, first = counts.get(name, (0, 0, ""))
                counts[name] = number + 1, failures + failed, first or why
        for name, count in counts.items():
            if moves.fallen < FALL_MOST:
                moves.fallen += 1
                count_down(moves, name.encode(), *count)
            else:
                key = DUE_KEY.pack(0, moves.now, DUE_FALL, moves.next_number())
                moves.txn.put(key, encode((name, count)), db=moves.t.due)
                moves.untimed = True


def go_on(moves: Moves, left: bytes) -> None:
    """Count down what an earlier commit left."""
    name, count = _LEFT.decode(left)
    moves.fallen += 1
    count_down(moves, name.encode(), *count)


def finish_falls(moves: Moves) -> None:
    """All that is left, however much: before what must find the counts as they will be."""
    moves.fallen = -FALL_MOST * 1_000_000
    cursor = moves.txn.cursor(moves.t.due)
    found, left = cursor.set_range(DUE_KEY.pack(0, 0, 0, 0)), []
    while found:
        clock, time, kind, _ = DUE_KEY.unpack(cursor.key())
        if clock or time > moves.now:
            break
        if kind == DUE_FALL:
            left.append(cursor.item())
        found = cursor.next()
    for key, value in left:
        moves.txn.delete(key, db=moves.t.due)
        go_on(moves, value)
    flow(moves)


def count_down(moves: Moves, job_id: bytes, number: int, failures: int, why: str) -> None:
    """A job waits for that many less, of which some did not succeed."""
    data = moves.txn.get(job_id, db=moves.t.wait)
    if data is None:
        return
    pending, failed = _COUNTS.unpack(data)
    pending, failed = max(0, pending - number), failed + failures
    put_counts(moves, job_id, pending, failed)
    if pending and (not failures or failed > failures):
        return  # nothing follows from it, or it did from the first failure: a record may be large
    stored = moves.load(job_id)
    if stored is None or stored.head.state != WAITING:
        return
    waits = links_of(stored).waits
    if waits == Waits.SUCCESS and failed:
        _drop(moves, stored, CANCELLED, why)
    elif not pending:
        _begin(moves, stored, waits, failed)


def _begin(moves: Moves, stored: Stored, waits: str, failed: int) -> None:
    """All before it have ended."""
    if waits == Waits.BARRIER:
        if failed:
            _drop(moves, stored, FAILED, f"{failed} of its jobs did not succeed")
        else:
            moves.unplace(stored)
            moves.end(stored, SUCCEEDED, stored.tail)
    elif waits == Waits.FAILURE and not failed:
        moves.unplace(stored)
        moves.vanish(stored)
    else:
        moves.unplace(stored)
        envelope = envelope_of(stored)
        due = moves.now + int(envelope.delay * MICRO) if envelope.delay > 0 else 0
        wall = Flag.WALL if not due and envelope.at > 0 else 0
        moves.place(stored, due or int(envelope.at * MICRO), wall)


def _drop(moves: Moves, stored: Stored, state: int, why: str) -> None:
    """It ends for how those before it ended."""
    stored.head.flags |= Flag.DROPPED
    moves.unplace(stored)
    moves.end(stored, state, stored.tail, why)


def revive(moves: Moves, stored: Stored) -> None:
    """A job that had not succeeded is to run again: those that ended for that wait again."""
    revived = [stored]
    while revived:
        for name in links_of(revived.pop()).next:
            child = name.encode()
            behind = moves.load(child)
            if behind is None or moves.txn.get(child, db=moves.t.wait) is None:
                continue  # gone, or its id is another's now
            pending, failures = _counts(moves, child)
            failures = max(0, failures - 1)
            put_counts(moves, child, pending + 1, failures)
            if not behind.head.flags & Flag.DROPPED:
                continue
            if not failures or links_of(behind).waits == Waits.BARRIER:
                _wait_again(moves, behind)
                revived.append(behind)


def _wait_again(moves: Moves, stored: Stored) -> None:
    moves.unfinish(stored)
    head, tail = stored.head, stored.tail
    head.state, head.finished, head.prune = WAITING, 0, 0
    head.flags &= ~Flag.DROPPED
    tail.error = ""
    moves.count(moves.row_of(head.line), WAITING, +1)
    moves.save(stored, tail)


# -- what a flow needs ---------------------------------------------------------------------------


def is_needed(moves: Moves, stored: Stored, unfinished: dict[str, bool]) -> bool:
    """True while a job behind this one has not ended: its result must not be pruned.

    What is behind a barrier is behind all that is before it. ``unfinished`` keeps what was found,
    since many may have the same job behind them.
    """
    for name in links_of(stored).next:
        if name not in unfinished:
            unfinished[name] = _goes_on(moves, name.encode(), unfinished)
        if unfinished[name]:
            return True
    return False


def is_unfinished(moves: Moves, job_id: bytes) -> bool:
    """True while a job is there and has not ended."""
    data = moves.txn.get(job_id, db=moves.t.job)
    return data is not None and state_and_line(data)[0] < SUCCEEDED


def _goes_on(moves: Moves, job_id: bytes, unfinished: dict[str, bool]) -> bool:
    """True while a job has not ended, or is a barrier with such a job behind it."""
    if is_unfinished(moves, job_id):
        return True
    stored = moves.load(job_id)
    barrier = stored is not None and links_of(stored).waits == Waits.BARRIER
    return barrier and stored is not None and is_needed(moves, stored, unfinished)


def inputs_of(moves: Moves, stored: Stored) -> tuple[Input, ...]:
    """How the jobs ended whose results this one is given."""
    return tuple(_inputs(moves, links_of(stored).inputs))


def _inputs(moves: Moves, names: Sequence[str]) -> Iterator[Input]:
    for name in names:
        before = moves.load(name.encode())
        if before is None:
            yield Input(name)
        else:
            state = RUNNING if moves.is_running(before) else before.head.state
            tail = before.tail
            yield Input(name, STATES[state].value, tail.result, tail.error)
