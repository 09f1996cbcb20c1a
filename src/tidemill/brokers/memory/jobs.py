"""What is kept, and the moves every job is made to take: the only places a state changes.

The only place, too, that reads a clock.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable

from tidemill.brokers.base import QueueStats, Retention
from tidemill.clock import machine_time, wall_time
from tidemill.job import Envelope, Owner, Record, State

__all__ = ["Item", "Jobs", "line_of"]

Ready = tuple[int, int, str]  # rank, seq, id
Due = tuple[float, int, str]  # when, seq, id


class Item:
    """A stored job: its record, and what a record does not show."""

    __slots__ = (
        *("deadline", "due_machine", "expires_machine", "finished_machine", "holder", "limit"),
        *("ready", "record", "token"),
    )

    def __init__(self, envelope: Envelope, seq: int) -> None:
        self.record = Record(envelope=envelope, state=State.READY, seq=seq, rank=envelope.rank)
        self.limit = envelope.retries.max_attempts
        self.token = 0  # of the current lease
        self.holder = ""  # the owner that has it
        self.deadline = 0.0  # machine time at which a message lease ends
        self.due_machine = 0.0  # machine time of a delay; 0 when due by wall time
        self.expires_machine = 0.0
        self.finished_machine = 0.0
        self.ready: Ready | None = None  # its entry in the ready list


class Jobs:
    """All jobs of one broker; used under its lock. ``tell`` wakes whoever sleeps for news."""

    def __init__(self, retention: Retention, tell: Callable[[], None]) -> None:
        self.retention = retention
        self.tell = tell
        self.born = wall_time()
        self.last_queue = ""  # that a fair want was served from
        self.items: dict[str, Item] = {}
        self.ready: dict[tuple[str, bool], list[Ready]] = {}  # by line, in order
        self.due: list[Due] = []  # heap, by machine time
        self.due_wall: list[Due] = []  # heap, by wall time
        self.leases: dict[tuple[str, int], Item] = {}  # by owner and token
        self.keys: dict[str, list[str]] = {}  # key -> [job, successor]
        self.stats: dict[str, QueueStats] = {}
        self.finished: list[tuple[float, str]] = []  # machine time to prune at, id: in order
        self.next_number = itertools.count(1).__next__  # jobs and tokens are numbered from one

    # -- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Machine time."""
        return machine_time()

    @property
    def wall(self) -> float:
        """Wall time."""
        return wall_time()

    def due_after(self, delay: float) -> tuple[float, float]:
        """(wall time for people, machine time) of a delay; zeros when due at once."""
        return (self.wall + delay, self.now + delay) if delay > 0 else (0.0, 0.0)

    def left(self, due: float, machine: float) -> float:
        """Seconds until a due time; 0 or less when it has come."""
        if machine:
            return machine - self.now
        return due - self.wall if due else 0.0

    def next_due(self) -> float:
        """Seconds until something comes due, at least 0; infinity when nothing will."""
        seconds = [self.due[0][0] - self.now] if self.due else []
        seconds += [self.due_wall[0][0] - self.wall] if self.due_wall else []
        return max(0.0, min(seconds)) if seconds else float("inf")

    def look_at(self, item: Item, when: float) -> None:
        """Have the job looked at when a machine time comes."""
        heapq.heappush(self.due, (when, item.record.seq, item.record.envelope.id))

    # -- counters -------------------------------------------------------------------------------

    def queue(self, name: str) -> QueueStats:
        """A queue's row."""
        return self.stats.setdefault(name, QueueStats(name=name))

    def count(self, item: Item, by: int) -> None:
        """Change how many jobs its queue has of its state, or has had when the state is an end."""
        row, state = self.queue(item.record.envelope.queue), item.record.state.value
        setattr(row, state, getattr(row, state) + by)

    # -- moving ---------------------------------------------------------------------------------

    def move(self, item: Item, due: float, machine: float) -> None:
        """To scheduled or ready, by its due time."""
        record = item.record
        self.unplace(item)
        record.due, item.due_machine = due, machine
        if self.left(due, machine) > 0:
            record.state = State.SCHEDULED
            heap, when = (self.due, machine) if machine else (self.due_wall, due)
            heapq.heappush(heap, (when, record.seq, record.envelope.id))
        else:
            record.state = State.READY
            item.ready = (record.rank, record.seq, record.envelope.id)
            bisect.insort(self.ready.setdefault(line_of(record.envelope), []), item.ready)
        self.count(item, +1)

    def unplace(self, item: Item) -> None:
        """Out of whatever holds it now. Due entries stay; they are checked when they come up."""
        if not item.record.state.finished:
            self.count(item, -1)
        if item.ready:
            self.ready[line_of(item.record.envelope)].remove(item.ready)
            item.ready = None
        if item.token:
            del self.leases[item.holder, item.token]
            item.token, item.holder, item.deadline = 0, "", 0.0
            item.record.worker, item.record.leased = "", 0.0

    def run(self, item: Item, owner: Owner) -> None:
        """To running, under a lease."""
        self.unplace(item)
        record = item.record
        record.state, record.worker, record.leased = State.RUNNING, owner.name, self.wall
        item.token, item.holder = self.next_number(), owner.id
        self.leases[owner.id, item.token] = item
        self.count(item, +1)

    def finish(self, item: Item, state: State, error: str = "") -> None:
        """To its end: kept for a while, or forgotten when an acked message."""
        record, envelope = item.record, item.record.envelope
        self.unplace(item)
        record.state, record.finished, record.error = state, self.wall, error
        item.finished_machine = self.now
        self.count(item, +1)
        self.give_up_key(envelope)
        if envelope.is_message and state is State.SUCCEEDED:
            del self.items[envelope.id]
        else:
            bisect.insort(self.finished, (self.now + self._keep_for(record), envelope.id))
        self.tell()

    def _keep_for(self, record: Record) -> float:
        if record.state is State.FAILED:
            return self.retention.failed
        if record.state is not State.SUCCEEDED:
            return self.retention.of_success(-1, has_result=True)
        return self.retention.of_success(record.envelope.result_ttl, bool(record.result))

    def unfinish(self, item: Item) -> None:
        """Off the list of what is to be pruned."""
        job_id = item.record.envelope.id
        self.finished = [entry for entry in self.finished if entry[1] != job_id]

    def give_up_key(self, envelope: Envelope) -> None:
        """The job no longer has its key; who waited for it takes it over."""
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


def line_of(envelope: Envelope) -> tuple[str, bool]:
    """Jobs of one line are served in order: the tasks of a queue, or its messages."""
    return envelope.queue, envelope.is_message
