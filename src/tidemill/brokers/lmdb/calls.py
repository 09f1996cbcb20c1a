"""The calls outside the core: inspection, administration, limits and the other parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.lmdb import admin, history, job_numbers
from tidemill.brokers.lmdb import schedules as schedule
from tidemill.brokers.lmdb.base import StoreCalls
from tidemill.brokers.lmdb.handoff import hand_over
from tidemill.brokers.lmdb.owner_table import owner_rows, send
from tidemill.brokers.lmdb.transfer import adopt, adopted, depart, stay
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.workflows import finish_falls
from tidemill.core.clock import clock
from tidemill.core.job import Lease, Record, State
from tidemill.core.limit_settings import LimitSettings
from tidemill.core.owner import Command, Owner
from tidemill.limits.arithmetic import Held, LimitStats


class InspectionCalls(StoreCalls):
    """Calls that only read: see :mod:`~tidemill.brokers.contract.inspection`."""

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, read in one transaction."""
        self._check_open()
        return self._inspection.get(ids)

    def was_here(self, job_id: str) -> bool:
        return self._time.was_here(job_id)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return self._inspection.find(what, limit, cursor)

    def ahead(self, job_id: str, most: int) -> int:
        self._check_open()
        return self._inspection.ahead(job_id, most)

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return self._inspection.stats()

    def owners(self) -> list[Owner]:
        self._check_open()
        return self._owners.alive()

    def info(self) -> dict[str, Any]:
        self._check_open()
        return {"url": self.url, **self._inspection.info()}

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return self._inspection.head(queue, state, count)

    def backup(self, target: str) -> None:
        self._check_open()
        self._inspection.backup(target)


class AdminCalls(StoreCalls):
    """Calls that change jobs and queues: see :mod:`~tidemill.brokers.contract.admin`."""

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        ids = list(job_ids)
        return self._act(lambda commit: admin.cancel(commit, ids, terminate=terminate, purge=purge))

    def kick(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        ids = list(job_ids)
        how: dict[str, Any] = {"force": force, "due": due, "only_scheduled": only_scheduled}
        return self._act(lambda commit: admin.kick(commit, ids, **how))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        ids = list(job_ids)
        return self._act(lambda commit: admin.delete(commit, ids), deletes=True)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        ids = list(job_ids)
        return self._act(lambda commit: admin.alter(commit, ids, rank, queue))

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._act(lambda commit: admin.set_queue(commit, queue, paused=paused, max_size=max_size))

    def forget_queue(self, queue: str) -> bool:
        return self._act(lambda commit: admin.forget_queue(commit, queue))

    def command(self, owner_id: str, command: Command) -> bool:
        def apply(commit: Transitions) -> bool:
            for number, owner in owner_rows(commit.txn, commit.t):
                if owner.id == owner_id:
                    send(commit, number, command)
                    return True
            return False

        return self._commit(apply)


class LimitCalls(StoreCalls):
    """See :mod:`~tidemill.brokers.contract.limits`."""

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._act(
            lambda commit: admin.set_limit(commit, name, terms, queue=queue, declared=declared)
        )

    def limits(self) -> list[LimitStats]:
        self._check_open()
        return self._inspection.limits()

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return self._inspection.held(job_id)


class JobNumberCalls(StoreCalls):
    """See :mod:`~tidemill.brokers.contract.job_numbers`."""

    def numbers(self, count: int) -> int:
        return self._commit(lambda commit: job_numbers.numbers(commit, count))

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        local_owner = self._owners[owner_id]
        return self._act(
            lambda commit: job_numbers.lease_named(commit, local_owner.number, job_ids)
        )


class ScheduleCalls(StoreCalls):
    """See :mod:`~tidemill.brokers.contract.schedules`."""

    def wall(self) -> float:
        return clock.wall()

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        with self._store.reading_txn() as txn:
            return schedule.read(txn, self._store.tables.schedule, names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        with self._store.reading_txn() as txn:
            return schedule.page(txn, self._store.tables.schedule, after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        def apply(commit: Transitions) -> list[Changed]:
            commit.hand_over = hand_over
            return schedule.change(commit, changes)

        if any(change.jobs for change in changes):
            self._owners.as_waiting()
        return self._act(apply)


class HistoryCalls(StoreCalls):
    """See :mod:`~tidemill.brokers.contract.history`."""

    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        self._check_open()
        with self._store.reading_txn() as txn:
            return history.read_history(self._store, txn, kind, span, since, until, name)

    def history_kinds(self) -> list[tuple[str, int]]:
        self._check_open()
        with self._store.reading_txn() as txn:
            return history.kinds_of_history(self._store, txn)

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        def keep(commit: Transitions) -> None:
            # Added rows need room: the disk reserve is for verdicts.
            if any(row.counts or row.sample for row in rows):
                commit.store.room.check(sum(64 + len(row.name) + len(row.sample) for row in rows))
            history.keep_history(commit, rows)

        self._commit(keep)


class TransferCalls(StoreCalls):
    """Moving to another store: see :mod:`~tidemill.brokers.contract.transfer`."""

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        def leave(commit: Transitions) -> Departure:
            if seal:
                finish_falls(commit)
            return depart(commit, where, seal)

        return self._commit(leave)

    def stay(self) -> None:
        self._commit(stay)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        new = [Change(s.name, 0, s.due, s.body) for s in schedules]

        def apply(commit: Transitions) -> list[bool]:
            taken = adopt(commit, departure, records, cursor)
            return taken + [changed.done for changed in schedule.change(commit, new)]

        return self._act(apply)

    def adopted(self, mark: str) -> str:
        self._check_open()
        with self._store.reading_txn() as txn:
            return adopted(self._store, txn, mark)
