"""Calls beside the core: inspection, admin, limits, job numbers, schedules and transfer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.contract.unknown_tasks import UnknownTask
from tidemill.brokers.redis.base import ServerCalls
from tidemill.brokers.redis.limits import change
from tidemill.brokers.redis.record import pack_record
from tidemill.brokers.redis.schedules import pack_adopted, pack_changes, read_changed
from tidemill.core.clock import id_time, new_id, wall_time
from tidemill.core.errors import FeatureMissing
from tidemill.core.job import Command, Lease, Owner, Record, State
from tidemill.core.limit_settings import LimitSettings
from tidemill.limits.arithmetic import Held, LimitStats

__all__ = [
    "AdminCalls",
    "InspectionCalls",
    "JobNumberCalls",
    "LimitCalls",
    "ScheduleCalls",
    "TransferCalls",
]


_PURGE_MOST = 200
_ACT_MOST = 250
_RECALL_MOST = 250
_GOES_ON = 2  # the answer when a change has not reached all keys of a limit yet


class InspectionCalls(ServerCalls):
    """Calls that only read: see :mod:`~tidemill.brokers.contract.inspection`."""

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs; one call reads up to 1000 of them at one moment."""
        self._check_open()
        return self._inspection.get(ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        if made is None:
            return False
        apart = abs(self._ahead) + 1  # ids are made by the clocks of producers
        return bool(self._born - apart <= made <= wall_time() + apart)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return self._inspection.find(what, limit, cursor)

    def unknown_tasks(self) -> list[UnknownTask]:
        self._check_open()
        return self._inspection.unknown_tasks()

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return self._inspection.stats()

    def owners(self) -> list[Owner]:
        self._check_open()
        return self._owners.listed()

    def info(self) -> dict[str, Any]:
        self._check_open()
        told = self._inspection.info(self._settings.replicas)
        facts = {"broker": "redis", "url": self.url, **told}
        where = self._lines.ask(b"HGET", self._lines.key + b":departure", b"where")
        return facts | ({"moves_to": where.decode()} if where else {})

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return self._inspection.head(queue, state, count)


class AdminCalls(ServerCalls):
    """Calls that change jobs and queues: see :mod:`~tidemill.brokers.contract.admin`."""

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        return self._act(b"cancel", job_ids, b"terminate" if terminate else b"cancel")

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        return self._act(b"kick", job_ids, b"force" if force else b"")

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act(b"delete", job_ids)

    def _act(self, verb: bytes, job_ids: Iterable[str], how: bytes = b"") -> list[bool]:
        done: list[bool] = []
        ids = (job_id.encode() for job_id in job_ids)
        while some := list(itertools.islice(ids, _ACT_MOST)):
            answer: bytes = self._do(verb, how, *some)
            done += [flag == 49 for flag in answer]
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        given = [b"" if value is None else b"%d" % value for value in (paused, max_size)]
        self._do(b"queue", queue.encode(), *given)

    def purge(self, queue: str) -> int:
        removed, place = 0, b"own"
        while place != b"end":
            batch, place = self._do(b"purge", queue.encode(), b"%d" % _PURGE_MOST, place)
            removed += int(batch)
        return removed

    def forget_queue(self, queue: str) -> bool:
        return bool(self._do(b"forget", queue.encode()))

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        return self._owners.command(owner_id, command)

    def recall(self) -> int:
        self._check_open()
        given, there = 0, sum(row.carried for row in self._inspection.stats())
        while given < there and (batch := int(self._do(b"recall", b"%d" % _RECALL_MOST))):
            given += batch  # the bound ends the loop: a job may be carried again already
        return given

    def backup(self, target: str) -> None:
        raise FeatureMissing("backup needs the feature backup, which redis:// does not have")


class LimitCalls(ServerCalls):
    """See :mod:`~tidemill.brokers.contract.limits`."""

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        if (
            self._call("set_limit", *change(name, terms, queue=queue, declared=declared))
            == _GOES_ON
        ):
            self._go_on(self._lines)

    def limits(self) -> list[LimitStats]:
        self._check_open()
        return self._ledger.all()

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return self._ledger.held(job_id)


class JobNumberCalls(ServerCalls):
    """See :mod:`~tidemill.brokers.contract.job_numbers`."""

    def numbers(self, count: int) -> int:
        return int(self._call("job_numbers", b"", b"%d" % count)) - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        ids = [job_id.encode() for job_id in job_ids]
        member = self._owners[owner_id]
        return member.lent(self._call("job_numbers", *member.head(), *ids))


class ScheduleCalls(ServerCalls):
    """See :mod:`~tidemill.brokers.contract.schedules`."""

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        return self._book.get(names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        return self._book.page(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        verb, args = pack_changes(changes)
        return read_changed(self._call(verb, *args))


class TransferCalls(ServerCalls):
    """Moving to another store: see :mod:`~tidemill.brokers.contract.transfer`."""

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        args = b"depart", new_id().encode(), where.encode(), b"1" if seal else b"0"
        while True:
            mark, goes_to, last, sealed = (part.decode() for part in self._call("transfer", *args))
            if sealed == "1" or not seal:
                return Departure(mark, goes_to, int(last), sealed == "1")

    def stay(self) -> None:
        self._call("transfer", b"stay")

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        args = pack_adopted(schedules)
        args += [arg for record in records for arg in pack_record(record)]
        head = departure.mark.encode(), b"%d" % departure.last, cursor.encode()
        answer: bytes = self._call("transfer_in", *head, *args)
        return [flag == 49 for flag in answer]

    def adopted(self, mark: str) -> str:
        self._check_open()
        return str(self._lines.call("transfer", b"adopted", mark.encode()).decode())
