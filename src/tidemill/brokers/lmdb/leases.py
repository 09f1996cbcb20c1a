"""Choosing what an owner gets, and leasing it.

A *line* is the ready tasks of one queue, or its ready messages; within a line the order is
priority, then age. A queue's lines are served as if they were one.
"""

from __future__ import annotations

import heapq
import struct

from tidemill.brokers.base import DEFAULT_TTR, Mode, Want
from tidemill.brokers.lmdb.flows import inputs_of
from tidemill.brokers.lmdb.hands import Hand, Hands
from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_LEASE, LEASE_KEY, LOST, MICRO, READY_KEY, Row
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.record import (
    EXPIRED,
    HEADER,
    TOO_LATE,
    Flag,
    Stored,
)
from tidemill.job import Lease

__all__ = ["Leasing", "put_deadline"]

_HEAD = HEADER.size
_LIMITED, _LINKED = Flag.LIMITED, Flag.LINKED  # looked at for every job
_LEASED = struct.Struct(">QQ")  # what a lease has behind its ready key: leased, deadline


def put_deadline(moves: Moves, deadline: int, owner: int, token: int) -> None:
    """Have the lease end at a store time."""
    key = DUE_KEY.pack(0, deadline, DUE_LEASE, token)
    moves.txn.put(key, LEASE_KEY.pack(owner, token), db=moves.t.due)
    moves.untimed = True


class Leasing:
    """What one owner gets in one commit; with ``deadlines`` a lease ends after the job's ttr."""

    def __init__(
        self, moves: Moves, owner: int, *, deadlines: bool, leases: list[Lease] | None = None
    ) -> None:
        """``leases`` are those it has already, of what it wants."""
        self.leases = [] if leases is None else leases
        self.last_queue = 0  # that a fair want was served from
        self.left_place = False  # to others, who sleep for older jobs of a lane
        self._queues: set[int] = set()  # by number, those it takes from; empty for all
        self._moves = moves
        self._owner = owner
        self._deadlines = deadlines

    def take(self, want: Want, last: int) -> list[Lease]:
        """Lease up to ``want.count`` jobs; a fair want begins after the queue ``last``."""
        self.last_queue = last
        rows = [self._moves.existing_row(name) for name in want.queues]
        self._queues = {row.number for row in rows if row}
        self._moves.sync()
        if len(self.leases) >= want.count:
            return self.leases
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
        return self.leases

    def _wanted_lines(self, want: Want) -> list[list[int]]:
        """By queue: the lines that may be served and have something ready."""
        moves = self._moves
        kinds = [kind for kind, asked in ((0, want.tasks), (1, want.messages)) if asked]
        queues: dict[int, list[int]] = {}
        if want.queues:
            for name in want.queues:
                row = moves.existing_row(name)
                if row and row.ready and not row.paused:
                    queues[row.number] = [row.lines[kind] for kind in kinds]
        else:
            for line in moves.ready_lines():
                if line >= LOST:
                    break
                if line & 1 in kinds and not moves.row_of(line).paused:
                    queues.setdefault(line >> 1, []).append(line)
        return list(queues.values())

    def _lost_lines(self, want: Want) -> list[int]:
        """The wanted lines of tasks that are to run alone; nearly always none."""
        moves = self._moves
        lines = [line for line in moves.ready_lines(LOST) if not moves.row_of(line).paused]
        if not want.queues:
            return lines
        return [line for line in lines if moves.row_of(line).name in want.queues]

    def _take_fairly(self, queues: list[list[int]], count: int) -> None:
        """Every queue its share, until the hand is full or nothing is left."""
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
        while (had := len(self.leases)) < full:
            line = self._best_line([line for line in lines if self._is_open(line)])
            if line is None:
                return
            self.take_line(line, 1)
            if len(self.leases) == had and self.left_place:
                lines = [other for other in lines if other != line]

    def _is_open(self, line: int) -> bool:
        row = self._moves.row_of(line)
        return not row.gated or self._moves.gates.room(row, 1) > 0

    def _best_line(self, lines: list[int]) -> int | None:
        """The line whose first job comes before those of the others."""
        best = None
        cursor = self._moves.txn.cursor(self._moves.t.ready)
        for line in lines:
            if cursor.set_range(READY_KEY.pack(line, 0, 0)):
                found, rank, seq = READY_KEY.unpack(cursor.key())
                if found == line and (best is None or (rank, seq) < best[:2]):
                    best = rank, seq, line
        return best[2] if best else None

    def take_line(self, line: int, count: int) -> None:
        """The hot path: the first jobs of one line."""
        moves = self._moves
        txn, t_job, row = moves.txn, moves.t.job, moves.row_of(line)
        if row.gated:
            count = moves.gates.room(row, count)
        before = len(self.leases)
        prefix = READY_KEY.pack(line, 0, 0)[:4]
        cursor = txn.cursor(moves.t.ready)
        found = cursor.set_range(prefix)
        key = job_id = b""
        hands = Hands(moves, line)
        held = hands.held  # what lanes have next, and the table not yet
        left: list[tuple[bytes, bytes]] = []  # what stays where it was
        while count > 0:
            hand = None
            if found:
                key, job_id = cursor.item()
                found = key[:4] == prefix
            if held and (not found or held[0][0] < key):
                key, job_id, hand = heapq.heappop(held)
            elif found:
                cursor.delete()
                found = bool(cursor.key())
            else:
                break
            data = txn.get(job_id, db=t_job)
            assert data is not None
            if data[1] and self._queues and hand is None and self._leave_place(key, data):
                left.append((key, job_id))
                continue
            row.ready -= 1
            row.dirty = True
            lent = self.lend(row, key, job_id, data, hands, hand)
            count -= lent
            if not lent or hands.moved:  # others may have become ready
                hands.moved = False
                hands.close()
                moves.sync()
                found = cursor.set_range(prefix)
        hands.close()
        for key, job_id in left:
            txn.put(key, job_id, db=moves.t.ready)
        if row.gated:
            moves.gates.take(row, len(self.leases) - before)

    def _leave_place(self, key: bytes, data: bytes) -> bool:
        """Whether others are to have the place of a job in its lane: they are hinted."""
        _, _, _, _, _, _, _, seq, _, _, _, _, _, _, size = HEADER.unpack_from(data)
        moves, envelope = self._moves, data[_HEAD : _HEAD + size]
        heirs = moves.lanes.heirs(envelope, key, seq, self._queues, self._owner)
        for line in heirs:
            moves.ring(moves.row_of(line), line & 1, 1)
        self.left_place = self.left_place or bool(heirs)
        return bool(heirs)

    def lend(
        self,
        row: Row,
        key: bytes,
        job_id: bytes,
        data: bytes,
        hands: Hands | None = None,
        hand: Hand | None = None,
    ) -> bool:
        """Lease a job that is ready no more; False when it had expired, and is finished.

        One of a lane is taken by hands.
        """
        moves = self._moves
        (_, flags, attempt, losses, _, rank, _, seq, _, expires, _, _, ttr, timeout, size) = (
            HEADER.unpack_from(data)
        )
        envelope = data[_HEAD : _HEAD + size]
        if flags & _LIMITED and hands is not None:
            hand = hand or hands.open(envelope)
            hands.remove(hand, rank, seq)
            seq = READY_KEY.unpack(key)[2]  # where it stood
        if expires and expires <= moves.now:
            if hand is not None and hands is not None:
                hands.dropped(hand)
            stored = Stored(job_id, data)
            moves.end(stored, EXPIRED, stored.tail, TOO_LATE)
            return False
        token, deadline, ttr_used = moves.next_number(), 0, 0.0
        if self._deadlines:
            ttr_used = ttr if ttr > 0 else DEFAULT_TTR
            deadline = moves.now + int(ttr_used * MICRO)
            put_deadline(moves, deadline, self._owner, token)
        moves.txn.put(
            LEASE_KEY.pack(self._owner, token),
            key + _LEASED.pack(moves.wall, deadline) + job_id,
            db=moves.t.lease,
        )
        row.running += 1
        if hand is not None and hands is not None:
            hands.start(hand, token)
        leased = moves.wall / MICRO
        lease = Lease(token, attempt + 1, losses, rank, seq, timeout, leased, ttr_used, envelope)
        if flags & _LINKED:
            lease.inputs = inputs_of(moves, Stored(job_id, data))
        self.leases.append(lease)
        return True
