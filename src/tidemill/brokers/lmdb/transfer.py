"""Moving all jobs to another store, and adopting jobs of another store."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb
import msgspec

from tidemill.brokers.contract.dependencies import was_dropped
from tidemill.brokers.contract.schedules import Change, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.engine.wakeup import MESSAGES, TASKS
from tidemill.brokers.lmdb.layout import DUE_EXPIRY, DUE_KEY, MICRO
from tidemill.brokers.lmdb.put.put import flags_of_job
from tidemill.brokers.lmdb.put.schedules import apply_changes
from tidemill.brokers.lmdb.put.unique import Key, find_key, hold, put_key
from tidemill.brokers.lmdb.put.workflows import finish_falls, put_counts
from tidemill.brokers.lmdb.record import (
    HEADER,
    READY,
    SCHEDULED,
    STATES,
    SUCCEEDED,
    WAITING,
    Flag,
    Header,
    Notes,
    Stored,
    Tail,
    encode,
)
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Record
from tidemill.errors import StoreMoved


class _Arrival(msgspec.Struct, array_like=True):
    """The cursor of an adopted store, and the number that is added to the numbers of its jobs."""

    cursor: str
    first: int


_ARRIVAL = msgspec.msgpack.Decoder(_Arrival)


def depart(commit: Transitions, where: str, *, seal: bool = False) -> Departure:
    """Begin a departure, or continue it."""
    if seal:
        finish_falls(commit)
    known = commit.departure or Departure(new_id(), where)
    if known.where != where:
        raise gone(known)
    departure = Departure(known.mark, where, commit.last_number, known.sealed or seal)
    commit.departure = departure
    commit.txn.put(commit.store.key("departure"), encode(departure))
    _wake_everybody(commit)
    return departure


def stay(commit: Transitions) -> None:
    commit.departure = None
    commit.txn.delete(commit.store.key("departure"))
    _wake_everybody(commit)


def _wake_everybody(commit: Transitions) -> None:
    for kind in (TASKS, MESSAGES):
        commit.store.wakeups.ring(kind)


def gone(departure: Departure) -> StoreMoved:
    """The error for calls of a store whose jobs move to another store."""
    return StoreMoved(f"this store moves to {departure.where}; use that url")


def check_here(commit: Transitions) -> None:
    """Refuse changes of a store whose jobs move to another store."""
    if commit.departure is not None:
        raise gone(commit.departure)


def adopted(store: Store, txn: lmdb.Transaction[bytes], mark: str) -> str:
    """The cursor of the last adopted jobs of a departed store."""
    data = txn.get(store.key("from/" + mark))
    return _ARRIVAL.decode(data).cursor if data is not None else ""


def adopt(
    commit: Transitions,
    departure: Departure,
    records: Sequence[Record],
    cursor: str,
    schedules: Sequence[Schedule] = (),
) -> list[bool]:
    key = commit.store.key("from/" + departure.mark)
    data = commit.txn.get(key)
    if data is not None:
        first = _ARRIVAL.decode(data).first
    else:
        first = commit.last_number
        commit.skip_numbers(departure.last)
    commit.store.room.check(sum(len(record.envelope.body) + 600 for record in records))
    commit.txn.put(key, encode(_Arrival(cursor, first)))
    adopted = [_adopt_one(commit, record, first) for record in records]
    new = [Change(s.name, 0, s.due, s.body) for s in schedules]
    return adopted + [changed.done for changed in apply_changes(commit, new)]


def _adopt_one(commit: Transitions, record: Record, first: int) -> bool:
    envelope = record.envelope
    job_id = envelope.id.encode()
    if commit.txn.get(job_id, db=commit.t.job) is not None:
        return False
    if envelope.key and not record.state.finished and not _take_key(commit, record):
        return False
    if envelope.limit is not None:
        commit.limiters.declare(envelope.limit, anew=False)
    head = _header(commit, record, first)
    head.flags |= commit.order.set_apart(head.seq, job_id)
    data = encode_envelope(envelope)
    head.size = len(data)
    stored = Stored(job_id, head.pack() + data)
    if envelope.links is not None and envelope.links.waits:
        put_counts(commit, job_id, record.pending, record.failures)
    tail = Tail(record.error, record.raw_result, record.attempts)
    row = commit.row_of(head.line)
    if head.expires and head.state < SUCCEEDED:
        commit.txn.put(DUE_KEY.pack(0, head.expires, DUE_EXPIRY, head.seq), job_id, db=commit.t.due)
        commit.untimed = True
    if head.flags & Flag.NOTED:
        notes = Notes(record.progress, record.log, record.progress_text)
        commit.txn.put(job_id, encode(notes), db=commit.t.note)
    if head.state >= SUCCEEDED:
        commit.count(row, head.state, +1)
        commit.keep(stored, tail, needed=True)
        name, until = envelope.key.encode(), _until(commit, record)
        if head.state == SUCCEEDED and until and find_key(commit, name) is None:
            hold(commit, name, stored, until)
    elif head.state == WAITING:
        commit.count(row, WAITING, +1)
        commit.save(stored, tail)
    else:
        commit.place(stored, head.due, head.flags & Flag.WALL, tail)
    return True


def _take_key(commit: Transitions, record: Record) -> bool:
    """Take the key, or wait for it, as the job did in its old store; False if the key is taken."""
    name, job_id = record.envelope.key.encode(), record.envelope.id.encode()
    key = find_key(commit, name)
    if key is None:
        put_key(commit, name, Key(job_id, until=_until(commit, record)))
    elif STATES.index(record.state) == WAITING and key.holder and not key.successor:
        put_key(commit, name, Key(key.holder, job_id))
    else:
        return False
    return True


def _until(commit: Transitions, record: Record) -> int:
    """The time until which a job keeps its key after success; 0 when that time is over."""
    unique = record.envelope.unique
    if unique is None or not unique.period or not record.envelope.key:
        return 0
    left = int((record.envelope.created + unique.period) * MICRO) - commit.wall
    return commit.now + left if left > 0 else 0


def _header(commit: Transitions, record: Record, first: int) -> Header:
    """The header of a record, with times and numbers of this store."""
    envelope = record.envelope
    state = STATES.index(record.state)
    ahead = commit.now - commit.wall  # difference between store time and wall time
    by_wall = record.due_by_wall
    due = int(record.due * MICRO)
    head = Header(*HEADER.unpack(bytes(HEADER.size)))
    head.state = state if state not in (SCHEDULED, READY) else READY
    head.flags = _flags(envelope, record) | (Flag.WALL if by_wall else 0)
    head.attempt, head.losses, head.limit = record.attempt, record.losses, record.max_attempts
    head.rank = record.rank
    head.line = commit.row(envelope.queue).number * 2 + envelope.is_message
    head.seq = first + record.seq
    head.due = due if by_wall or not due else due + ahead
    head.expires = int(record.expires * MICRO) + ahead if record.expires else 0
    head.finished = int(record.finished * MICRO)
    head.ttr, head.timeout = envelope.ttr, envelope.timeout
    return head


def _flags(envelope: Envelope, record: Record) -> int:
    flags = flags_of_job(envelope)
    flags |= Flag.DROPPED if was_dropped(record) else 0
    flags |= Flag.CANCELLING if record.cancelling else 0
    return flags | (Flag.NOTED if record.progress or record.log else 0)
