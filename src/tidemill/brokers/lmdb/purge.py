"""Purging a queue: readers look for its scheduled and waiting jobs, writers delete in pieces.

Scheduled and waiting jobs of all queues are in the same tables. The search for the jobs of a queue
takes no write lock, and uses only short read transactions. So producers and workers go on during a
purge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import lmdb

from tidemill.brokers.lmdb.layout import DUE_JOB, DUE_KEY, READY_KEY, Row
from tidemill.brokers.lmdb.record import SCHEDULED, WAITING, Stored
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.unique import Key

LOOK_MOST = 2000
"""The most entries that one read transaction looks at. A long read transaction makes the file grow,
and a file never shrinks."""

_Name = Callable[[bytes, bytes], bytes | None]


def unready_ids(store: Store, queue: str) -> list[bytes]:
    """Ids of the scheduled and waiting jobs of a queue.

    The ids are in the order of the puts. A flow puts each job before the jobs for which it waits.
    So a purge in this order deletes a waiting job first, and cancels none.
    """
    tables = store.tables
    with store.reading_txn() as txn:
        data = txn.get(store.key("q/" + queue))
        if data is None:
            return []
        row = Row(queue, 0, data)
    if not row.scheduled + row.waiting:
        return []
    places: tuple[tuple[lmdb._Database, _Name], ...] = (
        (tables.due, _scheduled),
        (tables.key, _successor),
        (tables.wait, lambda key, data: key),
    )
    found: set[tuple[int, bytes]] = set()
    for table, name in places:
        for txn, entries in _pieces(store, table):
            ids = (name(key, data) for key, data in entries)
            jobs = (_load(txn, store, job_id) for job_id in ids if job_id)
            found.update((j.head.seq, j.id) for j in jobs if j and _is_unready(j, row.lines))
    return [job_id for _, job_id in sorted(found)]


def still_unready(commit: Transitions, row: Row, ids: Sequence[bytes]) -> list[bytes]:
    """The ids of the jobs that are still unready and in the queue."""
    jobs = (commit.load(job_id) for job_id in ids)
    return [stored.id for stored in jobs if stored and _is_unready(stored, row.lines)]


def ready_ids(commit: Transitions, row: Row, most: int) -> list[bytes]:
    """Ids of ready jobs of a queue: on its lines, and in partitions."""
    lines = *row.lines, row.lost_line
    ids = [job_id for line in lines for job_id in _first(commit, line, most)]
    ids += commit.partitions.jobs_in(lines, most)
    return list(dict.fromkeys(ids))[:most]


def _first(commit: Transitions, line: int, most: int) -> list[bytes]:
    """The first jobs of a line."""
    cursor = commit.txn.cursor(commit.t.ready)
    found = cursor.set_range(READY_KEY.pack(line, 0, 0))
    ids: list[bytes] = []
    while found and READY_KEY.unpack(cursor.key())[0] == line and len(ids) < most:
        ids.append(cursor.value())
        found = cursor.next()
    return ids


def _is_unready(stored: Stored, lines: Sequence[int]) -> bool:
    return stored.head.line in lines and stored.head.state in (WAITING, SCHEDULED)


def _scheduled(key: bytes, job_id: bytes) -> bytes | None:
    return job_id if DUE_KEY.unpack(key)[2] == DUE_JOB else None


def _successor(_: bytes, data: bytes) -> bytes | None:
    return Key.of(data).successor or None


def _load(txn: lmdb.Transaction[bytes], store: Store, job_id: bytes) -> Stored | None:
    data = txn.get(job_id, db=store.tables.job)
    return Stored(job_id, data) if data is not None else None


def _pieces(
    store: Store, table: lmdb._Database
) -> Iterator[tuple[lmdb.Transaction[bytes], list[tuple[bytes, bytes]]]]:
    """The entries of a table, in pieces, each from a read transaction of its own."""
    last = b""
    while True:
        with store.reading_txn() as txn:
            cursor, entries = txn.cursor(table), list[tuple[bytes, bytes]]()
            found = cursor.set_range(last) if last else cursor.first()
            if found and cursor.key() == last:
                found = cursor.next()
            while found and len(entries) < LOOK_MOST:
                entries.append(cursor.item())
                found = cursor.next()
            yield txn, entries
        if len(entries) < LOOK_MOST:
            return
        last = entries[-1][0]
