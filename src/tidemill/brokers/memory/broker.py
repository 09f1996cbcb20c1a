"""The broker: every call of the seam is one step under one lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tidemill.brokers.base import Departure, Feature, Filter, Page, QueueStats, Reply, Step, lacks
from tidemill.brokers.limiting import GRACE
from tidemill.brokers.memory import acts, inspect, limits, named, unknown
from tidemill.brokers.memory.carrying import recall, take
from tidemill.brokers.memory.elsewhere import Elsewhere
from tidemill.brokers.memory.flows import ended
from tidemill.brokers.memory.jobs import Jobs
from tidemill.brokers.memory.leases import lease
from tidemill.brokers.memory.moving import adopt, check_here, depart, gone
from tidemill.brokers.memory.puts import put
from tidemill.brokers.memory.schedules import Book
from tidemill.brokers.memory.settings import check_url
from tidemill.brokers.memory.timers import come_due, prune
from tidemill.brokers.memory.verdicts import hand_over, note, release_owner, settle, touch
from tidemill.brokers.memory.waits import Waits
from tidemill.brokers.parking import Parked, Until, sleep
from tidemill.brokers.retention import Retention
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.brokers.silence import Silence
from tidemill.brokers.steps import check_nonce, lost
from tidemill.brokers.unknown import UnknownTask
from tidemill.brokers.wakepipe import WakePipe
from tidemill.clock import id_time, new_id
from tidemill.config import Url
from tidemill.errors import TidemillError
from tidemill.gate import Held, LimitStats, Terms
from tidemill.job import RELAY, Command, Envelope, Lease, Owner, Put, Record, State
from tidemill.locks import Condition

__all__ = ["MemoryBroker", "open_url"]


def open_url(url: Url) -> MemoryBroker:
    """The broker of a ``memory://`` URL."""
    return MemoryBroker(url.text, check_url(url))


class MemoryBroker:
    """A broker in this process's memory."""

    boards = ""
    features = frozenset(Feature) - {
        Feature.DRAIN,
        Feature.DURABLE,
        Feature.PROCESSES,
        Feature.TRANSACTIONS,
        Feature.BACKUP,
    }

    def __init__(self, url: str = "memory://", retention: Retention | None = None) -> None:
        self.url = url
        self._lock = Condition()
        self._jobs = Jobs(retention or Retention(), self._wake_all, ended, limits.unstart)
        self.waits = Waits(self._lock, self._jobs)
        self._book = Book(self._jobs)
        self.identity = f"memory {new_id()}"
        self._elsewhere = Elsewhere(self._jobs)
        self._silence: Silence[str] = Silence()
        self._owners: dict[str, Owner] = {}
        self._commands: dict[str, list[Command]] = {}
        self._pipes: dict[str, WakePipe] = {}

    # -- producing ------------------------------------------------------------------------------

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
            if nonce and (known := self._elsewhere.put_before(nonce)) is not None:
                return known
            check_here(self._jobs)
            come_due(self._jobs)
            puts = put(self._jobs, jobs, hold, let_go)
            self._elsewhere.keep(nonce, puts)
            self._wake_all()
            return puts

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        with self._lock:
            check_here(self._jobs)
            known = self._owners.get(owner.id)
            if not (owner.lease and known and known.lease):
                self.detach(owner.id)
                self._begin(owner)
            self._owners[owner.id] = owner
            if owner.lease:
                self._elsewhere.attached(owner)

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
            if owner is None:  # given up for dead: all it held is lost
                return lost(step)
            if step.behalf or not (owner.lease or step.serial):
                return self._exchange(owner, step)
            reply = self._elsewhere.known(owner, step)
            if reply is None:
                reply = self._exchange(owner, step)
                self._elsewhere.answered(step, reply)
            return reply

    def _exchange(self, owner: Owner, step: Step) -> Reply:
        jobs = self._jobs
        come_due(jobs)
        first_due = jobs.due[:1] + jobs.due_wall[:1]
        reply = Reply()
        for said in step.notes:
            note(jobs, owner.id, said)
        reply.settled = [settle(jobs, owner.id, verdict) for verdict in step.verdicts]
        reply.touched = [touch(jobs, owner.id, token, secs) for token, secs in step.touch]
        hand_over(jobs, self._owners.values(), [token for token, _ in step.take])
        reply.taken = [take(jobs, owner, token, job_id) for token, job_id in step.take]
        if jobs.departure is None and step.want:
            jobs.hungry.pop(owner.id, None)
            reply.leases = lease(jobs, owner, step.want)
            if step.want.sleep and len(reply.leases) < step.want.count:
                jobs.hungry[owner.id] = step.want
        if not step.behalf:
            reply.commands, self._commands[owner.id] = self._commands[owner.id], []
        if jobs.departure is not None and step.want and step.want.count:
            if owner.kind == "consumer":
                raise gone(jobs.departure)
            reply.commands.append(Command("quiet"))
        reply.next_due = max(0.0, min(jobs.next_due(), limits.next_opening(jobs)))
        if jobs.heirs:
            reply.next_due = min(reply.next_due, GRACE)
            self._tell_heirs()
        unknown.tell(jobs, step.want, reply)
        if step.fires and jobs.departure is None:
            reply.schedules = self._book.hand_out(step.fires)
            reply.next_due = min(reply.next_due, self._book.next_due())
        if jobs.due[:1] + jobs.due_wall[:1] != first_due or unknown.came(step):
            self._wake_all()  # this owner may not come back in time for it
        prune(jobs)
        return reply

    def _tell_heirs(self) -> None:
        """Wake those to whom a place was left. Nobody waits for them a second time."""
        for owner_id in self._jobs.heirs:
            self._jobs.hungry.pop(owner_id, None)
            self.wake(owner_id)
        self._jobs.heirs.clear()

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
            owner = self._owners.get(owner_id)
            if causes is None and owner is not None and owner.kind == RELAY:
                causes = {}
            held = release_owner(self._jobs, owner_id, causes)
            self._owners.pop(owner_id, None)
            self._jobs.hungry.pop(owner_id, None)
            self._commands.pop(owner_id, None)
            self._elsewhere.forget(owner_id)
            self._wake_all()
            return held

    def recall(self) -> int:
        with self._lock:
            check_here(self._jobs)
            return recall(self._jobs)

    def tick(self) -> float:
        with self._lock:
            come_due(self._jobs)
            prune(self._jobs)
            limits.sweep(self._jobs)
            self._jobs.let_go_of_keys()
            return 30.0

    def count_silence(self) -> float:
        with self._lock:
            owners = [owner for owner in self._owners.values() if owner.lease]
            heard = {owner.id: self._elsewhere.heard(owner) for owner in owners}
            silent, again = self._silence.look(heard)
            for owner_id in silent:
                self.release(owner_id, None)
            return again

    # -- waiting for jobs -----------------------------------------------------------------------

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

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        with self._lock:
            return inspect.get(self._jobs, job_id)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._jobs.born - 1 <= made <= self._jobs.wall + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        with self._lock:
            return inspect.find(self._jobs, what, limit, cursor)

    def stats(self) -> list[QueueStats]:
        with self._lock:
            return inspect.stats(self._jobs)

    def owners(self) -> list[Owner]:
        with self._lock:
            return list(self._owners.values())

    def info(self) -> dict[str, Any]:
        with self._lock:
            departure, count = self._jobs.departure, len(self._jobs.items)
            facts = {"broker": "memory", "url": self.url, "jobs": count, "durable": False}
            return facts | ({"moves_to": departure.where} if departure else {})

    def unknown_tasks(self) -> list[UnknownTask]:
        with self._lock:
            return unknown.show(self._jobs)

    def numbers(self, count: int) -> int:
        with self._lock:
            self._jobs.numbered += count
            return self._jobs.numbered - count + 1

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        with self._lock:
            come_due(self._jobs)
            return named.head(self._jobs, queue, state, count)

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        with self._lock:
            check_here(self._jobs)
            come_due(self._jobs)
            owner = self._owners.get(owner_id)
            if owner is None:
                return [None] * len(job_ids)
            return [named.lease_named(self._jobs, owner, job_id) for job_id in job_ids]

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        with self._lock:
            check_here(self._jobs)
            jobs, send = self._jobs, self.command
            return [acts.cancel(jobs, i, send, terminate=terminate) for i in job_ids]

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        with self._lock:
            check_here(self._jobs)
            kicked = [acts.kick(self._jobs, i, force=force) for i in job_ids]
            self._wake_all()
            return kicked

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        with self._lock:
            check_here(self._jobs)
            deleted = [acts.delete(self._jobs, i) for i in job_ids]
            self._wake_all()
            return deleted

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        with self._lock:
            check_here(self._jobs)
            row = self._jobs.queue(queue)
            row.paused = row.paused if paused is None else paused
            row.max_size = row.max_size if max_size is None else max_size
            self._wake_all()

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        with self._lock:
            check_here(self._jobs)
            limits.set_limit(self._jobs, name, terms, queue=queue, declared=declared)
            self._wake_all()

    def limits(self) -> list[LimitStats]:
        with self._lock:
            return limits.show(self._jobs)

    def held(self, job_id: str) -> Held | None:
        with self._lock:
            return limits.held(self._jobs, job_id)

    def purge(self, queue: str) -> int:
        with self._lock:
            check_here(self._jobs)
            purged = acts.purge(self._jobs, queue)
            self._wake_all()
            return purged

    def forget_queue(self, queue: str) -> bool:
        with self._lock:
            check_here(self._jobs)
            return acts.forget_queue(self._jobs, queue)

    def command(self, owner_id: str, command: Command) -> bool:
        with self._lock:
            if owner_id not in self._owners:
                return False
            self._commands[owner_id].append(command)
            self.wake(owner_id)
            return True

    def backup(self, target: str) -> None:
        raise lacks(self.url, Feature.BACKUP, "backup")

    # -- schedules ------------------------------------------------------------------------------

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        with self._lock:
            return [self._book.records.get(name) for name in names]

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        with self._lock:
            return self._book.page(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        with self._lock:
            check_here(self._jobs)
            come_due(self._jobs)
            changed = self._book.change(changes)
            self._wake_all()
            return changed

    # -- moving to another store ----------------------------------------------------------------

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        with self._lock:
            self._wake_all()
            return depart(self._jobs, where, seal)

    def stay(self) -> None:
        with self._lock:
            self._jobs.departure = None
            self._wake_all()

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        with self._lock:
            check_here(self._jobs)
            taken = adopt(self._jobs, departure, records, cursor)
            new = [Change(s.name, 0, s.due, s.body) for s in schedules]
            taken += [changed.done for changed in self._book.change(new)]
            self._wake_all()
            return taken

    def adopted(self, mark: str) -> str:
        with self._lock:
            return self._jobs.arrivals.get(mark, ("", 0))[0]

    def close(self) -> None:
        with self._lock:
            for owner_id in list(self._owners):
                self.detach(owner_id)
