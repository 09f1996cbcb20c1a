"""The stored jobs of one transaction, with the rules of the memory broker.

:class:`StoredJobs` is the ``Jobs`` of :mod:`tidemill.brokers.rules.transitions` over rows. It
reads an item when a rule asks for the item, and ``flush`` writes the items that the rules changed.
So ``memory://`` is not only the specification of ``django://``: both run the same code.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.retention import Retention
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.django.limits import Limits, Partitions
from tidemill.brokers.django.rows import (
    CHANGING,
    COLUMNS,
    FIXED,
    SELECT,
    Stored,
    item_of,
    share_of,
    values_of,
)
from tidemill.brokers.django.tables import HeldKeys, Keys, QueueRow, Queues, Rows
from tidemill.brokers.rules import workflows
from tidemill.brokers.rules.transitions import Item, Jobs, ready_list_of
from tidemill.core.envelope import encode_envelope
from tidemill.core.job import RunOn, State


class Facts(msgspec.Struct):
    """The facts of the whole store, in one value."""

    store: str = ""  # the name of this store, which no other store has
    born: float = 0.0
    departure: Departure | None = None
    arrivals: dict[str, tuple[str, int]] = {}
    history_pruned: float = 0.0
    has_limits: bool = False  # True after any limit was set


_READY = 2
_NEVER = (None,) * len(CHANGING)
decode_facts = msgspec.msgpack.Decoder(Facts).decode
_encode = msgspec.msgpack.Encoder().encode


class _Items(dict[str, Item]):
    """Id -> item; see ``Jobs.items``."""

    def __init__(self, jobs: StoredJobs) -> None:
        super().__init__()
        self._jobs = jobs

    def get(self, job_id: str, default: Any = None) -> Any:
        found = super().get(job_id)
        if found is None:
            self._jobs.need_ids([job_id])
            found = super().get(job_id)
        return default if found is None else found

    def __contains__(self, job_id: object) -> bool:
        return self.get(str(job_id)) is not None

    def __missing__(self, job_id: str) -> Item:
        found: Item | None = self.get(job_id)
        if found is None:
            raise KeyError(job_id)
        return found

    def __setitem__(self, job_id: str, item: Item) -> None:
        self._jobs.enter(job_id, item)
        super().__setitem__(job_id, item)

    def __delitem__(self, job_id: str) -> None:
        self._jobs.leave(job_id)
        super().__delitem__(job_id)

    def load(self, job_id: str, item: Item) -> None:
        """Add an item that was read from the table; nothing is written."""
        super().__setitem__(job_id, item)


class StoredJobs(Jobs):
    """The jobs of a database, in one transaction."""

    # ``opened`` has the time of the database, the facts of the store, and the first times at which
    # an unfinished and a finished job must be looked at. ``also`` has the rows of further queries
    # that ran when the transaction began.

    def __init__(
        self, rows: Rows, retention: Retention, opened: Sequence[Any], also: Sequence[list[Any]]
    ) -> None:
        now, facts, self.alarm, self.prune = opened
        self.rows = rows
        self.also = also
        self._now = rows.time_of(now)
        self._raw = bytes(facts)
        self._numbers: list[int] = []
        self._stored: dict[str, Stored] = {}
        self._missing: set[str] = set()
        self._deleted: list[int] = []
        self._moved: list[Item] = []  # jobs that moved to another queue
        self.alarm_passed = False  # True when the table no longer has the alarm
        self.soonest: float | None = None  # the earliest alarm that was written here
        self.read_ahead = ""  # the queue whose first jobs were read
        self.news = False  # True when sleeping owners must look for jobs
        self.ends = False  # True when a job has ended
        super().__init__(retention, self._job_ended, workflows.ended)
        self.items = self._items = _Items(self)
        self.keys = self.key_rows = Keys(rows, HeldKeys())
        self.held = self.key_rows.held
        self.stats = self.queue_rows = Queues(rows)
        self.queue_limits = self._queue_limits = Limits(rows, "q")
        self.limits = self._limits = Limits(rows, "n")
        self.partitions = self.partition_rows = Partitions(rows)
        self._take_over_facts()

    def _take_over_facts(self) -> None:
        self.facts = facts = decode_facts(self._raw) if self._raw else Facts()
        self.born, self.departure = facts.born, facts.departure
        self.arrivals, self.history_pruned = facts.arrivals, facts.history_pruned
        if facts.has_limits:
            for name, raw in self.rows.execute("SELECT name, facts FROM tidemill_limit"):
                limits = self._queue_limits if name[0] == "q" else self._limits
                limits.load(name[1:], bytes(raw))

    @property
    def is_late(self) -> bool:
        """True when jobs had come due before the transaction began."""
        return self.alarm is not None and self.alarm <= self._now

    def _job_ended(self) -> None:
        self.ends = True

    # -- time and numbers -------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._now

    @property
    def wall(self) -> float:
        return self._now

    @property
    def seq(self) -> int:
        """The last number of the sequence."""
        return self.rows.dialect.last_number(self.rows.execute)

    @seq.setter
    def seq(self, number: int) -> None:
        if number:
            self._numbers.clear()
            self.rows.dialect.advance(self.rows.execute, number)

    def reserve(self, count: int) -> None:
        """Draw numbers for ``count`` calls of :meth:`next_number` by one statement."""
        if count > len(self._numbers):
            missing = count - len(self._numbers)
            self.add_numbers(self.rows.dialect.numbers(self.rows.execute, missing))

    def add_numbers(self, numbers: Sequence[int]) -> None:
        """Add numbers that the database has given."""
        self._numbers = [*reversed(numbers), *self._numbers]

    def next_number(self) -> int:
        if not self._numbers:
            self.reserve(1)
        return self._numbers.pop()

    # -- reading ----------------------------------------------------------------------

    def need_ids(self, ids: Iterable[str]) -> None:
        known, missing = self._stored, self._missing
        new = [i for i in dict.fromkeys(ids) if i not in known and i not in missing]
        new = [i for i in new if "\0" not in i]
        if not new:
            return
        missing.update(new)
        for row in self.rows.select_in(SELECT + "id IN", new):
            self.enter_row(row)

    def need_ids_and_beside(self, ids: Iterable[str]) -> None:
        """Read the jobs of these ids, and further rows that the rules need."""
        ids = list(ids)
        self.need_ids(ids)
        self.need_beside([self._stored[i].item for i in ids if i in self._stored])

    def need_numbers(self, numbers: Iterable[int]) -> list[Item]:
        """Read the jobs of these numbers that exist, and the other rows that the rules need."""
        found = [self.enter_row(r) for r in self.rows.select_in(SELECT + "seq IN", numbers)]
        self.need_beside(found)
        return found

    def need_holder(self, owner_id: str) -> None:
        """Read the running jobs of an owner."""
        self.load(SELECT + "state = 3 AND state <= 3 AND holder = %s ORDER BY seq", [owner_id])

    def load(self, text: str, parameters: list[Any]) -> list[Item]:
        """Read the jobs of a query. Jobs that this transaction read before keep their changes."""
        return [self.enter_row(row) for row in self.rows.execute(text, parameters)]

    def need_beside(self, items: Sequence[Item]) -> None:
        """Read the queues, keys and successors of jobs, and the jobs that wait for these jobs."""
        envelopes = [item.record.envelope for item in items]
        self.queue_rows.need({envelope.queue for envelope in envelopes})
        keys = [envelope.key for envelope in envelopes if envelope.key]
        self.need_keys(keys)
        self.need_ids([job_id for item in items for job_id in item.dependents])

    def need_keys(self, keys: Sequence[str]) -> None:
        """Read keys, and the jobs that have them."""
        self.key_rows.need(keys)
        self.need_ids([job_id for key in keys if key for job_id in self.keys.get(key, ())])

    def need_flows(self, items: Sequence[Item]) -> None:
        """Read the jobs that wait for these jobs, also through barriers."""
        while items:
            ids = {job_id for item in items for job_id in item.dependents}
            new = [job_id for job_id in ids if not self.knows(job_id)]
            self.need_ids(new)
            read = [self._stored[job_id].item for job_id in new if self.knows(job_id)]
            items = [item for item in read if item.waits == RunOn.BARRIER]

    @property
    def touched(self) -> int:
        """The number of jobs read here that were ready in the table; some may have changed."""
        return sum(1 for one in self._stored.values() if one.before and one.before[1] == _READY)

    def knows(self, job_id: str) -> bool:
        return job_id in self._stored

    def enter_row(self, row: Any) -> Item:
        """Add the job of a row. A job that this transaction read before keeps its changes."""
        stored = item_of(row)
        item = stored.item
        job_id = item.record.envelope.id
        known = self._stored.get(job_id)
        if known is not None:
            return known.item
        self._stored[job_id] = stored
        self._missing.discard(job_id)
        self._items.load(job_id, item)
        record = item.record
        if stored.fresh:
            stored.fresh = 0
            self.queue(record.envelope.queue).accepted += 1
        if record.state is State.READY:
            item.ready = (record.rank, record.seq, job_id)
            bisect.insort(self.ready.setdefault(ready_list_of(record), []), item.ready)
        elif record.state is State.RUNNING:
            self.leases[item.holder, item.token] = item
        return item

    # -- changing ---------------------------------------------------------------------

    def enter(self, job_id: str, item: Item) -> None:
        self._stored[job_id] = Stored(item, encode_envelope(item.record.envelope), None)
        self._missing.discard(job_id)

    def leave(self, job_id: str) -> None:
        stored = self._stored.pop(job_id)
        self._missing.add(job_id)
        if stored.before is not None:
            self._note_alarm(stored.before[5], None)
            self._deleted.append(stored.item.record.seq)

    def queue(self, name: str) -> QueueRow:
        return self.queue_rows.row(name)

    def count(self, item: Item, by: int) -> None:
        self.queue(item.record.envelope.queue).change(item.record.state, by)

    def keep_linked(self, item: Item, seconds: float) -> None:
        stored = self._stored[item.record.envelope.id]
        stored.linked, stored.prune = True, self.now + seconds

    def keep_plainly(self, item: Item) -> None:
        stored = self._stored[item.record.envelope.id]
        stored.linked = False
        stored.prune = item.finished_machine + self.keep_for(item.record)

    def unfinish(self, item: Item) -> None:
        stored = self._stored[item.record.envelope.id]
        stored.linked, stored.prune = False, None

    def alter(self, item: Item, rank: int, queue: str) -> None:
        old = item.record.envelope
        super().alter(item, rank, queue)
        envelope = item.record.envelope
        if envelope is not old:
            self._stored[envelope.id].envelope = encode_envelope(envelope)
            self._moved.append(item)

    # -- writing ----------------------------------------------------------------------

    def flush(self) -> None:
        self._delete()
        new: list[Any] = []
        changed: list[Any] = []
        for stored in self._stored.values():
            values = values_of(stored)
            if stored.before is None:
                envelope = stored.item.record.envelope
                fixed = (stored.item.record.seq, envelope.id, envelope.queue, envelope.task)
                new.append((*values, *fixed, envelope.key, share_of(envelope), stored.envelope))
            elif values != stored.before:
                changed.append((*values, stored.item.record.seq))
            else:
                continue
            before = stored.before or _NEVER
            became_ready = stored.item.record.state is State.READY and before[1] != values[1]
            self.news |= self._note_alarm(before[5], values[5]) or became_ready
            stored.before = values
        self.rows.insert("tidemill_job", COLUMNS, new)
        self._update(changed)
        self._move()
        self.facts.has_limits |= bool(self.limits or self.queue_limits)
        self.queue_rows.flush()
        self.key_rows.flush()
        if self.limits or self.queue_limits:
            self._limits.flush()
            self._queue_limits.flush()
            self.partition_rows.flush()
        self._flush_facts()

    def _note_alarm(self, before: float | None, after: float | None) -> bool:
        """Record the change of an alarm; True when the new alarm is the earliest of all."""
        first = self.alarm
        if before is not None and before != after and first is not None and before <= first:
            self.alarm_passed = True
        if after is None:
            return False
        self.soonest = after if self.soonest is None else min(self.soonest, after)
        return first is None or after < first

    def _delete(self) -> None:
        self.rows.send_in("DELETE FROM tidemill_job WHERE seq IN", self._deleted)
        self._deleted = []

    def _move(self) -> None:
        """Write the new queues of moved jobs. :meth:`_update` leaves out these columns."""
        for item in self._moved:
            envelope = item.record.envelope
            text = "UPDATE tidemill_job SET queue = %s, envelope = %s WHERE seq = %s"
            self.rows.send(text, [envelope.queue, encode_envelope(envelope), item.record.seq])
        self._moved = []

    def _update(self, changed: list[Any]) -> None:
        if not changed:
            return
        update = self.rows.dialect.update_jobs(CHANGING, changed)
        if update is not None:
            self.rows.send(*update)
            return
        if self.rows.dialect.vendor == "sqlite":
            sets = ", ".join(f"{name} = %s" for name in CHANGING)
            self.rows.execute_many(f"UPDATE tidemill_job SET {sets} WHERE seq = %s", changed)
            return
        fixed = ("", "", "", "", "", b"")
        before, behind = self.rows.dialect.upsert("tidemill_job", FIXED, COLUMNS)
        self.rows.insert_between(before, [(*row, *fixed) for row in changed], behind)

    def _flush_facts(self) -> None:
        facts = self.facts
        facts.departure, facts.history_pruned = self.departure, self.history_pruned
        raw = _encode(facts)
        if raw != self._raw:
            self._raw = raw
            departs = int(self.departure is not None)
            text = "UPDATE tidemill_store SET departs = %s, facts = %s WHERE id = 1"
            self.rows.send(text, [departs, raw])
