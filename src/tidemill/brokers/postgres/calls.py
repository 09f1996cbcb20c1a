"""The calls outside the core: inspection, administration, limits and the other parts."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.postgres import inspect, limits, transfer
from tidemill.brokers.postgres import schedules as stored
from tidemill.brokers.postgres.base import ServerCalls
from tidemill.brokers.postgres.encoding import leases_of, texts
from tidemill.core.clock import clock, id_time
from tidemill.core.errors import FeatureMissing
from tidemill.core.job import Lease, Record, State, altered_text
from tidemill.core.limit_settings import LimitSettings
from tidemill.core.owner import Command, Owner
from tidemill.core.purge_mark import purged
from tidemill.limits.arithmetic import Held, LimitStats


class InspectionCalls(ServerCalls):
    """Calls that only read: see :mod:`~tidemill.brokers.contract.inspection`."""

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """Return the records of several jobs, read at one moment."""
        self._check_open()
        return inspect.get(self._session, ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._session.installed.born - 1 <= made <= clock.wall() + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return inspect.find(self._session, what, limit, cursor)

    def ahead(self, job_id: str, most: int) -> int:
        self._check_open()
        return inspect.ahead(self._session, job_id, most)

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return inspect.stats(self._session)

    def owners(self) -> list[Owner]:
        self._check_open()
        return self._owners.listed()

    def info(self) -> dict[str, Any]:
        self._check_open()
        return inspect.info(self._session)

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return inspect.head(self._session, queue, state, count)


class AdminCalls(ServerCalls):
    """Calls that change jobs and queues: see :mod:`~tidemill.brokers.contract.admin`."""

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        verb = purged(purge) if purge else "terminate" if terminate else "cancel"
        return self._act("cancel", job_ids, verb)

    def kick(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        how = "scheduled" if only_scheduled else "force" if force else ""
        return self._act("kick", job_ids, how, repr(float(due)))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act("delete", job_ids)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        self._check_open()
        packed = None if queue is None else msgspec.msgpack.encode(queue)
        arguments = [_ids(job_ids), rank, queue, packed, altered_text(rank, queue)]
        types = "text[], bigint, text, bytea, text"
        done: list[bool] = self._session.once("alter_jobs", arguments, types)
        return done

    def _act(self, name: str, job_ids: Iterable[str], *more: str) -> list[bool]:
        self._check_open()
        types = ", ".join(["text[]", *["text"] * len(more)])
        done: list[bool] = self._session.once(name, [_ids(job_ids), *more], types)
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._check_open()
        queues = self._session.known([queue])
        arguments = [queues[queue], paused, max_size]
        types = "int, bool, bigint"
        self._session.call("set_queue", arguments, types, plain=True, queues=queues)

    def forget_queue(self, queue: str) -> bool:
        self._check_open()
        return bool(self._session.once("forget_queue", [queue], "text", plain=True))

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        arguments = [owner_id, command.verb, command.token]
        told: bool = self._session.once("send_command", arguments, "text, text, bigint", plain=True)
        return told

    def backup(self, target: str) -> None:
        raise FeatureMissing(
            "backup needs the feature backup, which postgresql:// does not have; use pg_dump"
        )


def _ids(job_ids: Iterable[str]) -> Any:
    """Ids for a call; no id in the store has a zero byte."""
    return texts([job_id.replace("\0", "") for job_id in job_ids])


class LimitCalls(ServerCalls):
    """Calls about limits: see :mod:`~tidemill.brokers.contract.limits`."""

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._check_open()
        limits.set_limit(self._session, name, terms, queue=queue, declared=declared)

    def limits(self) -> list[LimitStats]:
        self._check_open()
        return limits.all_limits(self._session)

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return limits.held(self._session, job_id.replace("\0", ""))


class JobNumberCalls(ServerCalls):
    """Calls by job number: see :mod:`~tidemill.brokers.contract.job_numbers`."""

    def numbers(self, count: int) -> int:
        self._check_open()
        last = int(self._session.once("numbers", [count], "bigint", plain=True))
        return last - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        self._check_open()
        arguments = [self._owners[owner_id].number, _ids(job_ids)]
        shown = self._session.once("lease_named", arguments, "int, text[]")
        return [leases_of(base64.b64decode(one))[0] if one else None for one in shown]


class ScheduleCalls(ServerCalls):
    """Calls about schedules: see :mod:`~tidemill.brokers.contract.schedules`."""

    def wall(self) -> float:
        self._check_open()
        now: float = self._session.call("clock", [], "")
        return now

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        return stored.get(self._session, names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        return stored.page(self._session, after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        self._check_open()
        return stored.change(self._session, changes)


class HistoryCalls(ServerCalls):
    """Calls about history: see :mod:`~tidemill.brokers.contract.history`."""

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
        self._check_open()
        return transfer.depart(self._session, where, seal=seal)

    def stay(self) -> None:
        self._check_open()
        transfer.stay(self._session)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        self._check_open()
        return transfer.adopt(self._session, departure, records, cursor, schedules)

    def adopted(self, mark: str) -> str:
        self._check_open()
        return transfer.adopted(self._session, mark)
