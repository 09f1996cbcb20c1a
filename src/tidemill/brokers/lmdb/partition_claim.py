"""Leasing from partitions: the jobs that one step takes from the partitions of a line.

A partition has the ready jobs of one key of a limit (:mod:`.partitions`). The ready table has the
first job of each partition, a separate table has all its jobs. A step keeps the next job of each
partition in memory. It writes this job to the ready table only if it does not lease the job. The
step takes the tokens of all jobs of a partition from the limiter together.
"""

from __future__ import annotations

import heapq
import struct

import lmdb

from tidemill.brokers.lmdb.layout import READY_KEY
from tidemill.brokers.lmdb.partitions import COST, Partition, name_of
from tidemill.brokers.lmdb.record import job_limit_of
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.limit_settings import LimitSettings
from tidemill.limits.arithmetic import NEVER, opens, room, take

_PARK_KEY = struct.Struct(">QIIQ")  # partition, line, rank, sequence
_NOTHING = 0, 0, 0, 0
_MOST = 1 << 30


class PartitionClaim:
    """The jobs that a step has taken from one partition.

    Attributes:
        terms: the settings of the partition's limit.
        keyed: True when the limit has keys, and so several partitions.
        cost: the cost of the job that is being leased.
        spent: tokens of leased jobs that the limiter does not know yet.
        left: the number of jobs of cost 1 that may still start, as far as the step knows.
        opening: the earliest start of its next job, if that job may not start now.
    """

    __slots__ = ("cost", "keyed", "left", "name", "opening", "partition", "spent", "terms")

    def __init__(
        self, partition: Partition, name: bytes, terms: LimitSettings, cost: float
    ) -> None:
        self.partition = partition
        self.name = name
        self.terms = terms
        self.keyed = name[-1] != 0
        self.cost = cost
        self.spent = 0.0
        self.left = 0
        self.opening = NEVER


class PartitionClaims:
    """The claims of a step on the partitions of one line; ``held``: a heap of their next jobs."""

    def __init__(self, commit: Transitions, line: int) -> None:
        self.held: list[tuple[bytes, bytes, PartitionClaim]] = []
        self.moved = False  # True when the step has to read the ready table again
        self._transitions = commit
        self._line = line
        self._claims: dict[bytes, PartitionClaim] = {}
        self._cursor: lmdb.Cursor[bytes] | None = None

    def open(self, envelope: bytes) -> PartitionClaim:
        """Open the claim on a partition whose first job was found in the ready table."""
        job_limit = job_limit_of(envelope)
        name = name_of(job_limit.name, job_limit.key)
        partition = self._transitions.partitions.opened(name)
        terms = self._transitions.limiters.terms(name)
        claim = self._claims[name] = PartitionClaim(partition, name, terms, job_limit.cost)
        return claim

    def remove(self, claim: PartitionClaim, rank: int, seq: int) -> None:
        """Remove a job that is no longer ready from the table of its partition."""
        key = _PARK_KEY.pack(claim.partition.number, self._line, rank, seq)
        if self._cursor is None:
            self._cursor = self._transitions.txn.cursor(self._transitions.t.park)
        if self._cursor.key() == key or self._cursor.set_key(key):
            self._cursor.delete()

    def dropped(self, claim: PartitionClaim) -> None:
        """Mark the partition as stale: the removed job is not leased."""
        claim.partition.lines[self._line] = None
        self._transitions.partitions.stale(claim.name)

    def start(self, claim: PartitionClaim, token: int) -> None:
        """Count the lease of the removed job, and prepare the next job of its partition."""
        partition = claim.partition
        claim.spent += claim.cost
        partition.running += 1
        partition.turn = token
        if len(partition.lines) > 1:  # the first jobs of the other lines may change
            partition.lines[self._line] = None
            self.close()
            self._transitions.partitions.look_again(claim.name)
            self.moved = True
            return
        self._transitions.partitions.lent[token] = claim.name, claim.cost
        assert self._cursor is not None
        key, value = self._cursor.item()  # the job that follows the leased job
        number, line, rank, seq = _PARK_KEY.unpack(key) if key else _NOTHING
        if number != partition.number or line != self._line:
            del partition.lines[self._line]
            return
        claim.cost = COST.unpack_from(value)[0]
        if claim.left and claim.cost == 1:
            claim.left -= 1
        elif not self._opens(claim):
            partition.lines[self._line] = None
            return
        turn = token if claim.keyed and token > seq else seq
        partition.lines[self._line] = rank, turn, seq
        found = READY_KEY.pack(self._line, rank, turn)
        heapq.heappush(self.held, (found, value[COST.size :], claim))

    def _opens(self, claim: PartitionClaim) -> bool:
        """True when the next job of a partition may start now."""
        self._note(claim)
        partition, terms, now = claim.partition, claim.terms, self._transitions.now
        if claim.cost == 1:
            claim.left = room(terms, partition.limiter, partition.running, now, _MOST) - 1
            if claim.left >= 0:
                return True
            claim.left = 0
        when = opens(terms, partition.limiter, partition.running, now, claim.cost)
        claim.opening = when or NEVER
        return not when

    def _note(self, claim: PartitionClaim) -> None:
        """Take the tokens of started jobs from the limiter."""
        take(claim.terms, claim.partition.limiter, self._transitions.now, claim.spent)
        claim.spent = 0.0

    def close(self) -> None:
        """Write the next jobs to the ready table, and bring the partitions up to date."""
        for key, job_id, _ in self.held:
            self._transitions.txn.put(key, job_id, db=self._transitions.t.ready)
        self.held.clear()
        for claim in self._claims.values():
            if claim.spent:
                self._note(claim)
            self._transitions.partitions.closed(claim.name, claim.partition, claim.opening)
        self._claims.clear()
