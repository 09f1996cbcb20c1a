"""Schedules: records that come due, are handed out, and change by compare-and-set.

One table has the records, under ``n`` and the name, and an index by time, under ``d``. A record
begins with its key in that index. The index has the wall time at which a schedule is due (clock 1).
A schedule that was handed out has a store time in the index (clock 0). At this time it is handed
out again if nobody has changed it. So a change of the wall clock cannot delay a second hand-out.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence

import lmdb

from tidemill.brokers.contract.schedules import CLAIM, Change, Changed, Schedule
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.layout import MICRO, rows_of
from tidemill.brokers.lmdb.put.put import OVERHEAD, put_if_it_fits
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.crash_points import point

_HEAD = struct.Struct(">BQQd")  # clock, time (0 for none), version, due; then the body
_ORDER = struct.Struct(">cBQQ")  # d, clock, time, version
_STORE, _WALL = 0, 1


def _key(name: str) -> bytes:
    return b"n" + name.encode()


def _opened(name: str, data: bytes) -> Schedule:
    _, _, version, due = _HEAD.unpack_from(data)
    return Schedule(name, version, due, data[_HEAD.size :])


def read_schedules(
    store: Store, txn: lmdb.Transaction[bytes], names: Sequence[str]
) -> list[Schedule | None]:
    found = ((name, txn.get(_key(name), db=store.tables.schedule)) for name in names)
    return [_opened(name, data) if data is not None else None for name, data in found]


def page_of_schedules(
    store: Store, txn: lmdb.Transaction[bytes], after: str = "", limit: int = 100
) -> list[Schedule]:
    """Records by name, from the first name after ``after`` on."""
    cursor = txn.cursor(store.tables.schedule)
    # Names have no control characters, so the key with a zero byte is the first key after this
    # name.
    found = cursor.set_range(_key(after) + b"\0" * bool(after))
    records: list[Schedule] = []
    while found and len(records) < limit:
        key, data = cursor.item()
        if key[:1] != b"n":
            break
        records.append(_opened(key[1:].decode(), data))
        found = cursor.next()
    return records


def apply_changes(commit: Transitions, changes: Sequence[Change]) -> list[Changed]:
    """Make each change whose schedule has the expected version, and put the change's jobs."""
    size = sum(OVERHEAD + len(job.body) for change in changes for job in change.jobs)
    size += sum(len(change.body) for change in changes if not change.expect)
    # Only changes that need room are refused: pausing and removing must work on a full disk.
    if size:
        commit.store.room.check(size)
    return [_change(commit, each) for each in changes]


def _change(commit: Transitions, change: Change) -> Changed:
    txn, table, key = commit.txn, commit.t.schedule, _key(change.name)
    data = txn.get(key, db=table)
    clock, time, version, before = _HEAD.unpack_from(data) if data is not None else (0, 0, 0, 0.0)
    if version != change.expect:
        return Changed()
    left_out = tuple(filter(None, [put_if_it_fits(commit, job) for job in change.jobs]))
    if time:
        txn.delete(_ORDER.pack(b"d", clock, time, version), db=table)
    due, body, gone = change.due, change.body, change.gone
    if change.instead[1] and len(left_out) == len(change.jobs):
        (due, body), gone = change.instead, False
    if gone:
        txn.delete(key, db=table)
        return Changed(True, 0, left_out)
    version = commit.next_number()
    time = int(due * MICRO)
    txn.put(key, _HEAD.pack(_WALL, time, version, due) + body, db=table)
    if time:
        txn.put(_ORDER.pack(b"d", _WALL, time, version), change.name.encode(), db=table)
        if not change.expect or not before or due < before:
            commit.store.wakeups.ring_owners()  # wake owners: the next due time is earlier now
    return Changed(True, version, left_out)


def hand_out(commit: Transitions, most: int) -> list[Schedule]:
    """Hand out up to ``most`` due schedules; for a while no other owner gets them."""
    txn, table = commit.txn, commit.t.schedule
    again = commit.now + int(CLAIM * MICRO)
    out: list[Schedule] = []
    for clock, now in ((_STORE, commit.now), (_WALL, commit.wall)):
        few = itertools.islice(_by_time(commit, clock), most - len(out))
        for key, name in [(key, name) for key, time, name in few if time <= now]:
            data = txn.get(b"n" + name, db=table)
            assert data is not None
            out.append(_opened(name.decode(), data))
            head = _HEAD.pack(_STORE, again, out[-1].version, out[-1].due)
            txn.delete(key, db=table)
            txn.put(b"n" + name, head + out[-1].body, db=table)
            txn.put(_ORDER.pack(b"d", _STORE, again, out[-1].version), name, db=table)
    if out:
        point("store.claimed")
    return out


def next_due(commit: Transitions) -> float:
    """Seconds until the next hand-out of a schedule, at least 0; infinity without one."""
    seconds = float("inf")
    for clock, now in ((_STORE, commit.now), (_WALL, commit.wall)):
        for _, time, _ in itertools.islice(_by_time(commit, clock), 1):
            seconds = min(seconds, max(0.0, (time - now) / MICRO))
    return seconds


def _by_time(commit: Transitions, clock: int) -> Iterator[tuple[bytes, int, bytes]]:
    """(key, time, name) in the index of the schedules on a clock, the first due first."""
    for key, name in rows_of(commit.txn, commit.t.schedule, _ORDER.pack(b"d", clock, 0, 0)[:2]):
        yield key, _ORDER.unpack(key)[2], name
