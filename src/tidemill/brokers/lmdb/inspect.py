"""Looking at jobs and acting on them by id: for people, handles and the command line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import lmdb
import msgspec

from tidemill.brokers.base import Filter, Page, QueueStats, matches
from tidemill.brokers.lmdb.layout import (
    DUE,
    DUE_JOB,
    LEASE_KEY,
    LEASE_VALUE,
    MICRO,
    NUMBER,
    READY,
    STATES,
    Flag,
    Header,
    Row,
)
from tidemill.brokers.lmdb.moves import NOTES, Moves, Stored
from tidemill.brokers.lmdb.store import Store
from tidemill.clock import wall_time
from tidemill.errors import InvalidOption
from tidemill.job import Command, Owner, Record, State, decode_envelope

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.broker import LmdbBroker

__all__ = ["Inspection"]

_OWNER = msgspec.msgpack.Decoder(Owner)
_ENCODE = msgspec.msgpack.Encoder().encode
_SCAN = 2000
"""Jobs looked at in one read transaction: a reader held long makes the file grow for good."""

_CANCELLED = STATES.index(State.CANCELLED)
_FINISHED_FROM = STATES.index(State.SUCCEEDED)


class Inspection:
    """Reads and acts on one store; ``broker`` lends its clock."""

    def __init__(self, store: Store, broker: LmdbBroker) -> None:
        self._store = store
        self._broker = broker

    # -- reading --------------------------------------------------------------------------------

    def owner_rows(self, txn: lmdb.Transaction[bytes]) -> list[tuple[int, Owner]]:
        """(number, owner) of every owner on the list, dead or alive."""
        cursor = txn.cursor(self._store.tables.owner)
        return [(NUMBER.unpack(key)[0], _OWNER.decode(value)) for key, value in cursor]

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        """Records of one moment."""
        with self._store.env.begin() as txn:
            leases = _Leases(self._store, txn)
            return [self._record(txn, job_id.encode(), leases) for job_id in ids]

    def _record(
        self, txn: lmdb.Transaction[bytes], job_id: bytes, leases: _Leases
    ) -> Record | None:
        data = txn.get(job_id, db=self._store.tables.job) if 0 < len(job_id) < 500 else None
        return self._shown(txn, Stored(job_id, data), leases) if data else None

    def _shown(self, txn: lmdb.Transaction[bytes], stored: Stored, leases: _Leases) -> Record:
        head, tail = stored.head, stored.tail
        record = Record(
            envelope=decode_envelope(stored.envelope),
            state=STATES[head.state],
            seq=head.seq,
            rank=head.rank,
            attempt=head.attempt,
            losses=head.losses,
            due=self._wall_of(head),
            expires=self._on_wall(head.expires) if head.expires else 0.0,
            finished=head.finished / MICRO,
            result=tail.result,
            error=tail.error,
            cancelling=bool(head.flags & Flag.CANCELLING),
            attempts=tail.attempts,
        )
        if record.state is State.READY:
            ready = READY.pack(head.line, head.rank, head.seq)
            if txn.get(ready, db=self._store.tables.ready) is None:
                record.state = State.RUNNING
                record.worker, record.leased = leases.holder(stored.id)
        if head.flags & Flag.NOTED:
            data = txn.get(stored.id, db=self._store.tables.note)
            if data:
                notes = NOTES.decode(data)
                record.progress, record.log = notes.progress, notes.log
        return record

    def _wall_of(self, head: Header) -> float:
        if not head.due:
            return 0.0
        return head.due / MICRO if head.flags & Flag.WALL else self._on_wall(head.due)

    def _on_wall(self, store_time: int) -> float:
        """A store time as wall time, as the two stand to each other now."""
        return store_time / MICRO - self._broker.now() + wall_time()

    def find(self, what: Filter, limit: int, cursor: str) -> Page:
        """Newest first. The cursor is the id to go on below."""
        found: list[Record] = []
        start = cursor.encode()
        while len(found) < limit:
            with self._store.env.begin() as txn:
                leases = _Leases(self._store, txn)
                for looked, (job_id, data) in enumerate(self._backwards(txn, start), 1):
                    start = job_id
                    record = self._shown(txn, Stored(job_id, data), leases)
                    if matches(record, what):
                        found.append(record)
                    if looked >= _SCAN or len(found) >= limit:
                        break
                else:
                    return Page(found)
        return Page(found, start.decode())

    def _backwards(
        self, txn: lmdb.Transaction[bytes], below: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        """(id, data) of jobs below an id, or from the last."""
        cursor = txn.cursor(self._store.tables.job)
        more = cursor.set_range(below) if below else False
        more = cursor.prev() if more else cursor.last()
        while more:
            yield cursor.item()
            more = cursor.prev()

    def stats(self) -> list[QueueStats]:
        """Every queue, by name."""
        rows = []
        with self._store.env.begin() as txn:
            cursor = txn.cursor()
            prefix = self._store.key("q/")
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                row = Row(cursor.key()[len(prefix) :].decode(), 0, cursor.value())
                names = set(QueueStats.__struct_fields__) - {"name", "paused", "oldest"}
                values = {name: getattr(row, name) for name in names}
                rows.append(
                    QueueStats(
                        name=row.name,
                        paused=bool(row.paused),
                        oldest=self._oldest(txn, row),
                        **values,
                    )
                )
                more = cursor.next()
        return rows

    def _oldest(self, txn: lmdb.Transaction[bytes], row: Row) -> float:
        """When the next job of the queue was made: the head of each line is close enough."""
        times = []
        cursor = txn.cursor(self._store.tables.ready)
        for line in (row.number * 2, row.number * 2 + 1):
            if cursor.set_range(READY.pack(line, 0, 0)) and READY.unpack(cursor.key())[0] == line:
                data = txn.get(cursor.value(), db=self._store.tables.job)
                if data:
                    times.append(decode_envelope(Stored(b"", data).envelope).created)
        return min(times, default=0.0)

    def info(self) -> dict[str, Any]:
        """Facts about the store."""
        env, store = self._store.env, self._store
        with env.begin() as txn:
            jobs = txn.stat(store.tables.job)["entries"]
        info = env.info()
        path = os.path.join(env.path(), "data.mdb") if os.path.isdir(env.path()) else env.path()
        return {
            "broker": "lmdb",
            "folder": store.folder,
            "durable": store.sync,
            "jobs": jobs,
            "file_bytes": os.path.getsize(path),
            "used_bytes": store.used_bytes(),
            "map_bytes": info["map_size"],
            "reserve_bytes": store.reserve(),
            "readers": info["num_readers"],
            "lmdb": ".".join(map(str, lmdb.version())),
        }

    def backup(self, target: str) -> None:
        """A compacted copy that can be opened as a store."""
        os.makedirs(target, exist_ok=True)
        if os.path.exists(os.path.join(target, "data.mdb")):
            raise InvalidOption(f"{target} holds a store already; name an empty directory")
        self._store.env.copy(target, compact=True)

    # -- acting, inside a commit ----------------------------------------------------------------

    def cancel(self, moves: Moves, ids: Sequence[str], *, terminate: bool) -> list[bool]:
        """Cancel jobs; running ones through their owners."""
        leases: _Leases | None = None
        done = []
        for job_id in ids:
            stored = moves.load(job_id.encode()) if job_id else None
            if stored is None or stored.head.state >= _FINISHED_FROM:
                done.append(False)
                continue
            if moves.is_running(stored):
                leases = leases or _Leases(self._store, moves.txn)
                stored.head.flags |= Flag.CANCELLING
                moves.save(stored)
                owner, token = leases.of(stored.id)
                self._send(moves, owner, Command("terminate" if terminate else "cancel", token))
            else:
                moves.unplace(stored)
                moves.end(stored, _CANCELLED, stored.tail, "cancelled before it started")
            done.append(True)
        return done

    def _send(self, moves: Moves, owner: int, command: Command) -> None:
        key = NUMBER.pack(owner) + NUMBER.pack(moves.next_number())
        moves.txn.put(key, _ENCODE(command), db=moves.t.cmd)
        self._store.bells.ring_owner(owner)

    def command(self, moves: Moves, owner_id: str, command: Command) -> bool:
        """Leave a command for an owner."""
        for number, owner in self.owner_rows(moves.txn):
            if owner.id == owner_id:
                self._send(moves, number, command)
                return True
        return False

    def kick(self, moves: Moves, ids: Sequence[str]) -> list[bool]:
        """Make jobs ready again."""
        return [
            self._kick(moves, moves.load(job_id.encode()) if job_id else None) for job_id in ids
        ]

    @staticmethod
    def _kick(moves: Moves, stored: Stored | None) -> bool:
        if stored is None:
            return False
        head, state = stored.head, STATES[stored.head.state]
        if state is State.SCHEDULED:
            moves.unplace(stored)
            moves.place(stored, 0, 0)
            return True
        if state not in (State.FAILED, State.CANCELLED, State.EXPIRED):
            return False
        envelope = decode_envelope(stored.envelope)
        if envelope.key:
            key = envelope.key.encode()
            if moves.txn.get(key, db=moves.t.key) is not None:
                return False  # at most one unfinished job per key
            moves.txn.put(key, stored.id + b"\0", db=moves.t.key)
        moves.unfinish(stored)
        policy = envelope.retries.max_attempts
        head.limit = head.attempt + policy if policy else 0
        head.losses, head.finished, head.prune, head.expires = 0, 0, 0, 0
        head.flags &= ~Flag.CANCELLING
        tail = stored.tail
        tail.error, tail.result = "", b""
        moves.place(stored, 0, 0, tail)
        return True

    def delete(self, moves: Moves, ids: Sequence[str]) -> list[bool]:
        """Forget jobs in any state."""
        return [
            self._delete(moves, moves.load(job_id.encode()) if job_id else None) for job_id in ids
        ]

    def _delete(self, moves: Moves, stored: Stored | None) -> bool:
        if stored is None:
            return False
        if stored.head.state >= _FINISHED_FROM:
            moves.unfinish(stored)
            moves.forget(stored)
            return True
        if moves.is_running(stored):
            owner, token = _Leases(self._store, moves.txn).of(stored.id)
            moves.drop_lease(owner, token, stored)
        else:
            moves.unplace(stored)
        moves.vanish(stored)
        return True

    def purge(self, moves: Moves, queue: str, most: int) -> int:
        """Delete up to ``most`` jobs that wait in a queue."""
        row = moves.existing_row(queue)
        if row is None:
            return 0
        lines = (row.number * 2, row.number * 2 + 1)
        cursor = moves.txn.cursor(moves.t.ready)
        ids: list[bytes] = []
        for line in lines:
            found = cursor.set_range(READY.pack(line, 0, 0))
            while found and READY.unpack(cursor.key())[0] == line and len(ids) < most:
                ids.append(cursor.value())
                found = cursor.next()
        if len(ids) < most and row.scheduled + row.waiting:
            ids += self._unready(moves, lines, most - len(ids))
        return sum(self._delete(moves, moves.load(job_id)) for job_id in ids)

    @staticmethod
    def _unready(moves: Moves, lines: Sequence[int], most: int) -> list[bytes]:
        """Scheduled jobs of some lines, found by their due time, and waiting ones, by their key."""
        ids: list[bytes] = []
        for key, job_id in moves.txn.cursor(moves.t.due):
            if DUE.unpack(key)[2] == DUE_JOB:
                ids.append(job_id)
        for _, holders in moves.txn.cursor(moves.t.key):
            successor = holders.partition(b"\0")[2]
            if successor:
                ids.append(successor)
        jobs = ((job_id, moves.load(job_id)) for job_id in ids)
        mine = (job_id for job_id, stored in jobs if stored and stored.head.line in lines)
        return list(itertools.islice(mine, most))


class _Leases:
    """Who has which job: made by one walk over the leases, at the first question."""

    def __init__(self, store: Store, txn: lmdb.Transaction[bytes]) -> None:
        self._store = store
        self._txn = txn
        self._rows: dict[bytes, tuple[int, int, int]] | None = None

    def of(self, job_id: bytes) -> tuple[int, int]:
        """(owner, token) of the lease of a running job."""
        owner, token, _ = self._find(job_id)
        return owner, token

    def holder(self, job_id: bytes) -> tuple[str, float]:
        """(name of the owner, wall time of the lease) of a running job."""
        owner, _, leased = self._find(job_id)
        data = self._txn.get(NUMBER.pack(owner), db=self._store.tables.owner)
        return (_OWNER.decode(data).name if data else ""), leased / MICRO

    def _find(self, job_id: bytes) -> tuple[int, int, int]:
        if self._rows is None:
            self._rows = {}
            for key, value in self._txn.cursor(self._store.tables.lease):
                owner, token = LEASE_KEY.unpack(key)
                leased = LEASE_VALUE.unpack_from(value)[3]
                self._rows[value[LEASE_VALUE.size :]] = owner, token, leased
        return self._rows[job_id]
