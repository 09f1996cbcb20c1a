"""The moves of a job, inside one write transaction. Every change of state is in this file.

A :class:`Moves` is the context of one commit: it reads each queue's row once, counts, and writes
the rows, the sequence and the hints when it finishes. Its methods raise only before they have
written anything, or leave the transaction to be abandoned.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence

import lmdb
import msgspec

from tidemill.brokers.base import DEFAULT_TTR, KEEP_ATTEMPTS, Mode, Retention, Want
from tidemill.brokers.lmdb.layout import (
    DUE,
    DUE_EXPIRY,
    DUE_JOB,
    DUE_LEASE,
    FIN,
    HEADER,
    LEASE_KEY,
    LEASE_VALUE,
    MICRO,
    NUMBER,
    READY,
    Flag,
    Header,
    Row,
    Tail,
    decode_tail,
    encode_tail,
)
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.wake import MESSAGES, RESULT, SPACE, TASKS, bloom
from tidemill.errors import DuplicateJob, QueueFull
from tidemill.job import (
    Attempt,
    Conflict,
    Envelope,
    Lease,
    Note,
    Outcome,
    Placed,
    Put,
    Verdict,
    encode_envelope,
)

__all__ = ["NOTES", "Moves", "Notes", "Stored"]

_HEAD = HEADER.size
_WAITING, _SCHEDULED, _READY, _RUNNING, _SUCCEEDED, _FAILED, _CANCELLED, _EXPIRED = range(8)
_END = {
    Outcome.SUCCESS: _SUCCEEDED,
    Outcome.FAIL: _FAILED,
    Outcome.CANCELLED: _CANCELLED,
    Outcome.EXPIRED: _EXPIRED,
}
_SUCCESS, _RETRY = int(Outcome.SUCCESS), int(Outcome.RETRY)
_BACK = (int(Outcome.RELEASE), int(Outcome.SNOOZE))
_COUNTED = (
    "waiting",
    "scheduled",
    "ready",
    "running",
    "succeeded",
    "failed",
    "cancelled",
    "expired",
)
_PROMOTE_MOST = 5000
_OVERHEAD = 400  # bytes a job takes up besides its body, about
_NEVER = float("inf")
CLASS_NONE, CLASS_RESULT, CLASS_OTHER = range(3)


class Stored:
    """One job read for a change: header and the bytes of envelope and tail behind it."""

    __slots__ = ("data", "head", "id")

    def __init__(self, job_id: bytes, data: bytes) -> None:
        self.id = job_id
        self.data = data
        self.head = Header(*HEADER.unpack_from(data))

    @property
    def envelope(self) -> bytes:
        """The envelope, encoded."""
        return self.data[_HEAD : _HEAD + self.head.size]

    @property
    def tail(self) -> Tail:
        """What has happened to the job so far."""
        rest = self.data[_HEAD + self.head.size :]
        return decode_tail(rest) if rest else Tail()


class Moves:
    """One commit's context."""

    def __init__(
        self, store: Store, txn: lmdb.Transaction[bytes], now: int, wall: int, retention: Retention
    ) -> None:
        self.store = store
        self.txn = txn
        self.t = store.tables
        self.now = now  # the store's time, microseconds
        self.wall = wall  # wall time, microseconds
        self.retention = retention
        self.rows: dict[str, Row] = {}
        self.lines: dict[int, Row] = {}
        self._seq_key = store.key("seq")
        self._seq = self._first_seq = self._read_number(self._seq_key)
        self._kept: list[int] | None = None
        self.last_queue = 0  # that a fair want was served from
        self._rings: dict[tuple[str, int], int] = {}
        self._finished: list[bytes] = []
        self._shrunk: set[str] = set()

    # -- rows and numbers -----------------------------------------------------------------------

    def _read_number(self, key: bytes) -> int:
        data = self.txn.get(key)
        return NUMBER.unpack(data)[0] if data else 0

    def next_number(self) -> int:
        """The next of the store's sequence: jobs and tokens are numbered from the same one."""
        self._seq += 1
        return self._seq

    def row(self, name: str) -> Row:
        """A queue's row; a new queue gets the next number."""
        row = self.rows.get(name)
        if row is None:
            data = self.txn.get(self.store.key("q/" + name))
            number = 0
            if data is None:
                count_key = self.store.key("queues")
                number = self._read_number(count_key) + 1
                self.txn.put(count_key, NUMBER.pack(number))
                self.txn.put(self.store.key(f"n/{number}"), name.encode())
            row = self.rows[name] = Row(name, number, data)
            self.lines[row.number] = row
        return row

    def row_of(self, line: int) -> Row:
        """The row of the queue a line belongs to."""
        row = self.lines.get(line >> 1)
        if row is None:
            name = self.txn.get(self.store.key(f"n/{line >> 1}"))
            assert name is not None
            row = self.row(name.decode())
        return row

    def existing_row(self, name: str) -> Row | None:
        """A queue's row, or None when nothing was ever put there."""
        if name in self.rows or self.txn.get(self.store.key("q/" + name)):
            return self.row(name)
        return None

    def _count(self, row: Row, state: int, by: int) -> None:
        name = _COUNTED[state]
        setattr(row, name, getattr(row, name) + by)
        row.dirty = True

    # -- putting --------------------------------------------------------------------------------

    def put(self, jobs: Sequence[Envelope]) -> list[Put]:
        """Accept jobs, all or none."""
        self.store.check_space(sum([_OVERHEAD + len(job.body) for job in jobs]))
        # Only a key or a bound can refuse for the sake of a job whose time has passed.
        if any([job.key or self.row(job.queue).max_size for job in jobs]) and self.next_due() <= 0:
            self.come_due()
        return [self._put_one(job) for job in jobs]

    def follow(self, jobs: Sequence[Envelope]) -> None:
        """Puts that must not fail, since settling must not: no limit holds, a taken id is kept."""
        for job in jobs:
            if self.txn.get(job.id.encode(), db=self.t.job) is None:
                with contextlib.suppress(
                    DuplicateJob
                ):  # the key rejects it; nothing was written yet
                    self._put_one(job, limited=False)

    def _put_one(self, job: Envelope, *, limited: bool = True) -> Put:
        if job.key:
            holder = self.txn.get(job.key.encode(), db=self.t.key)
            if holder is not None:
                return self._put_beside(job, holder, limited=limited)
            self._insert(job, _READY, limited=limited)
            self.txn.put(job.key.encode(), job.id.encode() + b"\0", db=self.t.key)
        else:
            self._insert(job, _READY, limited=limited)
        return Put(job.id, Placed.CREATED)

    def _put_beside(self, job: Envelope, holders: bytes, *, limited: bool) -> Put:
        """An unfinished job has the key already."""
        holder, _, successor = holders.partition(b"\0")
        current = self.load(holder)
        assert current is not None
        if job.on_conflict == Conflict.REJECT:
            raise DuplicateJob(f"an unfinished job has the key {job.key!r} already", job.id)
        if self.txn.get(job.id.encode(), db=self.t.job) is not None:
            raise DuplicateJob(f"a job with the id {job.id!r} is kept already", job.id)
        running = self.is_running(current)
        if job.on_conflict == Conflict.MERGE and not running:
            self._merge(current, job)
            return Put(holder.decode(), Placed.MERGED)
        if job.on_conflict != Conflict.REPLACE:
            return Put(holder.decode(), Placed.KEPT)
        if successor:
            self._displace(self.load(successor), job)
        key, new = job.key.encode(), job.id.encode()
        if running:
            self._insert(job, _WAITING, limited=limited)
            self.txn.put(key, holder + b"\0" + new, db=self.t.key)
            return Put(job.id, Placed.SUCCESSOR)
        self._displace(current, job)
        self._insert(job, _READY, limited=limited)
        self.txn.put(key, new + b"\0", db=self.t.key)
        return Put(job.id, Placed.REPLACED)

    def _displace(self, stored: Stored | None, by: Envelope) -> None:
        """Cancel a job whose key goes to another."""
        assert stored is not None
        self.unplace(stored)
        self.end(stored, _CANCELLED, stored.tail, f"replaced by {by.id}", promote=False)

    def _insert(self, job: Envelope, state: int, *, limited: bool = True) -> None:
        row = self.row(job.queue)
        if row.max_size and row.size >= row.max_size and limited:
            if self.txn.get(job.id.encode(), db=self.t.job) is not None:
                raise DuplicateJob(f"a job with the id {job.id!r} is kept already", job.id)
            raise QueueFull(f"queue {job.queue!r} holds max_size={row.max_size} jobs already")
        flags, due = 0, 0
        if job.delay > 0:
            due = self.now + int(job.delay * MICRO)
        elif job.at > 0:
            due, flags = int(job.at * MICRO), Flag.WALL
        line = row.number * 2
        if not job.task:
            line += 1
            flags |= Flag.MESSAGE
        if job.key:
            flags |= Flag.KEYED
        if job.result_ttl >= 0:
            flags |= Flag.RESULT_TTL
        seq = self.next_number()
        job_id = job.id.encode()
        expires = self.now + int(job.expires * MICRO) if job.expires else 0
        if expires:
            self.txn.put(DUE.pack(0, expires, DUE_EXPIRY, seq), job_id, db=self.t.due)
        if state == _READY and due > (self.wall if flags & Flag.WALL else self.now):
            state = _SCHEDULED
        envelope = encode_envelope(job)
        header = HEADER.pack(
            state,
            flags,
            0,
            0,
            job.retries.limit + 1,
            job.rank,
            line,
            seq,
            due,
            expires,
            0,
            0,
            job.ttr,
            job.timeout,
            len(envelope),
        )
        if not self.txn.put(job_id, header + envelope, overwrite=False, db=self.t.job):
            raise DuplicateJob(f"a job with the id {job.id!r} is kept already", job.id)
        row.accepted += 1
        if state == _READY:
            self.txn.put(READY.pack(line, job.rank, seq), job_id, db=self.t.ready)
            row.ready += 1
            row.dirty = True
            ring = row.name, line & 1
            self._rings[ring] = self._rings.get(ring, 0) + 1
        else:
            if state == _SCHEDULED:
                clock = 1 if flags & Flag.WALL else 0
                self.txn.put(DUE.pack(clock, due, DUE_JOB, seq), job_id, db=self.t.due)
            self._count(row, state, +1)

    def _merge(self, stored: Stored, job: Envelope) -> None:
        """pyspider's rule: the higher priority and the earlier time win, the data stay."""
        head = stored.head
        rank = min(head.rank, job.rank)
        due, flags = head.due, head.flags & Flag.WALL
        if head.state == _SCHEDULED:
            mine, wall = 0, 0
            if job.delay > 0:
                mine = self.now + int(job.delay * MICRO)
            elif job.at > 0:
                mine, wall = int(job.at * MICRO), Flag.WALL
            if self._left(mine, wall) < self._left(due, flags):
                due, flags = mine, wall
        self.unplace(stored)
        head.rank = rank
        self.place(stored, due, flags)

    def _left(self, due: int, wall: int) -> int:
        """Microseconds until a due time; 0 or less when it has come."""
        return due - (self.wall if wall else self.now) if due else 0

    # -- moving ---------------------------------------------------------------------------------

    def load(self, job_id: bytes) -> Stored | None:
        """A job for a change, or None."""
        data = self.txn.get(job_id, db=self.t.job)
        return Stored(job_id, data) if data is not None else None

    def save(self, stored: Stored, tail: Tail | None = None) -> None:
        """Write header and envelope back, with the tail given, or the one that is there."""
        size = _HEAD + stored.head.size
        rest = stored.data[size:] if tail is None else encode_tail(tail)
        self.txn.put(stored.id, stored.head.pack() + stored.data[_HEAD:size] + rest, db=self.t.job)

    def is_running(self, stored: Stored) -> bool:
        """True when the header says ready and the ready entry is gone: a lease stands for it."""
        head = stored.head
        return head.state == _READY and (
            self.txn.get(READY.pack(head.line, head.rank, head.seq), db=self.t.ready) is None
        )

    def unplace(self, stored: Stored) -> None:
        """Take a job that does not run out of ready, due and its count."""
        head = stored.head
        if head.state == _READY:
            self.txn.delete(READY.pack(head.line, head.rank, head.seq), db=self.t.ready)
        elif head.state == _SCHEDULED:
            clock = 1 if head.flags & Flag.WALL else 0
            self.txn.delete(DUE.pack(clock, head.due, DUE_JOB, head.seq), db=self.t.due)
        self._count(self.row_of(head.line), head.state, -1)

    def place(self, stored: Stored, due: int, wall: int, tail: Tail | None = None) -> None:
        """Put a job that is nowhere into scheduled or ready, by its due time, and save it."""
        head = stored.head
        row = self.row_of(head.line)
        head.due = due
        head.flags = head.flags & ~Flag.WALL | wall
        if self._left(due, wall) > 0:
            head.state = _SCHEDULED
            self.txn.put(
                DUE.pack(1 if wall else 0, due, DUE_JOB, head.seq), stored.id, db=self.t.due
            )
        else:
            head.state = _READY
            self.txn.put(READY.pack(head.line, head.rank, head.seq), stored.id, db=self.t.ready)
            ring = row.name, head.line & 1
            self._rings[ring] = self._rings.get(ring, 0) + 1
        self._count(row, head.state, +1)
        self.save(stored, tail)

    def end(
        self, stored: Stored, state: int, tail: Tail, error: str = "", *, promote: bool = True
    ) -> None:
        """Finish a job that is nowhere: kept for a while, or forgotten when an acked message."""
        head = stored.head
        row = self.row_of(head.line)
        if head.expires:
            self.txn.delete(DUE.pack(0, head.expires, DUE_EXPIRY, head.seq), db=self.t.due)
        if head.flags & Flag.KEYED and promote:
            self.promote_successor(stored)
        self._count(row, state, +1)
        self._finished.append(stored.id)
        if row.max_size:
            self._shrunk.add(row.name)
        if state == _SUCCEEDED and head.flags & Flag.MESSAGE:
            self.forget(stored)
            return
        head.state = state
        head.finished = self.wall
        if error or state != _SUCCEEDED:
            tail.error = error
        kept = CLASS_OTHER if state != _SUCCEEDED else CLASS_RESULT if tail.result else CLASS_NONE
        head.prune = self.now + int(self._keep_for(stored, state, kept) * MICRO)
        self.save(stored, tail)
        self.txn.put(
            FIN.pack(kept, head.prune, head.seq), NUMBER.pack(self.now) + stored.id, db=self.t.fin
        )
        self.kept[kept] += 1

    def _keep_for(self, stored: Stored, state: int, kept: int) -> float:
        if state != _SUCCEEDED:
            return self.retention.failed
        given = stored.head.flags & Flag.RESULT_TTL
        result_ttl = _PART.decode(stored.envelope).result_ttl if given else -1.0
        return self.retention.of_success(result_ttl, kept == CLASS_RESULT)

    def forget(self, stored: Stored) -> None:
        """Remove the record."""
        self.txn.delete(stored.id, db=self.t.job)
        if stored.head.flags & Flag.NOTED:
            self.txn.delete(stored.id, db=self.t.note)

    def unfinish(self, stored: Stored) -> None:
        """Take a finished job off the list of what is to be pruned."""
        kept = self._class_of(stored)
        head = stored.head
        if self.txn.delete(FIN.pack(kept, head.prune, head.seq), db=self.t.fin):
            self.kept[kept] -= 1

    @staticmethod
    def _class_of(stored: Stored) -> int:
        if stored.head.state != _SUCCEEDED:
            return CLASS_OTHER
        return CLASS_RESULT if stored.tail.result else CLASS_NONE

    def promote_successor(self, stored: Stored) -> None:
        """Give up the key; who waited for it takes it over."""
        key = _PART.decode(stored.envelope).key.encode()
        holders = self.txn.get(key, db=self.t.key)
        if holders is None:
            return
        holder, _, successor = holders.partition(b"\0")
        if stored.id == successor:
            self.txn.put(key, holder + b"\0", db=self.t.key)
        elif stored.id == holder and not successor:
            self.txn.delete(key, db=self.t.key)
        elif stored.id == holder:
            self.txn.put(key, successor + b"\0", db=self.t.key)
            waiting = self.load(successor)
            assert waiting is not None
            self.unplace(waiting)
            self.place(waiting, waiting.head.due, waiting.head.flags & Flag.WALL)

    # -- leasing --------------------------------------------------------------------------------

    def lease(self, owner: int, want: Want, last: int, *, deadlines: bool) -> list[Lease]:
        """Hand out up to ``want.count`` jobs; a fair want begins after the queue ``last``."""
        leases: list[Lease] = []
        queues = self._wanted_lines(want)
        if want.mode is Mode.MERGED:
            queues = [[line for lines in queues for line in lines]]
        if want.mode is Mode.FAIR:
            queues.sort(key=lambda lines: (lines[0] >> 1 <= last, lines[0]))
            self._lease_fairly(owner, want.count, queues, leases, deadlines=deadlines)
        else:
            for lines in queues:
                self._lease_lines(
                    owner, lines, want.count - len(leases), leases, deadlines=deadlines
                )
        return leases

    def _lease_fairly(
        self,
        owner: int,
        count: int,
        queues: list[list[int]],
        leases: list[Lease],
        *,
        deadlines: bool,
    ) -> None:
        """Every queue its share, until the hand is full or nothing is left."""
        while queues and len(leases) < count:
            share = max(1, (count - len(leases)) // len(queues))
            for lines in list(queues):
                few = min(share, count - len(leases))
                if few <= 0:
                    return
                before = len(leases)
                self._lease_lines(owner, lines, few, leases, deadlines=deadlines)
                self.last_queue = lines[0] >> 1
                if len(leases) - before < few:
                    queues.remove(lines)

    def _lease_lines(
        self, owner: int, lines: list[int], count: int, leases: list[Lease], *, deadlines: bool
    ) -> None:
        """Take from several lines as if they were one."""
        if len(lines) == 1:
            self._lease_line(owner, lines[0], count, leases, deadlines=deadlines)
            return
        full = len(leases) + count
        while len(leases) < full and (line := self._best_line(lines)) is not None:
            self._lease_line(owner, line, 1, leases, deadlines=deadlines)

    def _wanted_lines(self, want: Want) -> list[list[int]]:
        """By queue: the lines that may be served and have something ready."""
        kinds = [kind for kind, asked in ((0, want.tasks), (1, want.messages)) if asked]
        queues: dict[int, list[int]] = {}
        if want.queues:
            for name in want.queues:
                row = self.existing_row(name)
                if row and row.ready and not row.paused:
                    queues[row.number] = [row.number * 2 + kind for kind in kinds]
        else:
            for line in self._ready_lines():
                if line & 1 in kinds and not self.row_of(line).paused:
                    queues.setdefault(line >> 1, []).append(line)
        return list(queues.values())

    def _ready_lines(self) -> Iterator[int]:
        """Hop over the ready table from line to line."""
        cursor = self.txn.cursor(self.t.ready)
        found = cursor.first()
        while found:
            line = READY.unpack(cursor.key())[0]
            yield line
            found = cursor.set_range(READY.pack(line + 1, 0, 0))

    def _best_line(self, lines: list[int]) -> int | None:
        best = None
        cursor = self.txn.cursor(self.t.ready)
        for line in lines:
            if cursor.set_range(READY.pack(line, 0, 0)):
                found, rank, seq = READY.unpack(cursor.key())
                if found == line and (best is None or (rank, seq) < best[:2]):
                    best = rank, seq, line
        return best[2] if best else None

    def _lease_line(
        self, owner: int, line: int, count: int, leases: list[Lease], *, deadlines: bool
    ) -> None:
        """The hot path: take the first jobs of one line."""
        txn, t_job, t_lease, wall = self.txn, self.t.job, self.t.lease, self.wall
        leased = wall / MICRO
        row = self.row_of(line)
        prefix = READY.pack(line, 0, 0)[:4]
        cursor = txn.cursor(self.t.ready)
        found = cursor.set_range(prefix)
        taken = 0
        while found and taken < count:
            key, job_id = cursor.item()
            if key[:4] != prefix:
                break
            cursor.delete()
            found = bool(cursor.key())
            data = txn.get(job_id, db=t_job)
            assert data is not None
            (_, flags, attempt, losses, _, rank, _, seq, _, expires, _, _, ttr, timeout, size) = (
                HEADER.unpack_from(data)
            )
            row.ready -= 1
            if expires and expires <= self.now:
                stored = Stored(job_id, data)
                self.end(stored, _EXPIRED, stored.tail, _TOO_LATE)
                found = cursor.set_range(prefix)  # its end may have made a successor ready
                continue
            taken += 1
            self._seq += 1
            token, deadline, ttr_used = self._seq, 0, 0.0
            if flags & Flag.MESSAGE and ttr == 0:  # at most once: gone when taken
                self.end(Stored(job_id, data), _SUCCEEDED, Tail())
            else:
                if deadlines:
                    ttr_used = ttr if ttr > 0 else DEFAULT_TTR
                    deadline = self.now + int(ttr_used * MICRO)
                    self._put_deadline(deadline, owner, token)
                txn.put(
                    LEASE_KEY.pack(owner, token),
                    key + _LEASED.pack(wall, deadline) + job_id,
                    db=t_lease,
                )
                row.running += 1
            leases.append(
                Lease(
                    token,
                    attempt + 1,
                    losses,
                    rank,
                    seq,
                    timeout,
                    leased,
                    ttr_used,
                    data[_HEAD : _HEAD + size],
                )
            )
        row.dirty = True

    def _put_deadline(self, deadline: int, owner: int, token: int) -> None:
        self.txn.put(
            DUE.pack(0, deadline, DUE_LEASE, token), LEASE_KEY.pack(owner, token), db=self.t.due
        )

    # -- settling -------------------------------------------------------------------------------

    def settle(self, owner: int, worker: str, verdict: Verdict) -> bool:
        """Close a lease. False: it was lost, and nothing changed."""
        lease = self.txn.pop(LEASE_KEY.pack(owner, verdict.token), db=self.t.lease)
        if lease is None:
            return False
        _, _, _, leased, deadline = LEASE_VALUE.unpack_from(lease)
        if deadline:
            self.txn.delete(DUE.pack(0, deadline, DUE_LEASE, verdict.token), db=self.t.due)
        stored = self.load(lease[LEASE_VALUE.size :])
        assert stored is not None
        self._close_attempt(stored, worker, leased / MICRO, verdict)
        if verdict.followers:
            self.follow(verdict.followers)
        return True

    def _close_attempt(self, stored: Stored, worker: str, leased: float, verdict: Verdict) -> None:
        head, outcome, tail = stored.head, verdict.outcome, stored.tail
        row = self.row_of(head.line)
        row.running -= 1
        row.dirty = True
        if outcome not in _BACK:
            head.attempt += 1
            tail.attempts.append(
                Attempt(
                    head.attempt,
                    worker,
                    leased,
                    verdict.started,
                    verdict.ended,
                    outcome,
                    verdict.error,
                    verdict.traceback,
                )
            )
            del tail.attempts[:-KEEP_ATTEMPTS]
            if outcome == _RETRY and head.limit and head.attempt >= head.limit:
                outcome = Outcome.FAIL
        if outcome == _SUCCESS:
            tail.result = verdict.result
            self.end(stored, _SUCCEEDED, tail)
        elif outcome in _END:
            self.end(stored, _END[Outcome(outcome)], tail, verdict.error)
        elif head.flags & Flag.CANCELLING:
            self.end(stored, _CANCELLED, tail, "cancelled while it was running")
        elif head.expires and head.expires <= self.now:
            self.end(stored, _EXPIRED, tail, _TOO_LATE)
        else:
            if outcome == _RETRY:
                row.retried += 1
            due = self.now + int(verdict.delay * MICRO) if verdict.delay > 0 else 0
            self.place(stored, due, 0, tail)

    def touch(self, owner: int, token: int, seconds: float) -> bool:
        """Start a message lease's ttr anew. False: it was lost."""
        key = LEASE_KEY.pack(owner, token)
        lease = self.txn.get(key, db=self.t.lease)
        if lease is None:
            return False
        line, rank, seq, leased, deadline = LEASE_VALUE.unpack_from(lease)
        if deadline:
            job_id = lease[LEASE_VALUE.size :]
            stored = self.load(job_id)
            assert stored is not None
            ttr = seconds or (stored.head.ttr if stored.head.ttr > 0 else DEFAULT_TTR)
            self.txn.delete(DUE.pack(0, deadline, DUE_LEASE, token), db=self.t.due)
            deadline = self.now + int(ttr * MICRO)
            self._put_deadline(deadline, owner, token)
            value = LEASE_VALUE.pack(line, rank, seq, leased, deadline) + job_id
            self.txn.put(key, value, db=self.t.lease)
        return True

    def note(self, owner: int, note: Note) -> None:
        """Keep what a running job said."""
        lease = self.txn.get(LEASE_KEY.pack(owner, note.token), db=self.t.lease)
        stored = self.load(lease[LEASE_VALUE.size :]) if lease else None
        if stored is None:
            return
        data = self.txn.get(stored.id, db=self.t.note)
        notes = NOTES.decode(data) if data else Notes()
        if note.done >= 0:
            notes.progress = (note.done, note.total)
        if note.line:
            notes.log.append((note.time, note.line))
            del notes.log[:-100]
        self.txn.put(stored.id, encode_tail(notes), db=self.t.note)
        if not stored.head.flags & Flag.NOTED:
            stored.head.flags |= Flag.NOTED
            self.save(stored)

    def drop_lease(self, owner: int, token: int, stored: Stored) -> None:
        """Take a running job from its owner: whatever the owner says of it now is too late."""
        lease = self.txn.pop(LEASE_KEY.pack(owner, token), db=self.t.lease)
        if lease:
            deadline = LEASE_VALUE.unpack_from(lease)[4]
            if deadline:
                self.txn.delete(DUE.pack(0, deadline, DUE_LEASE, token), db=self.t.due)
        self._count(self.row_of(stored.head.line), _RUNNING, -1)

    def vanish(self, stored: Stored) -> None:
        """Delete an unfinished job that is nowhere."""
        head = stored.head
        if head.expires:
            self.txn.delete(DUE.pack(0, head.expires, DUE_EXPIRY, head.seq), db=self.t.due)
        if head.flags & Flag.KEYED:
            self.promote_successor(stored)
        self.forget(stored)
        self._finished.append(stored.id)
        self._shrunk.add(self.row_of(head.line).name)

    def leases_of(self, owner: int) -> list[tuple[int, bytes]]:
        """(token, job id) of every lease an owner has."""
        cursor = self.txn.cursor(self.t.lease)
        found = cursor.set_range(LEASE_KEY.pack(owner, 0))
        rows = []
        while found:
            whose, token = LEASE_KEY.unpack(cursor.key())
            if whose != owner:
                break
            rows.append((token, cursor.value()[LEASE_VALUE.size :]))
            found = cursor.next()
        return rows

    def release_owner(self, owner: int, worker: str, causes: Mapping[int, str] | None) -> int:
        """Give back all that a dead owner held, by the witness's account."""
        leases = self.leases_of(owner)
        for token, _ in leases:
            if causes is None:
                self._lose(owner, worker, token)
            elif token in causes:
                verdict = Verdict(
                    token, Outcome.RETRY, error=causes[token], ended=self.wall / MICRO
                )
                self.settle(owner, worker, verdict)
            else:
                self.settle(owner, worker, Verdict(token, Outcome.RELEASE))
        return len(leases)

    def _lose(self, owner: int, worker: str, token: int) -> None:
        """No witness is left: the job gets a loss, and fails after as many as it has attempts."""
        lease = self.txn.get(LEASE_KEY.pack(owner, token), db=self.t.lease)
        stored = self.load(lease[LEASE_VALUE.size :]) if lease else None
        if stored is None:
            return
        stored.head.losses += 1
        if stored.head.limit and stored.head.losses >= stored.head.limit:
            self.drop_lease(owner, token, stored)
            error = f"lost {stored.head.losses} times with its worker"
            self.end(stored, _FAILED, stored.tail, error)
        else:
            self.save(stored)
            self.settle(owner, worker, Verdict(token, Outcome.RELEASE))

    # -- time -----------------------------------------------------------------------------------

    def come_due(self) -> bool:
        """Everything whose time has come; True when there is more than one step should do."""
        cursor = self.txn.cursor(self.t.due)
        done = 0
        for clock, now in ((0, self.now), (1, self.wall)):
            while cursor.set_range(DUE.pack(clock, 0, 0, 0)):
                found, time, kind, number = DUE.unpack(cursor.key())
                if found != clock or time > now:
                    break
                if done >= _PROMOTE_MOST:
                    return True
                done += 1
                reference = cursor.value()
                cursor.delete()
                if kind == DUE_LEASE:
                    self._time_out(reference, number)
                else:
                    self._job_due(reference, kind)
        return False

    def _time_out(self, lease_key: bytes, token: int) -> None:
        owner = LEASE_KEY.unpack(lease_key)[0]
        verdict = Verdict(
            token, Outcome.RETRY, error="ttr passed without an ack", ended=self.wall / MICRO
        )
        self.settle(owner, self.owner_name(owner), verdict)

    def _job_due(self, job_id: bytes, kind: int) -> None:
        stored = self.load(job_id)
        if stored is None or stored.head.state > _READY:
            return
        if kind == DUE_JOB:
            self._count(self.row_of(stored.head.line), stored.head.state, -1)
            self.place(stored, stored.head.due, stored.head.flags & Flag.WALL)
        elif not self.is_running(stored):
            self.unplace(stored)
            self.end(stored, _EXPIRED, stored.tail, _TOO_LATE)

    def next_due(self) -> float:
        """Seconds until something comes due, 0 or less when it has; infinity when nothing will."""
        seconds = float("inf")
        cursor = self.txn.cursor(self.t.due)
        for first, now in ((0, self.now), (1, self.wall)):
            if cursor.set_range(DUE.pack(first, 0, 0, 0)):
                clock, time, _, _ = DUE.unpack(cursor.key())
                if clock == first:
                    seconds = min(seconds, (time - now) / MICRO)
        return seconds

    # -- pruning --------------------------------------------------------------------------------

    @property
    def kept(self) -> list[int]:
        """How many finished jobs there are of each class."""
        if self._kept is None:
            data = self.txn.get(self.store.key("kept"))
            self._kept = list(_KEPT.unpack(data)) if data else [0, 0, 0]
        return self._kept

    def prune(self, most: int) -> int:
        """Forget finished jobs that are too old or too many; at most ``most`` of them."""
        pruned = 0
        for kept in (CLASS_NONE, CLASS_RESULT, CLASS_OTHER):
            pruned += self._prune_class(kept, most - pruned)
        return pruned

    def _prune_class(self, kept: int, most: int) -> int:
        count = self.kept
        if most <= 0 or not count[kept]:
            return 0
        cursor = self.txn.cursor(self.t.fin)
        found = cursor.set_range(FIN.pack(kept, 0, 0))
        young = self.now - int(self.retention.protect * MICRO)
        pruned = 0
        while found and pruned < most:
            key, value = cursor.item()
            whose, prune, _ = FIN.unpack(key)
            if whose != kept:
                break
            if prune > self.now:
                if kept == CLASS_OTHER or count[0] + count[1] <= self.retention.count:
                    break
                if kept == CLASS_RESULT and NUMBER.unpack_from(value)[0] > young:
                    break
            cursor.delete()
            found = bool(cursor.key())
            job_id = value[8:]
            data = self.txn.pop(job_id, db=self.t.job)
            if data and data[1] & Flag.NOTED:
                self.txn.delete(job_id, db=self.t.note)
            count[kept] -= 1
            pruned += 1
        return pruned

    # -- owners ---------------------------------------------------------------------------------

    def owner_name(self, owner: int) -> str:
        """The name the trail shows for an owner."""
        data = self.txn.get(NUMBER.pack(owner), db=self.t.owner)
        return _NAME.decode(data).name if data else ""

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write what was counted, and hint whoever sleeps for it. Called before the commit."""
        put = self.txn.put
        for row in self.rows.values():
            if row.dirty:
                put(self.store.key("q/" + row.name), row.pack())
        if self._seq != self._first_seq:
            put(self._seq_key, NUMBER.pack(self._seq))
        if self._kept is not None:
            put(self.store.key("kept"), _KEPT.pack(*self._kept))
        bells = self.store.bells
        if bells.anyone():
            self._ring()

    def ring_rest(self, names: Sequence[str] = ()) -> None:
        """Pass the baton: there may be more than was taken. Of all queues unless some are named."""
        if not self.store.bells.anyone():
            return
        if names:
            rows = [row for name in names if (row := self.existing_row(name))]
            lines = [row.number * 2 + kind for row in rows if row.ready for kind in (0, 1)]
        else:
            lines = list(self._ready_lines())
        for line in lines:
            row = self.row_of(line)
            if not row.paused:
                self._rings.setdefault((row.name, line & 1), 1)

    def _ring(self) -> None:
        bells = self.store.bells
        for (name, kind), count in self._rings.items():
            bells.ring(MESSAGES if kind else TASKS, bloom([name]), count)
        if self._finished:
            bells.ring(RESULT, bloom([job_id.decode() for job_id in self._finished]))
        if self._shrunk:
            bells.ring(SPACE, bloom(list(self._shrunk)))
        seconds = self.next_due()
        if seconds < _NEVER:
            bells.keep_time(self.now + max(0, int(seconds * MICRO)))


class Notes(msgspec.Struct, array_like=True):
    """What a job said: stored apart, so that a talkative job does not rewrite its record."""

    progress: tuple[float, float] | None = None
    log: list[tuple[float, str]] = []


class _Name(msgspec.Struct):
    name: str = ""


class _Part(msgspec.Struct, array_like=True, gc=False):
    """An envelope up to what a finishing job needs of it."""

    id: str
    queue: str
    task: str
    body: msgspec.Raw
    created: float
    rank: int
    delay: float
    at: float
    expires: float
    timeout: float
    ttr: float
    retries: msgspec.Raw
    key: str
    on_conflict: str
    result_ttl: float


_LEASED = struct.Struct(">QQ")
_KEPT = struct.Struct(">QQQ")
NOTES = msgspec.msgpack.Decoder(Notes)
_NAME = msgspec.msgpack.Decoder(_Name)
_PART = msgspec.msgpack.Decoder(_Part)
_TOO_LATE = "not started before it expired"
