"""The calls outside the core: inspection, admin, limits, schedules, history, moves.

Each call applies the rules of the memory broker to the rows that it needs, in one transaction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.django import history as history_rows
from tidemill.brokers.django import inspect as queries
from tidemill.brokers.django import schedules as schedule_rows
from tidemill.brokers.django.base import ServerCalls
from tidemill.brokers.django.claim import need_limited
from tidemill.brokers.django.due import PIECE
from tidemill.brokers.django.schedules import StoredSchedules
from tidemill.brokers.django.tables import Rows, in_parts
from tidemill.brokers.django.transaction import Transaction
from tidemill.brokers.rules import admin as rules
from tidemill.brokers.rules import limits as limit_rules
from tidemill.brokers.rules import transfer as transfer_rules
from tidemill.core.clock import id_time
from tidemill.core.job import Record, State
from tidemill.core.limit_settings import LimitSettings
from tidemill.core.owner import Command, Owner
from tidemill.limits.arithmetic import Held, LimitStats

_commands = msgspec.msgpack.Decoder(list[Command])
_encode = msgspec.msgpack.Encoder().encode


class InspectionCalls(ServerCalls):
    """Calls that change nothing: see :mod:`~tidemill.brokers.contract.inspection`."""

    def get(self, job_id: str) -> Record | None:
        self._check_open()
        return self._read(lambda rows: queries.get(rows, job_id))

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, in the order of the ids."""
        found = self._read(lambda rows: queries.records(rows, ids))
        return [found.get(job_id) for job_id in ids]

    def was_here(self, job_id: str) -> bool:
        self._check_open()
        made = id_time(job_id)
        if made is None:
            return False
        return self._facts().born - 1 <= made <= self._now() + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return self._read(lambda rows: queries.find(rows, what, limit, cursor))

    def ahead(self, job_id: str, most: int) -> int:
        self._check_open()
        return self._read(lambda rows: queries.ahead(rows, job_id, most))

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return self._read(queries.stats)

    def owners(self) -> list[Owner]:
        self._check_open()
        return self._owners.listed()

    def info(self) -> dict[str, Any]:
        self._check_open()
        facts = self._facts()
        [(count,)] = self._read(lambda rows: rows.execute("SELECT count(*) FROM tidemill_job", []))
        vendor = self._database.dialect.vendor
        shown = {"broker": "django", "url": self.url, "jobs": count, "durable": True}
        shown |= {
            "made": facts.born,
            "database": self._address.alias,
            "vendor": vendor,
            "poll": self._address.poll,
        }
        return shown | ({"moves_to": facts.departure.where} if facts.departure else {})


class AdminCalls(ServerCalls):
    """Requests on jobs and queues: see :mod:`~tidemill.brokers.contract.admin`."""

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        def one(transaction: Transaction, job_id: str) -> bool:
            def send(owner_id: str, command: Command) -> bool:
                return add_command(transaction.rows, owner_id, command)

            jobs = transaction.jobs
            return rules.cancel(jobs, job_id, send, terminate=terminate, purge=purge)

        done = self._each(job_ids, one)
        self._owners.wake_all()
        self._ring(owners=any(done), waiters=False)
        return done

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        how: dict[str, Any] = {"force": force, "due": due, "only_scheduled": only_scheduled}
        return self._each(job_ids, lambda one, i: rules.retry(one.jobs, i, **how))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        done = self._each(job_ids, lambda one, i: rules.delete(one.jobs, i), deletes=True)
        self._ring(owners=True, waiters=True)
        return done

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        done = self._each(job_ids, lambda one, i: rules.alter(one.jobs, i, rank, queue))
        self._ring(owners=any(done), waiters=True)
        return done

    def _each(
        self,
        job_ids: Iterable[str],
        act: Callable[[Transaction, str], bool],
        *,
        deletes: bool = False,
    ) -> list[bool]:
        """Act on jobs in pieces, each in one transaction."""
        self._check_open()

        def work(ids: Sequence[str], transaction: Transaction) -> list[bool]:
            transaction.jobs.check_here(deletes=deletes)
            transaction.jobs.need_ids_and_beside(ids)
            return [act(transaction, job_id) for job_id in ids]

        done: list[bool] = []
        for ids in in_parts(list(job_ids), PIECE):
            done += self._change(functools.partial(work, ids))
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        def work(transaction: Transaction) -> None:
            transaction.jobs.check_here()
            row = transaction.jobs.queue(queue)
            row.paused = row.paused if paused is None else paused
            row.max_size = row.max_size if max_size is None else max_size

        self._check_open()
        self._change(work)
        self._ring(owners=True, waiters=True)

    def forget_queue(self, queue: str) -> bool:
        def work(transaction: Transaction) -> bool:
            transaction.jobs.check_here()
            if transaction.jobs.queue(queue).size:
                return False
            return rules.forget_queue(transaction.jobs, queue)

        self._check_open()
        return self._change(work)

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        told = self._change(lambda one: add_command(one.rows, owner_id, command))
        self._owners.wake(owner_id)
        self._ring(owners=told, waiters=False)
        return told

    def backup(self, target: str) -> None:
        raise self._lacks(Feature.BACKUP, "backup")

    def count_silence(self) -> float:
        return 3600.0


def add_command(rows: Rows, owner_id: str, command: Command) -> bool:
    """Add a command for an owner; False when the owner is not on the list."""
    found = rows.execute("SELECT commands FROM tidemill_owner WHERE id = %s", [owner_id])
    if not found:
        return False
    raw = bytes(found[0][0])
    commands = [*(_commands.decode(raw) if raw else []), command]
    text = "UPDATE tidemill_owner SET commands = %s WHERE id = %s"
    rows.send(text, [_encode(commands), owner_id])
    return True


class LimitCalls(ServerCalls):
    """Calls about limits: see :mod:`~tidemill.brokers.contract.limits`."""

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        def work(transaction: Transaction) -> None:
            transaction.jobs.check_here()
            limit_rules.set_limit(transaction.jobs, name, terms, queue=queue, declared=declared)

        self._check_open()
        self._change(work)
        self._ring(owners=True, waiters=False)

    def limits(self) -> list[LimitStats]:
        def work(transaction: Transaction) -> list[LimitStats]:
            need_limited(transaction.rows, transaction.jobs)
            return limit_rules.show(transaction.jobs)

        self._check_open()
        return self._change(work)

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return self._change(lambda one: limit_rules.held(one.jobs, job_id))


class ScheduleCalls(ServerCalls):
    """Calls about schedules: see :mod:`~tidemill.brokers.contract.schedules`."""

    def wall(self) -> float:
        self._check_open()
        return self._now()

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        found = self._read(lambda rows: schedule_rows.read(rows, names))
        by_name = {record.name: record for record in found}
        return [by_name.get(name) for name in names]

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        return self._read(lambda rows: schedule_rows.page(rows, after, limit))

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        def work(transaction: Transaction) -> list[Changed]:
            transaction.jobs.check_here()
            return change(transaction, changes)

        self._check_open()
        changed = self._change_on_time(work)
        self._ring(owners=True, waiters=False)
        return changed


def change(transaction: Transaction, changes: Sequence[Change]) -> list[Changed]:
    """Change records of schedules, and put their jobs."""
    stored = StoredSchedules(transaction.rows, transaction.jobs)
    stored.need(changes)
    changed = stored.change(changes)
    stored.flush()
    return changed


class HistoryCalls(ServerCalls):
    """Rows of numbers by period: see :mod:`~tidemill.brokers.contract.history`."""

    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        self._check_open()
        return self._read(lambda rows: history_rows.find(rows, kind, span, since, until, name))

    def history_kinds(self) -> list[tuple[str, int]]:
        self._check_open()
        return self._read(history_rows.kinds)

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        self._check_open()
        self._change(lambda one: history_rows.keep(one.rows, rows))


class TransferCalls(ServerCalls):
    """Moving to another store: see :mod:`~tidemill.brokers.contract.transfer`."""

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        self._check_open()
        departure = self._change(lambda one: transfer_rules.depart(one.jobs, where, seal))
        self._ring(owners=True, waiters=True)
        return departure

    def stay(self) -> None:
        def work(transaction: Transaction) -> None:
            transaction.jobs.departure = None

        self._check_open()
        self._change(work)
        self._ring(owners=True, waiters=True)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        def work(transaction: Transaction) -> list[bool]:
            jobs = transaction.jobs
            jobs.check_here()
            jobs.need_ids([record.envelope.id for record in records])
            jobs.need_keys([record.envelope.key for record in records])
            taken = transfer_rules.adopt(jobs, departure, records, cursor)
            new = [Change(one.name, 0, one.due, one.body) for one in schedules]
            return taken + [changed.done for changed in change(transaction, new)]

        self._check_open()
        done = self._change(work)
        self._ring(owners=True, waiters=True)
        return done

    def adopted(self, mark: str) -> str:
        self._check_open()
        return self._facts().arrivals.get(mark, ("", 0))[0]

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        """The first jobs of a queue in one state."""
        return self._read(lambda rows: queries.head(rows, queue, state, count))
