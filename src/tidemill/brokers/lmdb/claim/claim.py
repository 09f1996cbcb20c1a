"""Choose the jobs that an owner gets, and lease them.

A *line* is the ready tasks of one queue, or its ready messages. A line sorts its jobs by priority,
then by age. An owner that takes tasks and messages gets the jobs of both lines of a queue in one
order.
"""

from __future__ import annotations

import heapq
import struct

from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.lmdb.claim.limits import PartitionClaim, PartitionClaims
from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_LEASE, LEASE_KEY, LOST, MICRO, READY_KEY, Row
from tidemill.brokers.lmdb.put.workflows import inputs_of
from tidemill.brokers.lmdb.record import EXPIRED, HEADER, TOO_LATE, Flag, Stored
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import DEFAULT_TTR, Lease

_HEAD = HEADER.size
_LIMITED, _LINKED = Flag.LIMITED, Flag.LINKED  # plain numbers: each job is tested for these flags
_LEASED = struct.Struct(">QQ")  # follows the ready key in a lease: leased, deadline


def put_deadline(commit: Transitions, deadline: int, owner: int, token: int) -> None:
    """Add the entry of the due table that ends the lease at this store time."""
    key = DUE_KEY.pack(0, deadline, DUE_LEASE, token)
    commit.txn.put(key, LEASE_KEY.pack(owner, token), db=commit.t.due)
    commit.untimed = True


class Leasing:
    """The leases of one owner in one commit; with ``deadlines``, each ends after the job's ttr."""

    def __init__(
        self, commit: Transitions, owner: int, *, deadlines: bool, leases: list[Lease] | None = None
    ) -> None:
        """``leases`` are new leases that the owner already has; they count towards its want."""
        self.leases = [] if leases is None else leases
        self.last_queue = 0  # the last queue that a fair want took from
        self._commit = commit
        self._owner = owner
        self._deadlines = deadlines
        self._leased = commit.wall / MICRO
        self._undated = _LEASED.pack(commit.wall, 0)  # the end of a lease without deadline

    def take(self, want: Want, last: int) -> None:
        """Lease up to ``want.count`` jobs; a fair want begins after the queue ``last``."""
        self.last_queue = last
        self._commit.sync()
        if len(self.leases) >= want.count:
            return
        if want.alone and want.tasks:
            self._take_lines(self._lost_lines(want), 1)
        queues = self._wanted_lines(want)
        if want.mode is Mode.FAIR:
            queues.sort(key=lambda lines: (lines[0] >> 1 <= last, lines[0]))
            self._take_fairly(queues, want.count)
        elif want.mode is Mode.MERGED:
            lines = [line for lines in queues for line in lines]
            self._take_lines(lines, want.count - len(self.leases))
        else:
            for lines in queues:
                self._take_lines(lines, want.count - len(self.leases))

    def _wanted_lines(self, want: Want) -> list[list[int]]:
        """The wanted lines with ready jobs, by queue; no lines of paused queues."""
        commit = self._commit
        kinds = [kind for kind, asked in ((0, want.tasks), (1, want.messages)) if asked]
        queues: dict[int, list[int]] = {}
        if want.queues:
            for name in want.queues:
                row = commit.existing_row(name)
                if row and row.ready and not row.paused:
                    queues[row.number] = [row.lines[kind] for kind in kinds]
        else:
            for line in commit.ready_lines():
                if line >= LOST:
                    break
                if line & 1 in kinds and not commit.row_of(line).paused:
                    queues.setdefault(line >> 1, []).append(line)
        return list(queues.values())

    def _lost_lines(self, want: Want) -> list[int]:
        """The wanted lines of tasks that must run alone; usually none."""
        commit = self._commit
        lines = [line for line in commit.ready_lines(LOST) if not commit.row_of(line).paused]
        if not want.queues:
            return lines
        return [line for line in lines if commit.row_of(line).name in want.queues]

    def _take_fairly(self, queues: list[list[int]], count: int) -> None:
        """Give every queue its share, until the want is filled or nothing is left."""
        leases = self.leases
        while queues and len(leases) < count:
            share = max(1, (count - len(leases)) // len(queues))
            for lines in list(queues):
                few = min(share, count - len(leases))
                if few <= 0:
                    return
                before = len(leases)
                self._take_lines(lines, few)
                self.last_queue = lines[0] >> 1
                if len(leases) - before < few:
                    queues.remove(lines)

    def _take_lines(self, lines: list[int], count: int) -> None:
        """Take from several lines as if they were one."""
        if len(lines) == 1 and count > 0:
            self.take_line(lines[0], count)
            return
        full = len(self.leases) + count
        while len(self.leases) < full:
            line = self._best_line([line for line in lines if self._is_open(line)])
            if line is None:
                return
            self.take_line(line, 1)

    def _is_open(self, line: int) -> bool:
        row = self._commit.row_of(line)
        return not row.has_limit or self._commit.limiters.room(row, 1) > 0

    def _best_line(self, lines: list[int]) -> int | None:
        """The line whose first job comes before the first jobs of the other lines."""
        best = None
        cursor = self._commit.txn.cursor(self._commit.t.ready)
        for line in lines:
            if cursor.set_range(READY_KEY.pack(line, 0, 0)):
                found, rank, seq = READY_KEY.unpack(cursor.key())
                if found == line and (best is None or (rank, seq) < best[:2]):
                    best = rank, seq, line
        return best[2] if best else None

    def take_line(self, line: int, count: int) -> None:
        """Lease the first jobs of one line. The hot path."""
        commit = self._commit
        txn, t_job, row = commit.txn, commit.t.job, commit.row_of(line)
        if row.has_limit:
            count = commit.limiters.room(row, count)
        before = len(self.leases)
        prefix = READY_KEY.pack(line, 0, 0)[:4]
        cursor = txn.cursor(commit.t.ready)
        found = cursor.set_range(prefix)
        key = job_id = b""
        claims = PartitionClaims(commit, line)
        held = claims.held  # the next jobs of partitions, which are not in the ready table yet
        while count > 0:
            claim = None
            if found:
                key, job_id = cursor.item()
                found = key[:4] == prefix
            if held and (not found or held[0][0] < key):
                key, job_id, claim = heapq.heappop(held)
            elif found:
                cursor.delete()
                found = bool(cursor.key())
            else:
                break
            data = txn.get(job_id, db=t_job)
            assert data is not None
            row.ready -= 1
            row.dirty = True
            lent = self.lend(row, key, job_id, data, claims, claim)
            count -= lent
            if not lent or claims.moved:  # look again if leasing has made other jobs ready
                claims.moved = False
                claims.close()
                commit.sync()
                found = cursor.set_range(prefix)
        claims.close()
        if row.has_limit:
            commit.limiters.take(row, len(self.leases) - before)

    def lend(
        self,
        row: Row,
        key: bytes,
        job_id: bytes,
        data: bytes,
        claims: PartitionClaims,
        claim: PartitionClaim | None = None,
    ) -> bool:
        """Lease a job that was taken off its line; end it and return False when it has expired."""
        # ``claims`` is told of each job that belongs to a partition.
        commit = self._commit
        (_, flags, attempt, losses, _, rank, _, seq, _, expires, _, _, ttr, timeout, size) = (
            HEADER.unpack_from(data)
        )
        envelope = data[_HEAD : _HEAD + size]
        if flags & _LIMITED:
            claim = claim or claims.open(envelope)
            claims.remove(claim, rank, seq)
            seq = READY_KEY.unpack(key)[2]  # the sequence in the ready table
        if expires and expires <= commit.now:
            if claim is not None:
                claims.dropped(claim)
            stored = Stored(job_id, data)
            commit.end(stored, EXPIRED, stored.tail, TOO_LATE)
            return False
        token, dates, ttr_used = commit.next_number(), self._undated, 0.0
        if self._deadlines:
            ttr_used = ttr if ttr > 0 else DEFAULT_TTR
            deadline = commit.now + int(ttr_used * MICRO)
            put_deadline(commit, deadline, self._owner, token)
            dates = _LEASED.pack(commit.wall, deadline)
        lease_key = LEASE_KEY.pack(self._owner, token)
        commit.txn.put(lease_key, key + dates + job_id, db=commit.t.lease)
        row.running += 1
        if claim is not None:
            claims.start(claim, token)
        counts = attempt + 1, losses, rank, seq
        lease = Lease(token, *counts, timeout, self._leased, ttr_used, envelope)
        if flags & _LINKED:
            lease.inputs = inputs_of(commit, Stored(job_id, data))
        self.leases.append(lease)
        return True
