"""The calls outside the core: inspection, admin, limits, job numbers, schedules and transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.redis.base import ServerCalls
from tidemill.brokers.redis.limits import change
from tidemill.brokers.redis.record import MICRO, pack_record
from tidemill.brokers.redis.schedules import pack_adopted, pack_changes, read_changed
from tidemill.core.clock import clock, id_time, new_id
from tidemill.core.errors import FeatureMissing
from tidemill.core.job import Lease, Record, State
from tidemill.core.limit_settings import LimitSettings
from tidemill.core.owner import Command, Owner
from tidemill.core.purge_mark import purged
from tidemill.limits.arithmetic import Held, LimitStats

_ACT_MOST = 250
_GOES_ON = 2  # the answer when some keys of a limit still have old settings


_CHANGED = b"1"[0]


def altered(rank: int | None, queue: str | None) -> bytes:
    """The new rank and the new queue of ``alter``, as an argument."""
    return b"%b %b" % (b"" if rank is None else b"%d" % rank, (queue or "").encode())


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
        apart = abs(self._ahead) + 1  # producers make ids by their own clocks
        return bool(self._born - apart <= made <= clock.wall() + apart)

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
        return self._owners.listed()

    def info(self) -> dict[str, Any]:
        self._check_open()
        told = self._inspection.info(self._settings.replicas)
        facts = {"broker": "redis", "url": self.url, "made": self._born, **told}
        where = self._lines.ask(b"HGET", self._lines.key + b":departure", b"where")
        return facts | ({"moves_to": where.decode()} if where else {})

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return self._inspection.head(queue, state, count)


class AdminCalls(ServerCalls):
    """Calls that change jobs and queues: see :mod:`~tidemill.brokers.contract.admin`."""

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        how = purged(purge) if purge else "terminate" if terminate else "cancel"
        return self._act(b"cancel", job_ids, how.encode())

    def kick(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        return self._act(b"kick", job_ids, b"%d %d" % (2 if only_scheduled else force, due * MICRO))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act(b"delete", job_ids)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        return self._act(b"alter", job_ids, altered(rank, queue))

    def _act(self, verb: bytes, job_ids: Iterable[str], how: bytes = b"") -> list[bool]:
        done: list[bool] = []
        ids = [job_id.encode() for job_id in job_ids]
        while some := ids[len(done) : len(done) + _ACT_MOST]:
            answer: bytes = self._do(verb, how, *some)  # one call may act only on the first jobs
            done += [flag == _CHANGED for flag in answer]
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        given = [b"" if value is None else b"%d" % value for value in (paused, max_size)]
        self._do(b"queue", queue.encode(), *given)

    def forget_queue(self, queue: str) -> bool:
        return bool(self._do(b"forget", queue.encode()))

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        return self._owners.command(owner_id, command)

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
        attached = self._owners[owner_id]
        return attached.read_leases_of_act(self._call("job_numbers", *attached.head(), *ids))


class ScheduleCalls(ServerCalls):
    """See :mod:`~tidemill.brokers.contract.schedules`."""

    def wall(self) -> float:
        self._check_open()
        seconds, micros = map(int, self._lines.ask(b"TIME"))
        return seconds + micros / MICRO + clock.server_ahead()

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        return self._book.get(names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        return self._book.page(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        verb, args = pack_changes(changes)
        return read_changed(self._call(verb, *args))


def refuse_txn(txn: Any) -> None:
    """Refuse a transaction of the caller."""
    if txn is not None:
        raise FeatureMissing("txn= needs the feature transactions, which redis:// does not have")


class HistoryCalls(ServerCalls):
    """See :mod:`~tidemill.brokers.contract.history`."""

    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        self._check_open()
        return self._history.read(kind, span, since, until, name)

    def history_kinds(self) -> list[tuple[str, int]]:
        self._check_open()
        return self._history.kinds()

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        self._check_open()
        self._history.keep(rows)


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
        return [flag == _CHANGED for flag in answer]

    def adopted(self, mark: str) -> str:
        self._check_open()
        return str(self._lines.call("transfer", b"adopted", mark.encode()).decode())
