"""``memory://``: the executable specification. One dict, one lock, no cleverness.

Everything lives and dies with the process. Other brokers are compared with this one, move by move,
by the conformance suite and a state machine; where they differ, one of the two is wrong.
"""

from __future__ import annotations

import bisect
import collections
import heapq
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.base import (
    DEFAULT_TTR,
    KEEP_ATTEMPTS,
    Feature,
    Filter,
    Mode,
    Page,
    QueueStats,
    Reply,
    Retention,
    Step,
    Want,
    matches,
)
from tidemill.clock import id_time, machine_time, wall_time
from tidemill.config import Url
from tidemill.errors import DuplicateJob, FeatureMissing, QueueFull, TidemillError
from tidemill.job import (
    Attempt,
    Command,
    Conflict,
    Envelope,
    Lease,
    Note,
    Outcome,
    Owner,
    Placed,
    Put,
    Record,
    State,
    Verdict,
    encode_envelope,
)

__all__ = ["MemoryBroker", "open_url"]

_END = {
    Outcome.FAIL: State.FAILED,
    Outcome.CANCELLED: State.CANCELLED,
    Outcome.EXPIRED: State.EXPIRED,
}


def open_url(url: Url) -> MemoryBroker:
    """The broker of a ``memory://`` URL."""
    return MemoryBroker(url.text, Retention.from_options(url.options))


class _Item:
    """A stored job: its record, and what a record does not show."""

    __slots__ = (
        "deadline",
        "due_machine",
        "expires_machine",
        "finished_machine",
        "holder",
        "limit",
        "ready",
        "record",
        "token",
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
        self.ready: tuple[int, int, str] | None = None  # its entry in the ready list


class MemoryBroker:
    """A broker in this process's memory."""

    boards = ""

    features = frozenset(
        {
            Feature.DELAY,
            Feature.PRIORITY,
            Feature.KEYS,
            Feature.RESULTS,
            Feature.INSPECT,
            Feature.CANCEL,
            Feature.PAUSE,
            Feature.MAX_SIZE,
            Feature.MERGED,
        }
    )

    def __init__(self, url: str = "memory://", retention: Retention | None = None) -> None:
        self.url = url
        self._retention = retention or Retention()
        self._lock = threading.Condition(threading.RLock())
        self._born = wall_time()
        self._numbers = itertools.count(1)
        self._items: dict[str, _Item] = {}
        self._ready: dict[tuple[str, bool], list[tuple[int, int, str]]] = {}
        self._due: list[tuple[float, int, str]] = []  # machine time
        self._due_wall: list[tuple[float, int, str]] = []
        self._leases: dict[tuple[str, int], _Item] = {}
        self._keys: dict[str, list[str]] = {}  # key -> [job, successor]
        self._stats: dict[str, QueueStats] = {}
        self._finished: list[tuple[float, str]] = []  # prune time (machine), id: by expiry
        self._owners: dict[str, Owner] = {}
        self._commands: dict[str, list[Command]] = {}
        self._pipes: dict[str, tuple[int, int]] = {}
        self._last_queue = ""  # that a fair want was served from

    # -- producing ------------------------------------------------------------------------------

    def put(self, jobs: Sequence[Envelope], *, txn: Any = None) -> list[Put]:
        if txn is not None:
            raise FeatureMissing(
                "txn= needs the feature transactions, which memory:// does not have"
            )
        with self._lock:
            self._come_due()
            self._refuse_any(jobs)
            puts = [self._put(job) for job in jobs]
            self._wake_all()
            return puts

    def _refuse_any(self, jobs: Sequence[Envelope]) -> None:
        """All or none: play the puts through for what could refuse one, before any is stored."""
        ids: set[str] = set()
        holders: dict[str, list[tuple[str, bool]]] = {}  # key -> (queue, runs) of job and successor
        added: collections.Counter[str] = collections.Counter()
        for job in jobs:
            if job.key and job.key not in holders:
                records = [self._items[i].record for i in self._keys.get(job.key, [])]
                holders[job.key] = [(r.envelope.queue, r.state is State.RUNNING) for r in records]
            held = holders[job.key] if job.key else []
            if held and job.on_conflict == Conflict.REJECT:
                raise DuplicateJob(f"an unfinished job has the key {job.key!r} already", job.id)
            if job.id in self._items or job.id in ids:
                raise DuplicateJob(f"a job with the id {job.id!r} is kept already", job.id)
            if held and job.on_conflict != Conflict.REPLACE:
                continue
            stays = [holder for holder in held[:1] if holder[1]]
            for queue, _ in held[len(stays) :]:
                added[queue] -= 1
            stats = self._queue(job.queue) if job.queue in self._stats else None
            if stats and stats.max_size and stats.size + added[job.queue] >= stats.max_size:
                raise QueueFull(f"queue {job.queue!r} holds max_size={stats.max_size} jobs already")
            added[job.queue] += 1
            ids.add(job.id)
            if job.key:
                holders[job.key] = [*stays, (job.queue, False)]

    def _put(self, job: Envelope) -> Put:
        holders = self._keys.get(job.key) if job.key else None
        if not holders:
            self._insert(job, State.READY)
            return Put(job.id, Placed.CREATED)
        current = self._items[holders[0]]
        running = current.record.state is State.RUNNING
        if job.on_conflict == Conflict.MERGE and not running:
            self._merge(current, job)
            return Put(current.record.envelope.id, Placed.MERGED)
        if job.on_conflict != Conflict.REPLACE:
            return Put(current.record.envelope.id, Placed.KEPT)
        for old in reversed(
            holders[1:] if running else holders[:]
        ):  # a successor first: no promotion
            self._finish(self._items[old], State.CANCELLED, f"replaced by {job.id}")
        if not running:
            self._insert(job, State.READY)
            return Put(job.id, Placed.REPLACED)
        holders.append(job.id)
        self._insert(job, State.WAITING)
        return Put(job.id, Placed.SUCCESSOR)

    def _follow(self, job: Envelope) -> None:
        """A put that must not fail, since settling must not: no limit holds, a taken id is kept."""
        rejected = job.on_conflict == Conflict.REJECT and job.key and self._keys.get(job.key)
        if job.id not in self._items and not rejected:
            self._put(job)

    def _merge(self, item: _Item, job: Envelope) -> None:
        record = item.record
        record.rank = min(record.rank, job.rank)
        mine, machine = self._due_of(job)
        if record.state is State.SCHEDULED and self._seconds_to(mine, machine) < self._due_in(item):
            self._move(item, mine, machine)
        else:
            self._move(item, record.due, item.due_machine)

    def _insert(self, job: Envelope, state: State) -> None:
        item = _Item(job, next(self._numbers))
        self._items[job.id] = item
        self._queue(job.queue).accepted += 1
        if job.key:
            self._keys.setdefault(job.key, [job.id])
        if job.expires:
            item.expires_machine = machine_time() + job.expires
            item.record.expires = wall_time() + job.expires
            heapq.heappush(self._due, (item.expires_machine, item.record.seq, job.id))
        item.record.due, item.due_machine = self._due_of(job)
        if state is State.WAITING:
            item.record.state = state
            self._count(item, +1)
        else:
            self._count(item, +1)
            self._move(item, item.record.due, item.due_machine)

    @staticmethod
    def _due_of(job: Envelope) -> tuple[float, float]:
        """(wall time for people, machine time when it is a delay); zeros when due at once."""
        if job.delay > 0:
            return wall_time() + job.delay, machine_time() + job.delay
        return job.at, 0.0

    @staticmethod
    def _seconds_to(due: float, machine: float) -> float:
        if machine:
            return machine - machine_time()
        return due - wall_time() if due else 0.0

    def _due_in(self, item: _Item) -> float:
        return self._seconds_to(item.record.due, item.due_machine)

    # -- moving: the only places a state changes ------------------------------------------------

    def _move(self, item: _Item, due: float, machine: float) -> None:
        """To scheduled or ready, by its due time."""
        record = item.record
        self._unplace(item)
        record.due, item.due_machine = due, machine
        if self._due_in(item) > 0:
            record.state = State.SCHEDULED
            heap, when = (self._due, machine) if machine else (self._due_wall, due)
            heapq.heappush(heap, (when, record.seq, record.envelope.id))
        else:
            record.state = State.READY
            item.ready = (record.rank, record.seq, record.envelope.id)
            bisect.insort(self._ready.setdefault(_line(record.envelope), []), item.ready)
        self._count(item, +1)

    def _unplace(self, item: _Item) -> None:
        """Out of whatever holds it now. Due entries stay; they are checked when they come up."""
        self._count(item, -1)
        if item.ready:
            self._ready[_line(item.record.envelope)].remove(item.ready)
            item.ready = None
        if item.token:
            del self._leases[item.holder, item.token]
            item.token, item.holder, item.deadline = 0, "", 0.0
            item.record.worker, item.record.leased = "", 0.0

    def _finish(self, item: _Item, state: State, error: str = "") -> None:
        record, envelope = item.record, item.record.envelope
        self._unplace(item)
        record.state, record.finished, record.error = state, wall_time(), error
        item.finished_machine = machine_time()
        stats = self._queue(envelope.queue)
        setattr(stats, state.value, getattr(stats, state.value) + 1)
        self._promote_successor(envelope)
        if envelope.is_message and state is State.SUCCEEDED:
            del self._items[envelope.id]
        else:
            self._finished.append((machine_time() + self._keep_for(record), envelope.id))
            self._finished.sort()
        self._wake_all()

    def _keep_for(self, record: Record) -> float:
        if record.state is not State.SUCCEEDED:
            return self._retention.failed
        return self._retention.of_success(record.envelope.result_ttl, bool(record.result))

    def _promote_successor(self, envelope: Envelope) -> None:
        holders = self._keys.get(envelope.key, []) if envelope.key else []
        if envelope.id not in holders:
            return
        first = holders[0] == envelope.id
        holders.remove(envelope.id)
        if not holders:
            del self._keys[envelope.key]
        elif first:
            successor = self._items[holders[0]]
            self._move(successor, successor.record.due, successor.due_machine)

    def _queue(self, name: str) -> QueueStats:
        return self._stats.setdefault(name, QueueStats(name=name))

    def _count(self, item: _Item, by: int) -> None:
        if not item.record.state.finished:
            stats, name = self._queue(item.record.envelope.queue), item.record.state.value
            setattr(stats, name, getattr(stats, name) + by)

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        with self._lock:
            self.detach(owner.id)
            self._owners[owner.id] = owner
            self._commands[owner.id] = []
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            self._pipes[owner.id] = (read, write)

    def detach(self, owner_id: str) -> None:
        with self._lock:
            self.release(owner_id, {})
            for fd in self._pipes.pop(owner_id, ()):
                os.close(fd)

    def exchange(self, step: Step) -> Reply:
        with self._lock:
            self._pipe(step.owner)
            if step.owner not in self._owners:  # given up for dead: all it held is lost
                lost = [False] * len(step.verdicts), [False] * len(step.touch)
                return Reply(*lost, commands=[Command("stop")])
            self._come_due()
            first_due = self._due[:1] + self._due_wall[:1]
            reply = Reply()
            for note in step.notes:
                self._note(step.owner, note)
            for verdict in step.verdicts:
                reply.settled.append(self._settle(step.owner, verdict))
            for token, seconds in step.touch:
                reply.touched.append(self._touch(step.owner, token, seconds))
            if step.want:
                reply.leases = list(self._lease(step.owner, step.want))
            reply.commands, self._commands[step.owner] = self._commands[step.owner], []
            reply.next_due = self._next_due()
            if self._due[:1] + self._due_wall[:1] != first_due:
                self._wake_all()  # this owner may not come back in time for it
            self._prune()
            return reply

    def _settle(self, owner: str, verdict: Verdict) -> bool:
        item = self._leases.get((owner, verdict.token))
        if item is None:
            return False
        self._close_attempt(item, verdict)
        for follower in verdict.followers:
            self._follow(follower)
        self._wake_all()
        return True

    def _close_attempt(self, item: _Item, verdict: Verdict) -> None:
        record, outcome = item.record, Outcome(verdict.outcome)
        back = outcome in (Outcome.RELEASE, Outcome.SNOOZE)
        if not back:
            record.attempt += 1
            record.attempts.append(
                Attempt(
                    record.attempt,
                    record.worker,
                    record.leased,
                    verdict.started,
                    verdict.ended,
                    outcome,
                    verdict.error,
                    verdict.traceback,
                )
            )
            del record.attempts[:-KEEP_ATTEMPTS]
        if outcome is Outcome.RETRY and item.limit and record.attempt >= item.limit:
            outcome = Outcome.FAIL
        if outcome is Outcome.SUCCESS:
            record.result = verdict.result
            self._finish(item, State.SUCCEEDED)
        elif outcome in _END:
            self._finish(item, _END[outcome], verdict.error)
        elif record.cancelling:
            self._finish(item, State.CANCELLED, "cancelled while it was running")
        elif item.expires_machine and item.expires_machine <= machine_time():
            self._finish(item, State.EXPIRED, _TOO_LATE)
        else:
            if outcome is Outcome.RETRY:
                self._queue(record.envelope.queue).retried += 1
            delay = verdict.delay
            due, machine = (
                (wall_time() + delay, machine_time() + delay) if delay > 0 else (0.0, 0.0)
            )
            self._move(item, due, machine)

    def _touch(self, owner: str, token: int, seconds: float) -> bool:
        item = self._leases.get((owner, token))
        if item is None:
            return False
        if item.deadline:
            item.deadline = machine_time() + (seconds or _ttr(item.record.envelope))
            heapq.heappush(self._due, (item.deadline, item.record.seq, item.record.envelope.id))
        return True

    def _note(self, owner: str, note: Note) -> None:
        item = self._leases.get((owner, note.token))
        if item is None:
            return
        if note.done >= 0:
            item.record.progress = (note.done, note.total)
        if note.line:
            item.record.log.append((note.time, note.line))
            del item.record.log[:-100]

    def _lease(self, owner: str, want: Want) -> Iterator[Lease]:
        for _ in range(want.count):
            item = self._choose(want)
            if item is None:
                return
            record, envelope = item.record, item.record.envelope
            if envelope.is_message and envelope.ttr == 0:  # at most once: gone when taken
                record.leased = wall_time()
                yield self._lend(item, next(self._numbers), 0.0)
                self._finish(item, State.SUCCEEDED)
                continue
            self._unplace(item)
            record.state = State.RUNNING
            self._count(item, +1)
            item.token, item.holder = next(self._numbers), owner
            self._leases[owner, item.token] = item
            record.worker, record.leased = self._owners[owner].name, wall_time()
            if self._owners[owner].kind == "consumer":
                item.deadline = machine_time() + _ttr(envelope)
                heapq.heappush(self._due, (item.deadline, record.seq, envelope.id))
            yield self._lend(item, item.token, _ttr(envelope) if item.deadline else 0.0)

    def _lend(self, item: _Item, token: int, deadline: float) -> Lease:
        r = item.record
        return Lease(
            token,
            r.attempt + 1,
            r.losses,
            r.rank,
            r.seq,
            r.envelope.timeout,
            r.leased,
            deadline,
            encode_envelope(r.envelope),
        )

    def _choose(self, want: Want) -> _Item | None:
        names = want.queues or sorted({name for name, _ in self._ready})
        kinds = [k for k, wanted in ((False, want.tasks), (True, want.messages)) if wanted]
        heads: dict[str, tuple[int, int, str]] = {}
        for name in names:
            lines = [self._ready[name, kind] for kind in kinds if self._ready.get((name, kind))]
            if lines and not self._queue(name).paused:
                heads[name] = min(line[0] for line in lines)
        if not heads:
            return None
        if want.mode is Mode.MERGED:
            return self._items[min(heads.values())[2]]
        if want.mode is Mode.FAIR:
            self._last_queue = min((n for n in heads if n > self._last_queue), default=min(heads))
            return self._items[heads[self._last_queue][2]]
        return self._items[next(iter(heads.values()))[2]]

    def _pipe(self, owner_id: str) -> tuple[int, int]:
        pipe = self._pipes.get(owner_id)
        if pipe is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return pipe

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        read, _ = self._pipe(owner_id)
        ready, _, _ = select.select([read, *fds], [], [], max(0.0, min(timeout, 3600.0)))
        if read in ready:
            ready.remove(read)
            try:
                os.read(read, 4096)
            except BlockingIOError:
                pass
        return ready

    def wake(self, owner_id: str) -> None:
        pipe = self._pipes.get(owner_id)
        if pipe:
            try:
                os.write(pipe[1], b"x")
            except BlockingIOError:
                pass  # it is full of hints already

    def _wake_all(self) -> None:
        for owner_id in self._pipes:
            self.wake(owner_id)
        self._lock.notify_all()

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        with self._lock:
            held = [
                (token, item) for (owner, token), item in self._leases.items() if owner == owner_id
            ]
            for token, item in held:
                if causes is None:
                    self._lose(item)
                elif token in causes:
                    self._close_attempt(
                        item, Verdict(token, Outcome.RETRY, error=causes[token], ended=wall_time())
                    )
                else:
                    self._close_attempt(item, Verdict(token, Outcome.RELEASE))
            self._owners.pop(owner_id, None)
            self._commands.pop(owner_id, None)
            self._wake_all()
            return len(held)

    def _lose(self, item: _Item) -> None:
        item.record.losses += 1
        if item.limit and item.record.losses >= item.limit:
            self._finish(item, State.FAILED, f"lost {item.record.losses} times with its worker")
        else:
            self._close_attempt(item, Verdict(item.token, Outcome.RELEASE))

    def tick(self) -> float:
        with self._lock:
            self._come_due()
            self._prune()
            return 30.0

    # -- time -----------------------------------------------------------------------------------

    def _come_due(self) -> None:
        for heap, now in ((self._due, machine_time()), (self._due_wall, wall_time())):
            while heap and heap[0][0] <= now:
                _, _, job_id = heapq.heappop(heap)
                if job_id in self._items:
                    self._look_at(self._items[job_id])

    def _look_at(self, item: _Item) -> None:
        """Something of this job came due; which, its state tells. Old entries change nothing."""
        record, now = item.record, machine_time()
        if record.state is State.RUNNING:
            if item.deadline and item.deadline <= now:
                error = "ttr passed without an ack"
                self._close_attempt(
                    item, Verdict(item.token, Outcome.RETRY, error=error, ended=wall_time())
                )
        elif record.state.finished:
            return
        elif item.expires_machine and item.expires_machine <= now:
            self._finish(item, State.EXPIRED, _TOO_LATE)
        elif record.state is State.SCHEDULED and self._due_in(item) <= 0:
            self._move(item, record.due, item.due_machine)

    def _next_due(self) -> float:
        seconds = [self._due[0][0] - machine_time()] if self._due else []
        seconds += [self._due_wall[0][0] - wall_time()] if self._due_wall else []
        return max(0.0, min(seconds)) if seconds else float("inf")

    def _prune(self) -> None:
        now = machine_time()
        while self._finished and self._finished[0][0] <= now:
            self._items.pop(self._finished.pop(0)[1], None)
        done = [entry for entry in self._finished if self._items[entry[1]].record.state is _DONE]
        plain = [entry for entry in done if not self._items[entry[1]].record.result]
        old = now - self._retention.protect
        results = [e for e in done if e not in plain and self._items[e[1]].finished_machine <= old]
        for entry in (plain + results)[: max(0, len(done) - self._retention.count)]:
            self._finished.remove(entry)
            del self._items[entry[1]]

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(self, ids: Sequence[str], timeout: float) -> list[Record | None]:
        def over() -> bool:
            return all(i not in self._items or self._items[i].record.state.finished for i in ids)

        with self._lock:
            self._sleep_until(over, timeout)
            return [self.get(i) for i in ids]

    def wait_space(self, queue: str, timeout: float) -> bool:
        def over() -> bool:
            stats = self._stats.get(queue)
            return not stats or not stats.max_size or stats.size < stats.max_size

        with self._lock:
            return self._sleep_until(over, timeout)

    def _sleep_until(self, over: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while True:
            self._come_due()
            if over():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._lock.wait(min(left, self._next_due(), threading.TIMEOUT_MAX))

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        with self._lock:
            item = self._items.get(job_id)
            if item is None:
                return None
            record = item.record
            return msgspec.structs.replace(
                record, attempts=list(record.attempts), log=list(record.log)
            )

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._born - 1 <= made <= wall_time() + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        with self._lock:
            seqs = sorted((item.record.seq, i) for i, item in self._items.items())
            found = [
                self._items[i].record
                for seq, i in reversed(seqs)
                if (not cursor or seq < int(cursor)) and matches(self._items[i].record, what)
            ]
            more = str(found[limit - 1].seq) if len(found) > limit else ""
            return Page(
                [r for r in map(self.get, (f.envelope.id for f in found[:limit])) if r], more
            )

    def stats(self) -> list[QueueStats]:
        with self._lock:
            rows = []
            for name in sorted(self._stats):
                row = self._stats[name]
                waiting = [
                    item.record.envelope.created
                    for item in self._items.values()
                    if item.record.envelope.queue == name and item.record.state is State.READY
                ]
                row.oldest = min(waiting, default=0.0)
                rows.append(msgspec.structs.replace(row))
            return rows

    def owners(self) -> list[Owner]:
        with self._lock:
            return list(self._owners.values())

    def info(self) -> dict[str, Any]:
        with self._lock:
            return {"broker": "memory", "url": self.url, "jobs": len(self._items), "durable": False}

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        with self._lock:
            return [self._cancel(self._items.get(i), terminate) for i in job_ids]

    def _cancel(self, item: _Item | None, terminate: bool) -> bool:
        if item is None or item.record.state.finished:
            return False
        if item.record.state is State.RUNNING:
            item.record.cancelling = True
            verb = "terminate" if terminate else "cancel"
            self._commands[item.holder].append(Command(verb, item.token))
            self.wake(item.holder)
        else:
            self._finish(item, State.CANCELLED, "cancelled before it started")
        return True

    def kick(self, job_ids: Iterable[str]) -> list[bool]:
        with self._lock:
            return [self._kick(self._items.get(i)) for i in job_ids]

    def _kick(self, item: _Item | None) -> bool:
        if item is None or item.record.state not in _KICKABLE:
            return False
        record, envelope = item.record, item.record.envelope
        if record.state.finished:
            if envelope.key and self._keys.get(envelope.key):
                return False  # at most one unfinished job per key
            if envelope.key:
                self._keys[envelope.key] = [envelope.id]
            self._finished = [entry for entry in self._finished if entry[1] != envelope.id]
            policy = envelope.retries.max_attempts
            item.limit = record.attempt + policy if policy else 0
            record.losses, record.finished, record.cancelling = 0, 0.0, False
            record.error, record.result = "", b""
            item.expires_machine, record.expires = 0.0, 0.0
        self._move(item, 0.0, 0.0)
        self._wake_all()
        return True

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        with self._lock:
            return [self._delete(self._items.get(i)) for i in job_ids]

    def _delete(self, item: _Item | None) -> bool:
        if item is None:
            return False
        envelope = item.record.envelope
        if item.record.state.finished:
            self._finished = [entry for entry in self._finished if entry[1] != envelope.id]
        else:
            self._unplace(item)
            self._promote_successor(envelope)
        del self._items[envelope.id]
        self._wake_all()
        return True

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        with self._lock:
            stats = self._queue(queue)
            stats.paused = stats.paused if paused is None else paused
            stats.max_size = stats.max_size if max_size is None else max_size
            self._wake_all()

    def purge(self, queue: str) -> int:
        with self._lock:
            gone = [
                i
                for i, item in self._items.items()
                if item.record.envelope.queue == queue
                and not item.record.state.finished
                and item.record.state is not State.RUNNING
            ]
            return sum(self.delete(gone))

    def command(self, owner_id: str, command: Command) -> bool:
        with self._lock:
            if owner_id not in self._owners:
                return False
            self._commands[owner_id].append(command)
            self.wake(owner_id)
            return True

    def backup(self, target: str) -> None:
        raise FeatureMissing("backup needs the feature backup, which memory:// does not have")

    def close(self) -> None:
        with self._lock:
            for owner_id in list(self._owners):
                self.detach(owner_id)


_TOO_LATE = "not started before it expired"
_DONE = State.SUCCEEDED
_KICKABLE = {State.FAILED, State.CANCELLED, State.EXPIRED, State.SCHEDULED}


def _line(envelope: Envelope) -> tuple[str, bool]:
    return envelope.queue, envelope.is_message


def _ttr(envelope: Envelope) -> float:
    return envelope.ttr if envelope.ttr > 0 else DEFAULT_TTR
