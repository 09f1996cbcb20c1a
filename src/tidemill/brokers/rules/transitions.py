"""The stored jobs and their state transitions.

A new job gets its state in :mod:`.put` or :mod:`.transfer`. This module makes all other changes of
states. It alone reads the clocks for due times.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, MutableMapping
from typing import Protocol

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.contract.retention import Retention
from tidemill.brokers.contract.transfer import Departure
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings, Links
from tidemill.core.job import Owner, Record, State, is_purged
from tidemill.errors import StoreMoved
from tidemill.limits.arithmetic import Limiter

Ready = tuple[int, int, str]  # rank, seq, id
Due = tuple[float, int, str]  # when, seq, id
ReadyList = tuple[str, int]  # queue, kind
TASKS, MESSAGES, LOST = range(3)


class Item:
    """A stored job: its record, and facts that a record does not show."""

    __slots__ = (
        *("deadline", "dependents", "dropped", "due_machine", "expires_machine"),
        *("finished_machine", "holder", "limit", "ready", "record", "since", "token", "until"),
        "waits",
    )

    def __init__(self, envelope: Envelope, seq: int) -> None:
        self.record = Record(envelope=envelope, state=State.READY, seq=seq, rank=envelope.rank)
        self.limit = envelope.retries.max_attempts
        self.token = 0  # token of the current lease; 0 for none
        self.holder = ""  # the owner of the lease; empty for none
        self.deadline = 0.0  # machine time at which a message lease ends
        self.due_machine = 0.0  # machine time of a delay; 0 when due by wall time
        self.expires_machine = 0.0
        self.finished_machine = 0.0
        self.ready: Ready | None = None  # the entry of the job in its ready list
        links = envelope.links or Links()
        self.dependents, self.waits = links.next, links.waits
        self.until = 0.0  # machine time until which the job keeps its key, even after success
        self.since = 0.0  # machine time of the put of the first job that this job replaced
        self.dropped = False  # True when the job ended because a job before it did not succeed


class Limit:
    """A limit: the settings that apply, and the settings that code declared last."""

    def __init__(self) -> None:
        self.terms = LimitSettings()
        self.declared: LimitSettings | None = None
        self.by_hand = False  # True when a person set the settings that apply
        # The limiter of a queue; a named limit has a limiter in each partition.
        self.limiter = Limiter()

    @property
    def is_broken(self) -> bool:
        breaker = self.terms.breaker
        return breaker is not None and self.limiter.failures >= breaker[0]


class Partition:
    """One key of one limit."""

    def __init__(self) -> None:
        self.limiter = Limiter()
        self.running = 0
        self.turn = 0  # the number of its last lease


class Queue(Protocol):
    """The settings and totals of a queue, and the numbers of its unfinished jobs."""

    paused: bool
    max_size: int
    accepted: int
    retried: int
    cancelled: int
    purged: int

    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def size(self) -> int:
        """Unfinished jobs."""
        ...


class Jobs:
    """All jobs of one broker, used under its lock.

    ``tell`` wakes every sleeper. ``on_end`` is called with each job that has ended or was deleted
    unfinished.
    """

    def __init__(
        self, retention: Retention, tell: Callable[[], None], on_end: Callable[[Jobs, Item], None]
    ) -> None:
        self.on_end = on_end
        self.retention = retention
        self.tell = tell
        self.born = clock.wall()
        self.last_queue = ""  # the queue that served the last fair want
        self.items: MutableMapping[str, Item] = {}
        self.ready: dict[ReadyList, list[Ready]] = {}  # ready jobs by list, in order
        self.due: list[Due] = []  # a heap by machine time
        self.due_wall: list[Due] = []  # a heap by wall time
        self.leases: dict[tuple[str, int], Item] = {}  # leased jobs by owner and token
        self.keys: MutableMapping[str, list[str]] = {}  # key -> [job, successor]
        # key -> (end by machine time, succeeded job)
        self.held: MutableMapping[str, tuple[float, str]] = {}
        self.stats: MutableMapping[str, Queue] = {}
        self.queue_limits: dict[str, Limit] = {}
        self.limits: dict[str, Limit] = {}
        self.partitions: dict[tuple[str, str], Partition] = {}  # by name of the limit, and key
        self.finished: list[tuple[float, str]] = []  # (machine time to prune at, id), in order
        self.ended: list[Item] = []  # ended jobs; their dependents wait to be counted down
        self.flowing = False  # True while a caller counts the dependents down
        self.linked: list[tuple[float, str]] = []  # finished jobs of flows, by time of check
        self.seq = 0  # the last number; jobs and tokens are numbered from 1 on
        self.numbered = 0  # the last number that ``numbers`` reserved
        self.departure: Departure | None = None
        self.history: dict[tuple[str, int, int, str], HistoryRow] = {}
        self.history_pruned = 0.0  # wall time
        self.arrivals: dict[str, tuple[str, int]] = {}  # mark -> (cursor, sequence offset)

    def next_number(self) -> int:
        self.seq += 1
        return self.seq

    def check_here(self, *, deletes: bool = False) -> None:
        """Refuse to change a departed store; deletes are refused only in a sealed store."""
        if self.departure is not None and not (deletes and not self.departure.sealed):
            raise store_moved(self.departure)

    @property
    def sealed(self) -> bool:
        """True when all jobs have moved to another store, and nothing more changes here."""
        return self.departure is not None and self.departure.sealed

    # -- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Machine time."""
        return clock.machine()

    @property
    def wall(self) -> float:
        return clock.wall()

    def due_after(self, delay: float) -> tuple[float, float]:
        """The due time of a delay, as (wall time for people, machine time); zeros for at once."""
        return (self.wall + delay, self.now + delay) if delay > 0 else (0.0, 0.0)

    def due_of(self, job: Envelope) -> tuple[float, float]:
        """The due time of a job, as (wall time, machine time of a delay); zeros for at once."""
        return self.due_after(job.delay) if job.delay > 0 else (job.at, 0.0)

    def left(self, due: float, machine: float) -> float:
        """Seconds until a due time; 0 or less for a time that has come."""
        if machine:
            return machine - self.now
        return due - self.wall if due else 0.0

    def next_due(self) -> float:
        """Seconds until the next due time, at least 0; infinity without a due time."""
        if self.sealed:
            return float("inf")
        seconds = [self.due[0][0] - self.now] if self.due else []
        seconds += [self.due_wall[0][0] - self.wall] if self.due_wall else []
        return max(0.0, min(seconds)) if seconds else float("inf")

    def first_due(self) -> list[Due]:
        return self.due[:1] + self.due_wall[:1]

    def look_at(self, item: Item, when: float) -> None:
        heapq.heappush(self.due, (when, item.record.seq, item.record.envelope.id))

    # -- counters -------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        return self.stats.setdefault(name, QueueStats(name=name))

    def partition(self, claim: JobLimit) -> Partition:
        return self.partitions.setdefault((claim.name, claim.key), Partition())

    def count(self, item: Item, by: int) -> None:
        """Change the queue's counter for the job's state. The counters of end states are totals."""
        row, state = self.queue(item.record.envelope.queue), item.record.state.value
        setattr(row, state, getattr(row, state) + by)

    # -- transitions ----------------------------------------------------------------------------

    def move(self, item: Item, due: float, machine: float) -> None:
        self.unplace(item)
        self._place(item, due, machine)

    def _place(self, item: Item, due: float, machine: float) -> None:
        record = item.record
        record.due, item.due_machine = due, machine
        if self.left(due, machine) > 0:
            record.state = State.SCHEDULED
            heap, when = (self.due, machine) if machine else (self.due_wall, due)
            heapq.heappush(heap, (when, record.seq, record.envelope.id))
        else:
            record.state = State.READY
            item.ready = (record.rank, record.seq, record.envelope.id)
            bisect.insort(self.ready.setdefault(ready_list_of(record), []), item.ready)
        self.count(item, +1)

    def alter(self, item: Item, rank: int, queue: str) -> None:
        """Give a waiting job this rank and this queue. The job keeps its state and its due time."""
        # The tables of scheduled and waiting jobs know neither rank nor queue.
        record, was_ready = item.record, item.record.state is State.READY
        if was_ready:
            self.unplace(item)
        else:
            self.count(item, -1)
        record.rank = rank
        if queue != record.envelope.queue:
            record.envelope = msgspec.structs.replace(record.envelope, queue=queue)
        if was_ready:
            self._place(item, 0.0, 0.0)
        else:
            self.count(item, +1)

    def unplace(self, item: Item) -> None:
        """Take a job out of its list or lease. Its due entries stay, and are then stale."""
        if not item.record.state.finished:
            self.count(item, -1)
        if item.ready:
            ready = self.ready[ready_list_of(item.record)]
            del ready[bisect.bisect_left(ready, item.ready)]
            item.ready = None
        if item.token:
            del self.leases[item.holder, item.token]
            item.token, item.holder, item.deadline = 0, "", 0.0
            item.record.worker, item.record.leased = "", 0.0
            if item.record.envelope.limit:
                self.partition(item.record.envelope.limit).running -= 1

    def run(self, item: Item, owner: Owner) -> None:
        self.unplace(item)
        record = item.record
        record.state, record.worker, record.leased = State.RUNNING, owner.name, self.wall
        item.token, item.holder = self.next_number(), owner.id
        self.leases[owner.id, item.token] = item
        if record.envelope.limit:
            self.partition(record.envelope.limit).running += 1
        self.count(item, +1)

    def finish(self, item: Item, state: State, error: str = "") -> None:
        """End a job, and keep it for a while; an acknowledged message is deleted."""
        record, envelope = item.record, item.record.envelope
        self.unplace(item)
        record.state, record.finished, record.error = state, self.wall, error
        item.finished_machine = self.now
        self.count(item, +1)
        self.give_up_key(envelope)
        if state is State.SUCCEEDED and item.until > self.now:
            self.held[envelope.key] = item.until, envelope.id
        if envelope.is_message and state is State.SUCCEEDED:
            del self.items[envelope.id]
        else:
            self.keep(item)
        self.on_end(self, item)
        self.tell()

    def keep(self, item: Item) -> None:
        """Plan the pruning of a finished job; a job of a flow stays while a dependent needs it."""
        envelope = item.record.envelope
        if envelope.links:
            ttl = envelope.result_ttl if item.record.state is State.SUCCEEDED else -1.0
            self.keep_linked(item, self.retention.first_look(ttl))
        else:
            self.keep_plainly(item)

    def keep_linked(self, item: Item, seconds: float) -> None:
        """Look again after some seconds whether a dependent needs a finished job."""
        bisect.insort(self.linked, (self.now + seconds, item.record.envelope.id))

    def keep_plainly(self, item: Item) -> None:
        """Plan the pruning of a finished job after its retention time."""
        when = item.finished_machine + self.keep_for(item.record)
        bisect.insort(self.finished, (when, item.record.envelope.id))

    def forget(self, item: Item) -> None:
        self.unplace(item)
        self.give_up_key(item.record.envelope)
        del self.items[item.record.envelope.id]
        self.on_end(self, item)

    def keep_for(self, record: Record) -> float:
        if record.state is State.FAILED or is_purged(record.error):
            return self.retention.failed
        if record.state is not State.SUCCEEDED:
            return self.retention.of_success(-1, has_result=True)
        return self.retention.of_success(record.envelope.result_ttl, bool(record.raw_result))

    def wait_again(self, item: Item) -> None:
        self.unfinish(item)
        record = item.record
        record.state, record.finished, record.error = State.WAITING, 0.0, ""
        self.count(item, +1)

    def unfinish(self, item: Item) -> None:
        job_id = item.record.envelope.id
        self.finished = [entry for entry in self.finished if entry[1] != job_id]
        self.linked = [entry for entry in self.linked if entry[1] != job_id]

    def held_by(self, key: str) -> str:
        """The succeeded job that still has the key, or an empty string."""
        until, job_id = self.held.get(key, (0.0, ""))
        return job_id if until > self.now else ""

    def let_go_of_keys(self) -> None:
        self.held = {key: who for key, who in self.held.items() if who[0] > self.now}

    def give_up_key(self, envelope: Envelope) -> None:
        """Free the key of a job; the successor that waits for the key takes it."""
        holders = self.keys.get(envelope.key, []) if envelope.key else []
        if envelope.id not in holders:
            return
        first = holders[0] == envelope.id
        holders.remove(envelope.id)
        if not holders:
            del self.keys[envelope.key]
        elif first:
            successor = self.items[holders[0]]
            self.move(successor, successor.record.due, successor.due_machine)


def ready_list_of(record: Record) -> ReadyList:
    """The ready list of a job: its queue's tasks, messages or lost tasks, each list in order."""
    envelope = record.envelope
    if envelope.is_message:
        return envelope.queue, MESSAGES
    return envelope.queue, LOST if record.losses else TASKS


def store_moved(departure: Departure) -> StoreMoved:
    """The error for calls of a store whose jobs move to another store."""
    return StoreMoved(f"this store moves to {departure.where}; use that url")
