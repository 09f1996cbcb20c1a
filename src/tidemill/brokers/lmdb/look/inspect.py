"""Inspection: each call reads records, queues or facts in one read transaction."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lmdb

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, matches
from tidemill.brokers.lmdb.claim.limits import (
    COST,
    LIMITS,
    QUEUE_LIMITS,
    is_parked,
    names_of,
    parked_key,
    partition_held,
    partitions_of,
    queue_held,
    queue_limit_stats,
    read_limited,
)
from tidemill.brokers.lmdb.engine.environment import make_copy
from tidemill.brokers.lmdb.engine.store import Store, StoreTime
from tidemill.brokers.lmdb.layout import (
    LEASE_KEY,
    LEASE_VALUE,
    MICRO,
    NUMBER,
    READY_KEY,
    Row,
    Tables,
)
from tidemill.brokers.lmdb.look.search import Finding, first_ids, queue_rows
from tidemill.brokers.lmdb.owner_table import name_of
from tidemill.brokers.lmdb.put.workflows import counts_of
from tidemill.brokers.lmdb.record import READY, STATES, Flag, Header, Stored, notes_of
from tidemill.brokers.lmdb.transitions import departure_in
from tidemill.core.envelope import decode_envelope, decode_listed
from tidemill.core.job import Record, State, whole_progress
from tidemill.errors import InvalidOption
from tidemill.limits.arithmetic import Held, LimitStats, first_closed

_SCAN = 2000  # jobs that one read transaction looks at: a long one makes the file grow, for good
_BEHIND_LINE = READY_KEY.size - 4  # the bytes of a ready key behind its line
_RANKS_MOST = 256  # the most priorities among which the oldest job is sought; tasks have 201
_PARKED_MOST = 1000  # the most keys of limits, each with its priorities, that a look goes through
_ID_MOST = 500  # the most bytes of an id; LMDB refuses to look for longer keys


class Inspector:
    def __init__(self, store: Store, time: StoreTime, url: str) -> None:
        self._store = store
        self._time = time
        self._url = url

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        with self._store.reading_txn() as txn:
            holders = Holders(txn, self._store.tables)
            return [self._record(txn, job_id.encode(), holders) for job_id in ids]

    def _record(
        self, txn: lmdb.Transaction[bytes], job_id: bytes, holders: Holders
    ) -> Record | None:
        if not 0 < len(job_id) < _ID_MOST:
            return None
        data = txn.get(job_id, db=self._store.tables.job)
        return self._shown(txn, Stored(job_id, data), holders) if data else None

    def _shown(
        self,
        txn: lmdb.Transaction[bytes],
        stored: Stored,
        holders: Holders,
        views: lmdb.Transaction[Any] | None = None,
    ) -> Record:
        """The record of a stored job; with ``views`` the record for a list."""
        head, listed = stored.head, views is not None
        tail = stored.tail_without_result if listed else stored.tail
        record = Record(
            envelope=(decode_listed if listed else decode_envelope)(stored.envelope),
            listed=listed,
            state=STATES[head.state],
            seq=head.seq,
            rank=head.rank,
            max_attempts=head.limit,
            attempt=head.attempt,
            losses=head.losses,
            due=self._due(head),
            expires=self._time.on_wall(head.expires) if head.expires else 0.0,
            finished=head.finished / MICRO,
            raw_result=tail.result,
            error=tail.error,
            cancelling=bool(head.flags & Flag.CANCELLING),
            attempts=tail.attempts,
        )
        if record.state is State.READY and not self._is_ready(txn, stored):
            record.state = State.RUNNING
            lease = holders.lease(stored.id)
            record.worker, record.leased, record.token = lease.owner, lease.leased, lease.token
            record.lease_ends = self._time.on_wall(lease.deadline) if lease.deadline else 0.0
        if head.flags & Flag.LINKED:
            record.pending, record.failures = counts_of(txn, self._store.tables, stored.id)
        if head.flags & Flag.NOTED:
            data = (views or txn).get(stored.id, db=self._store.tables.note)
            if data:
                notes = notes_of(data, listed=listed)
                record.log, record.progress_text = notes.log, notes.text
                record.progress = whole_progress(*notes.progress) if notes.progress else None
        return record

    def _is_ready(self, txn: lmdb.Transaction[bytes], stored: Stored) -> bool:
        """True when a job with a ready header is on a line: the job does not run."""
        if stored.head.flags & Flag.LIMITED:
            return is_parked(txn, self._store.tables, stored)
        return txn.get(stored.head.ready_key, db=self._store.tables.ready) is not None

    def _due(self, head: Header) -> float:
        if not head.due:
            return 0.0
        return head.due / MICRO if head.flags & Flag.WALL else self._time.on_wall(head.due)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """The jobs that match, newest first, by number."""
        found = list[Record]()
        with self._store.reading_views() as (txn, views):
            finding = Finding(self._store, txn, views, what, cursor)
        total = 0
        while len(found) < limit and total < what.look_most:
            with self._store.reading_views() as (txn, views):
                holders = Holders(txn, self._store.tables)
                looked = 0
                for job_id, data in finding.rows(txn, views, _SCAN):
                    looked += 1
                    if data:
                        record = self._shown(txn, Stored(job_id, data), holders, views)
                        if matches(record, what):
                            found.append(record)
                            if len(found) >= limit:
                                break
                if not looked:
                    return Page(found)
                total += looked
        return Page(found, finding.cursor)

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        store, found = self._store, list[Record]()
        now, wall = self._time.micros()
        with store.reading_views() as (txn, views):
            data = txn.get(store.key("q/" + queue))
            if data is None:
                return found
            row, holders = Row.of(queue, data), Holders(txn, store.tables)
            for job_id in first_ids(txn, views, store.tables, row, state, wall - now):
                if len(found) >= count:
                    break
                data = views.get(job_id, db=store.tables.job)
                record = self._shown(txn, Stored(job_id, data), holders, views) if data else None
                if record is not None and record.state is state:
                    found.append(record)
        return found

    def stats(self) -> list[QueueStats]:
        with self._store.reading_txn() as txn:
            parked = self._parked(txn)
            rows = (row for row in queue_rows(self._store, txn) if row.is_listed)
            return [self._stats_of(txn, row, parked) for row in rows]

    def limits(self) -> list[LimitStats]:
        store, (now, _) = self._store, self._time.micros()
        with store.reading_txn() as txn:
            has_limit = [row for row in queue_rows(store, txn) if row.has_limit]
            limiters = [
                (row, read_limited(store, txn, QUEUE_LIMITS + row.name)) for row in has_limit
            ]
            shown = [queue_limit_stats(limited, row, now) for row, limited in limiters if limited]
            for name in names_of(store, txn, LIMITS):
                limited = read_limited(store, txn, LIMITS + name)
                assert limited is not None
                partitions = [partition for _, partition in partitions_of(txn, store.tables, name)]
                running = sum(partition.running for partition in partitions)
                shown.append(
                    LimitStats(
                        name=name,
                        terms=limited.terms,
                        declared=limited.declared,
                        by_hand=limited.by_hand,
                        running=running,
                        keys=len(partitions),
                    )
                )
        return shown

    def held(self, job_id: str) -> Held | None:
        """The limit that keeps a ready job waiting, or None."""
        store, (now, _) = self._store, self._time.micros()
        with store.reading_txn() as txn:
            data = txn.get(job_id.encode(), db=store.tables.job) if job_id else None
            stored = Stored(job_id.encode(), data) if data is not None else None
            if stored is None or stored.head.state != READY or not self._is_ready(txn, stored):
                return None
            limited = stored.head.flags & Flag.LIMITED
            held = partition_held(store, txn, stored, now) if limited else None
            name = txn.get(store.key(f"n/{stored.head.line >> 1}"))
            assert name is not None
            found = txn.get(store.key("q/" + name.decode()))
            assert found is not None
            row = Row.of(name.decode(), found)
            limiter = read_limited(store, txn, QUEUE_LIMITS + row.name) if row.has_limit else None
            of_queue = queue_held(limiter, row, now) if limiter else None
            return first_closed(each for each in (held, of_queue) if each is not None)

    def ahead(self, job_id: str, most: int) -> int:
        store = self._store
        with store.reading_txn() as txn:
            data = txn.get(job_id.encode(), db=store.tables.job) if job_id else None
            stored = Stored(job_id.encode(), data) if data is not None else None
            if stored is None or stored.head.state != READY or not self._is_ready(txn, stored):
                return 0
            table, place = store.tables.ready, stored.head.ready_key
            if stored.head.flags & Flag.LIMITED:
                table, place = store.tables.park, parked_key(txn, store.tables, stored)
            cursor = txn.cursor(table)
            cursor.set_range(place[:-_BEHIND_LINE])
            line = itertools.islice(cursor.iternext(values=False), most)
            return sum(1 for _ in itertools.takewhile(lambda key: key < place, line))

    def _stats_of(
        self, txn: lmdb.Transaction[bytes], row: Row, parked: Mapping[int, tuple[int, bytes]]
    ) -> QueueStats:
        names = set(QueueStats.__struct_fields__) - {"name", "paused", "oldest", "consumers"}
        values = {name: getattr(row, name) for name in names}
        oldest = self._oldest(txn, row, parked)
        return QueueStats(name=row.name, paused=bool(row.paused), oldest=oldest, **values)

    def _parked(self, txn: lmdb.Transaction[bytes]) -> dict[int, tuple[int, bytes]]:
        """The sequence and id of the oldest job of each line, among jobs under named limits."""
        cursor, oldest = txn.cursor(self._store.tables.park), dict[int, tuple[int, bytes]]()
        found = cursor.first()
        for _ in range(_PARKED_MOST if found else 0):
            key, value = cursor.item()
            line, rank, seq = READY_KEY.unpack_from(key, NUMBER.size)
            first = seq, value[COST.size :]
            oldest[line] = min(first, oldest.get(line, first))
            behind = READY_KEY.pack(line, rank, 2**64 - 1)
            if not cursor.set_range(key[: NUMBER.size] + behind):
                break
        return oldest

    def _oldest(
        self, txn: lmdb.Transaction[bytes], row: Row, parked: Mapping[int, tuple[int, bytes]]
    ) -> float:
        """The creation time of the oldest ready job, which is the first job of its priority."""
        lines, tables = (*row.lines, row.lost_line), self._store.tables
        firsts = [parked[line] for line in lines if line in parked]
        for line in lines if row.ready else ():
            firsts += _firsts(txn.cursor(tables.ready), line)
        if not firsts:
            return 0.0
        data = txn.get(min(firsts)[1], db=self._store.tables.job)
        assert data is not None
        return decode_envelope(Stored(b"", data).envelope).created

    def info(self) -> dict[str, Any]:
        env, store = self._store.env, self._store
        store.room.check_place()
        with store.reading_txn() as txn:
            jobs = txn.stat(store.tables.job)["entries"]
            departure = departure_in(store, txn)
        with store.translating():
            info, used = env.info(), store.room.used()
            shortage = store.room.shortage()
        path = store.environment.data
        return {
            "url": self._url,
            "broker": "lmdb",
            "folder": store.folder,
            "durable": store.environment.sync,
            "made": self._time.born,
            "jobs": jobs,
            "file_bytes": os.path.getsize(path),
            "used_bytes": used,
            "map_bytes": info["map_size"],
            "reserve_bytes": store.room.reserve(),
            "readers": info["num_readers"],
            "write_lock": store.environment.write_lock.state(),
            "commits": info["last_txnid"],
            "lmdb": ".".join(map(str, lmdb.version())),
            **({"moves_to": departure.where} if departure else {}),
            **({"puts_refused": shortage} if shortage else {}),
        }

    def backup(self, target: str) -> None:
        """A compacted copy that can be opened as a store."""
        copy = os.path.join(target, "data.mdb")
        if os.path.exists(copy):
            raise InvalidOption(f"{target} holds a store already; name an empty directory")
        fd = make_copy(copy, self._store.environment.data)
        try:
            with self._store.translating(), self._store.reading_txn():  # keep the map in place
                self._store.env.copyfd(fd, compact=True)
                os.fsync(fd)
        except BaseException:
            os.unlink(copy)
            raise
        finally:
            os.close(fd)


def _firsts(cursor: lmdb.Cursor[bytes], line: int) -> Iterator[tuple[int, bytes]]:
    """The sequence and value of the first entry of each priority in a line."""
    found = cursor.set_range(READY_KEY.pack(line, 0, 0))
    for _ in range(_RANKS_MOST):
        whose, rank, seq = READY_KEY.unpack(cursor.key()) if found else (-1, 0, 0)
        if whose != line:
            return
        yield seq, cursor.value()
        found = cursor.set_range(READY_KEY.pack(line, rank, 2**64 - 1))


class HeldLease(NamedTuple):
    """The lease of a running job: the owner's name, token, wall time of the lease, deadline."""

    owner: str
    token: int
    leased: float
    deadline: int


class Holders:
    """The holders of jobs; the first call finds all of them by one walk over the leases."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables) -> None:
        self._txn = txn
        self._tables = tables
        self._rows: dict[bytes, tuple[int, int, int, int]] | None = None

    def lease_of(self, job_id: bytes) -> tuple[int, int]:
        """(owner, token) of the lease of a running job."""
        owner, token, _, _ = self._find(job_id)
        return owner, token

    def lease(self, job_id: bytes) -> HeldLease:
        owner, token, leased, deadline = self._find(job_id)
        name = name_of(self._txn, self._tables, owner)
        return HeldLease(name, token, leased / MICRO, deadline)

    def _find(self, job_id: bytes) -> tuple[int, int, int, int]:
        if self._rows is None:
            self._rows = {}
            for key, value in self._txn.cursor(self._tables.lease):
                owner, token = LEASE_KEY.unpack(key)
                leased, deadline = LEASE_VALUE.unpack_from(value)[3:]
                self._rows[value[LEASE_VALUE.size :]] = owner, token, leased, deadline
        return self._rows[job_id]
