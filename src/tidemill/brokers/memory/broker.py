"""The core calls of the broker. Every call is atomic: it holds one lock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidemill.brokers.contract.exchange import Reply, Step, check_nonce, lost
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.retention import KEEP_OPTIONS, Retention
from tidemill.brokers.memory.calls import Admin, JobNumbers, Limits, Schedules, Transfer
from tidemill.brokers.memory.history import History, add_history, prune_history
from tidemill.brokers.memory.inspect import Inspection
from tidemill.brokers.memory.reply_cache import ReplyCache
from tidemill.brokers.memory.waits import Waits
from tidemill.brokers.rules import limits
from tidemill.brokers.rules.claim import lease
from tidemill.brokers.rules.due import come_due, prune
from tidemill.brokers.rules.put import put
from tidemill.brokers.rules.schedules import ScheduleTable
from tidemill.brokers.rules.settle import note, release_owner, settle, touch
from tidemill.brokers.rules.transitions import Jobs, store_moved
from tidemill.brokers.rules.workflows import ended
from tidemill.brokers.shared.remote_owners import Silence
from tidemill.brokers.shared.waits import Parked, Until, sleep
from tidemill.brokers.shared.wake_pipe import WakePipe
from tidemill.core.clock import new_id
from tidemill.core.config import Url, check_known
from tidemill.core.envelope import Envelope
from tidemill.core.job import Command, Owner, Put, Record
from tidemill.core.locks import Condition
from tidemill.errors import TidemillError


def check_url(url: Url) -> Retention:
    check_known("a memory:// url", url.options, KEEP_OPTIONS)
    return Retention.from_options(url.options)


def open_url(url: Url) -> MemoryBroker:
    return MemoryBroker(url.text, check_url(url))


class MemoryBroker(Inspection, JobNumbers, Admin, Limits, Schedules, History, Transfer):
    """A broker in this process's memory: its core calls, and the parts that it inherits."""

    boards = ""
    features = frozenset(Feature) - {
        Feature.DURABLE,
        Feature.PROCESSES,
        Feature.TRANSACTIONS,
        Feature.BACKUP,
    }

    def __init__(self, url: str = "memory://", retention: Retention | None = None) -> None:
        self.url = url
        self._lock = Condition()
        self._jobs = Jobs(retention or Retention(), self._wake_all, ended)
        self.waits = Waits(self._lock, self._jobs)
        self._schedules = ScheduleTable(self._jobs)
        self.identity = f"memory {new_id()}"
        self._replies = ReplyCache(self._jobs)
        self._silence: Silence[str] = Silence()
        self._owners: dict[str, Owner] = {}
        self._commands: dict[str, list[Command]] = {}
        self._pipes: dict[str, WakePipe] = {}

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        if txn is not None:
            raise lacks(self.url, Feature.TRANSACTIONS, "txn=")
        check_nonce(nonce)
        with self._lock:
            if nonce and (known := self._replies.put_before(nonce)) is not None:
                return known
            self._jobs.check_here()
            come_due(self._jobs)
            puts = put(self._jobs, jobs, hold, let_go)
            self._replies.keep(nonce, puts)
            self._wake_all()
            return puts

    def attach(self, owner: Owner) -> None:
        with self._lock:
            self._jobs.check_here()
            known = self._owners.get(owner.id)
            if not (owner.lease and known and known.lease):
                self.detach(owner.id)
                self._begin(owner)
            self._owners[owner.id] = owner
            if owner.lease:
                self._replies.attached(owner)

    def _begin(self, owner: Owner) -> None:
        self._commands[owner.id] = []
        self._pipes[owner.id] = WakePipe()

    def detach(self, owner_id: str) -> None:
        with self._lock:
            self.release(owner_id, {})
            if pipe := self._pipes.pop(owner_id, None):
                pipe.close()

    def exchange(self, step: Step) -> Reply:
        with self._lock:
            owner = self._owners.get(step.owner)
            if owner is None and not (step.serial or step.behalf):
                self._pipe(step.owner)
            if owner is None:  # the owner was given up: all its leases are lost
                return lost(step)
            if step.behalf or not (owner.lease or step.serial):
                return self._exchange(owner, step)
            reply = self._replies.known(owner, step)
            if reply is None:
                reply = self._exchange(owner, step)
                self._replies.answered(step, reply)
            return reply

    def _exchange(self, owner: Owner, step: Step) -> Reply:
        jobs, reply = self._jobs, Reply()
        come_due(jobs)
        first_due = jobs.first_due()
        self._hand_in(owner, step, reply)
        if step.want and jobs.departure is None:
            reply.leases = list(lease(jobs, owner, step.want))
        if not step.behalf:
            reply.commands, self._commands[owner.id] = self._commands[owner.id], []
        if jobs.departure is not None and step.want and step.want.count:
            if owner.kind == "consumer":
                raise store_moved(jobs.departure)
            reply.commands.append(Command("quiet"))
        reply.next_due = max(0.0, min(jobs.next_due(), limits.next_opening(jobs)))
        self._hand_out_schedules(step.fires, reply)
        if jobs.first_due() != first_due:
            # Wake the other owners: this owner may return too late for the new due time.
            self._wake_all()
        prune(jobs)
        return reply

    def _hand_in(self, owner: Owner, step: Step, reply: Reply) -> None:
        jobs = self._jobs
        for one in step.notes:
            note(jobs, owner.id, one)
        reply.settled = [settle(jobs, owner.id, verdict) for verdict in step.verdicts]
        add_history(jobs, step.history)
        reply.touched = [touch(jobs, owner.id, token, secs) for token, secs in step.touch]

    def _hand_out_schedules(self, most: int, reply: Reply) -> None:
        if most and self._jobs.departure is None:
            reply.schedules = self._schedules.hand_out(most)
            reply.next_due = min(reply.next_due, self._schedules.next_due())

    def _pipe(self, owner_id: str) -> WakePipe:
        pipe = self._pipes.get(owner_id)
        if pipe is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return pipe

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        pipe = self._pipe(owner_id)
        if (owner := self._owners.get(owner_id)) and owner.lease:
            timeout = min(timeout, owner.lease / 3)
        ready = yield Until(min(timeout, 3600.0), [pipe.fd, *fds])
        if pipe.fd in ready:
            pipe.drain()
        return [fd for fd in ready if fd in fds]

    def wake(self, owner_id: str) -> None:
        pipe = self._pipes.get(owner_id)
        if pipe:
            pipe.wake()

    def _wake_all(self) -> None:
        for owner_id in self._pipes:
            self.wake(owner_id)
        self._lock.notify_all()

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        with self._lock:
            held = release_owner(self._jobs, owner_id, causes)
            self._owners.pop(owner_id, None)
            self._commands.pop(owner_id, None)
            self._replies.forget(owner_id)
            self._wake_all()
            return held

    def tick(self) -> float:
        with self._lock:
            come_due(self._jobs)
            prune(self._jobs)
            limits.sweep(self._jobs)
            prune_history(self._jobs)
            self._jobs.let_go_of_keys()
            return 30.0

    def count_silence(self) -> float:
        with self._lock:
            owners = [owner for owner in list(self._owners.values()) if owner.lease]
            heard = {owner.id: self._replies.heard(owner) for owner in owners}
            silent, again = self._silence.look(heard)
            for owner_id in silent:
                self.release(owner_id, None)
            return again

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        items, enough = self._jobs.items, any if first and ids else all

        def over() -> bool:
            return enough(i not in items or items[i].record.state.finished for i in ids)

        with self._lock:
            self.waits.until(over, timeout)
            return [self.get(i) for i in ids]

    def wait_space(self, queue: str, timeout: float) -> bool:
        def over() -> bool:
            row = self._jobs.stats.get(queue)
            return not row or not row.max_size or row.size < row.max_size

        return self.waits.until(over, timeout)

    def close(self) -> None:
        with self._lock:
            for owner_id in list(self._owners):
                self.detach(owner_id)
