"""The layout of the LMDB environment. Keys are big-endian: their byte order is number order.

    main   format · clock · counters (sequence, queue, owner and given numbers) · one row per queue
           · rows of history (look/history.py)
    job    id → header, envelope, tail        see record.py
    ready  line·rank·seq → id                 line is twice the queue's number, +1 for messages;
                                              the top bit marks tasks that must run alone; of a
                                              partition, only the next job is here
    lease  owner·token → ready key, leased, deadline, id
    due    clock·time·kind·number → reference clock 0 is the store's time, 1 wall time; 2 is for
                                              held keys, 3 for unused partitions:
                                              nobody is woken for clocks 2 and 3
    key    key → its holder and successor     see put/unique.py
    fin    class·prune time·seq → finished, id
    owner  number → record
    cmd    owner·number → command
    wait   id of a child → numbers of its parents that have not ended, and that did not succeed
    note   id → progress and log of a job that reported any
    partition   limit·0·key → record of one key of a limit; see claim/limits.py
    park   partition·line·rank·seq → cost, id      the ready jobs of a partition
    schedule  n·name → record; d·clock·time·version → name, in the order they come due
    said   o·owner → last reply to a remote owner; n·time·nonce → the answer to a put;
                                              i: ids out of order, see look/search.py

A lease does not rewrite the header of its job, which still says ready. A job runs if it has a lease
and no entry in the ready table. Times are microseconds as unsigned 64-bit integers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import struct
from collections.abc import Iterator
from typing import NamedTuple

import lmdb

from tidemill.brokers.contract.history_rows import QUEUE_TOTALS
from tidemill.core.clock import id_floor

FORMAT = 1  # the format number; it grows when an older tidemill can no longer read new data

MICRO = 1_000_000

NUMBER = struct.Struct(">Q")
READY_KEY = struct.Struct(">IIQ")  # line, rank, sequence
LOST = 1 << 31  # the bit that marks the line of a queue's tasks whose worker died
LEASE_KEY = struct.Struct(">QQ")  # owner, token
LEASE_VALUE = struct.Struct(">IIQQQ")  # ready key, leased (wall), deadline (store, 0 none); then id
DUE_KEY = struct.Struct(">BQBQ")  # clock, time, kind, number
DUE_JOB, DUE_EXPIRY, DUE_LEASE, DUE_HELD, DUE_LIMITER = range(5)
DUE_PARTITION, DUE_FALL = range(5, 7)
HELD, UNUSED = 2, 3  # the clocks of entries that wake nobody when they come due
FIN_KEY = struct.Struct(">BQQ")  # class, prune time, seq
_ROW = struct.Struct(">IBI4Q7QBB")  # the fields of ``Row`` from number to forgotten


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """One queue: settings, jobs by state, totals. Every transaction keeps the counts exact."""

    # ``ready`` counts the jobs on its lines, ``running`` the leased jobs. ``dirty`` tells that the
    # commit has to write the row. Each job changes a row, so its attributes are plain slots.

    name: str
    number: int
    paused: int = 0
    max_size: int = 0
    waiting: int = 0
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    accepted: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    expired: int = 0
    purged: int = 0
    has_limit: int = 0
    forgotten: int = 0
    dirty: bool = False

    @classmethod
    def of(cls, name: str, data: bytes) -> Row:
        return cls(name, *_ROW.unpack(data))

    @property
    def lines(self) -> tuple[int, int]:
        """The line of its tasks, and the line of its messages."""
        return self.number * 2, self.number * 2 + 1

    @property
    def lost_line(self) -> int:
        """The line of the tasks that must run alone."""
        return self.number * 2 | LOST

    @property
    def size(self) -> int:
        """The number of unfinished jobs."""
        return self.waiting + self.scheduled + self.ready + self.running

    @property
    def is_listed(self) -> bool:
        """False for a queue that was forgotten and not used again."""
        used = (self.size, self.paused, self.max_size, *(getattr(self, n) for n in QUEUE_TOTALS))
        return not self.forgotten or any(used)

    def forget(self) -> None:
        """Reset the totals and settings; keep the queue's number, which other records use."""
        for total in QUEUE_TOTALS:
            setattr(self, total, 0)
        self.paused = self.max_size = 0
        self.forgotten, self.dirty = 1, True

    def pack(self) -> bytes:
        return _ROW.pack(*_STORED(self))


_STORED = operator.attrgetter(*[field.name for field in dataclasses.fields(Row)[1:-1]])


class Tables(NamedTuple):
    """The named databases of one environment."""

    job: lmdb._Database
    ready: lmdb._Database
    lease: lmdb._Database
    due: lmdb._Database
    key: lmdb._Database
    fin: lmdb._Database
    owner: lmdb._Database
    cmd: lmdb._Database
    wait: lmdb._Database
    note: lmdb._Database
    partition: lmdb._Database
    park: lmdb._Database
    schedule: lmdb._Database
    said: lmdb._Database


_NAMES = [name.encode() for name in Tables._fields]


def open_tables(env: lmdb.Environment, prefix: bytes) -> Tables:
    """Open the named databases of an environment that is open for reading only."""
    names = [prefix + name for name in _NAMES]
    return Tables(*(env.open_db(name, create=False) for name in names))


def make_tables(env: lmdb.Environment, txn: lmdb.Transaction[bytes], prefix: bytes) -> Tables:
    """Open the named databases in a write transaction, and make the missing ones."""
    # The driver keeps only handles that were opened in a write transaction. Without this function,
    # the driver would begin a write transaction for each table, and hold the interpreter lock while
    # it waits for other processes.
    return Tables(*(env.open_db(prefix + name, txn=txn) for name in _NAMES))


def rows_of(
    txn: lmdb.Transaction[bytes], table: lmdb._Database | None, prefix: bytes, first: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """The keys with a prefix, in order, with their values; ``first`` is the least of these keys."""
    # Without a table, the keys of the main database.
    cursor = txn.cursor(table)
    found = cursor.set_range(first or prefix)
    while found and cursor.key().startswith(prefix):
        yield cursor.item()
        found = cursor.next()


def tokens_of(txn: lmdb.Transaction[bytes], tables: Tables, owner: int, told: int = 0) -> list[int]:
    """The tokens of an owner's leases that are higher than ``told``."""
    rows = rows_of(txn, tables.lease, NUMBER.pack(owner), LEASE_KEY.pack(owner, told + 1))
    return [LEASE_KEY.unpack(key)[1] for key, _ in rows]


_AHEAD, _BEHIND = 1, 86_400  # seconds that an id in order may differ from the clock


@functools.lru_cache(2)
def ids_about(second: int) -> tuple[bytes, bytes]:
    """The bounds of ids that are made at about this second."""
    return id_floor(second - _BEHIND), id_floor(second + _AHEAD)
