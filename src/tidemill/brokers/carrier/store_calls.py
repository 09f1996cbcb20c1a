"""The calls that a carrying broker passes on to its store unchanged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tidemill.brokers.carrier.admin import AdminCalls
from tidemill.brokers.carrier.history import HistoryCalls
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.contract.job_numbers import with_job_numbers
from tidemill.brokers.contract.limits import LimitCalls, with_limits
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.contract.unknown_tasks import UnknownTask, with_unknown_tasks
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Put, Record, State
from tidemill.limits.arithmetic import Held, LimitStats


class StoreCalls(AdminCalls, HistoryCalls):
    """Passes calls on to the store."""

    @property
    def identity(self) -> str:
        """The id of the store."""
        return self.store.identity

    @property
    def boards(self) -> str:
        return self.store.boards

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        return self.store.put(jobs, txn=txn, hold=hold, let_go=let_go, nonce=nonce)

    def wake(self, owner_id: str) -> None:
        self.store.wake(owner_id)

    def recall(self) -> int:
        return self.store.recall()

    def tick(self) -> float:
        return self.store.tick()

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        return self.store.wait_for(ids, timeout, first=first)

    def wait_space(self, queue: str, timeout: float) -> bool:
        return self.store.wait_space(queue, timeout)

    def get(self, job_id: str) -> Record | None:
        return self.store.get(job_id)

    def was_here(self, job_id: str) -> bool:
        return self.store.was_here(job_id)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        return self.store.find(what, limit, cursor)

    def ahead(self, job_id: str, most: int) -> int:
        return self.store.ahead(job_id, most)

    def stats(self) -> list[QueueStats]:
        return self.store.stats()

    def wall(self) -> float:
        return self.store.wall()

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        return self.store.schedules(names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        return self.store.list_schedules(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        return self.store.change_schedules(changes)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        return self.store.adopt(departure, records, cursor, schedules)

    def adopted(self, mark: str) -> str:
        return self.store.adopted(mark)

    def numbers(self, count: int) -> int:
        return with_job_numbers(self.store, "numbers").numbers(count)

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        return with_job_numbers(self.store, "head").head(queue, state, count)

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        return with_job_numbers(self.store, "lease_named").lease_named(owner_id, job_ids)

    def unknown_tasks(self) -> list[UnknownTask]:
        return with_unknown_tasks(self.store, "unknown_tasks").unknown_tasks()

    def limits(self) -> list[LimitStats]:
        return self._limit_calls.limits()

    def held(self, job_id: str) -> Held | None:
        return self._limit_calls.held(job_id)

    @property
    def _limit_calls(self) -> LimitCalls:
        return with_limits(self.store, "a limit")
