"""Calls on jobs, queues, limits, schedules and moves: each holds the lock and applies a rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.rules import admin, limits, transfer
from tidemill.brokers.rules.claim import start_lease
from tidemill.brokers.rules.due import come_due
from tidemill.brokers.rules.schedules import ScheduleTable
from tidemill.brokers.rules.transitions import Jobs
from tidemill.core.envelope import LimitSettings
from tidemill.core.job import Command, Lease, Owner, Record, State
from tidemill.core.locks import Condition
from tidemill.limits.arithmetic import Held, LimitStats


class Part:
    """A part of the broker. :class:`.broker.MemoryBroker` makes the state."""

    url: str
    _lock: Condition
    _jobs: Jobs
    _owners: dict[str, Owner]
    _commands: dict[str, list[Command]]

    def wake(self, owner_id: str) -> None:
        raise NotImplementedError  # MemoryBroker has the sleepers

    def _wake_all(self) -> None:
        raise NotImplementedError  # MemoryBroker has the sleepers


class Admin(Part):
    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            jobs, send = self._jobs, self.command
            return [admin.cancel(jobs, i, send, terminate=terminate, purge=purge) for i in job_ids]

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            how: dict[str, Any] = {"force": force, "due": due, "only_scheduled": only_scheduled}
            retried = [admin.retry(self._jobs, i, **how) for i in job_ids]
            self._wake_all()
            return retried

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        with self._lock:
            self._jobs.check_here(deletes=True)
            deleted = [admin.delete(self._jobs, i) for i in job_ids]
            self._wake_all()
            return deleted

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            altered = [admin.alter(self._jobs, i, rank, queue) for i in job_ids]
            self._wake_all()
            return altered

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        with self._lock:
            admin.set_queue(self._jobs, queue, paused=paused, max_size=max_size)
            self._wake_all()

    def forget_queue(self, queue: str) -> bool:
        with self._lock:
            return admin.forget_queue(self._jobs, queue)

    def command(self, owner_id: str, command: Command) -> bool:
        with self._lock:
            if owner_id not in self._owners:
                return False
            self._commands[owner_id].append(command)
            self.wake(owner_id)
            return True

    def backup(self, target: str) -> None:
        raise lacks(self.url, Feature.BACKUP, "backup")


class JobNumbers(Part):
    """Numbers for jobs, and leases by their ids."""

    def numbers(self, count: int) -> int:
        with self._lock:
            self._jobs.numbered += count
            return self._jobs.numbered - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        with self._lock:
            self._jobs.check_here()
            come_due(self._jobs)
            owner = self._owners.get(owner_id)
            if owner is None:
                return [None] * len(job_ids)
            return [_lease_named(self._jobs, owner, job_id) for job_id in job_ids]


def _lease_named(jobs: Jobs, owner: Owner, job_id: str) -> Lease | None:
    """Lease a job that is ready, or that a retry makes ready."""
    item = jobs.items.get(job_id)
    if item is None or item.record.envelope.limit is not None:
        return None
    again = item.record.state in (State.SCHEDULED, State.FAILED)
    if again and not admin.retry(jobs, job_id, asked=False):
        return None
    return start_lease(jobs, item, owner) if item.record.state is State.READY else None


class Limits(Part):
    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        with self._lock:
            self._jobs.check_here()
            limits.set_limit(self._jobs, name, terms, queue=queue, declared=declared)
            self._wake_all()

    def limits(self) -> list[LimitStats]:
        with self._lock:
            return limits.show(self._jobs)

    def held(self, job_id: str) -> Held | None:
        with self._lock:
            return limits.held(self._jobs, job_id)


class Schedules(Part):
    _schedules: ScheduleTable

    def wall(self) -> float:
        return self._jobs.wall

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        with self._lock:
            return [self._schedules.records.get(name) for name in names]

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        with self._lock:
            return self._schedules.page(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        with self._lock:
            self._jobs.check_here()
            come_due(self._jobs)
            changed = self._schedules.change(changes)
            self._wake_all()
            return changed


class Transfer(Part):
    _schedules: ScheduleTable

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        with self._lock:
            self._wake_all()
            return transfer.depart(self._jobs, where, seal=seal)

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
            self._jobs.check_here()
            taken = transfer.adopt(self._jobs, departure, records, cursor)
            taken += transfer.adopt_schedules(self._schedules, schedules)
            self._wake_all()
            return taken

    def adopted(self, mark: str) -> str:
        with self._lock:
            return self._jobs.arrivals.get(mark, ("", 0))[0]
