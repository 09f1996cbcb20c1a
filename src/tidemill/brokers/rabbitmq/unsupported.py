"""The calls of the contract that RabbitMQ cannot answer: errors name the missing feature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.core.envelope import Envelope
from tidemill.core.job import Record


def refuse(what: str, feature: Feature) -> NoReturn:
    """Raise the error that names the call and the missing feature."""
    raise lacks("amqp://", feature, what)


def check_job(job: Envelope) -> None:
    """Refuse a job that needs a feature that the server lacks."""
    if job.key:
        refuse("key=", Feature.KEYS)
    if job.unique is not None:
        refuse("unique_for= or max_wait=", Feature.UNIQUE)
    if job.limit is not None:
        refuse("limit=", Feature.LIMITS)
    if job.links is not None:
        refuse("a chain, a group, a flow or a hook", Feature.FLOWS)


class Lacking:
    """The refused calls."""

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        refuse("waiting for a job", Feature.RESULTS)

    def get(self, job_id: str) -> Record | None:
        refuse("looking at a job", Feature.INSPECT)

    def ahead(self, job_id: str, most: int) -> int:
        refuse("looking at a job", Feature.INSPECT)

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        refuse("cancel", Feature.CANCEL)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        refuse("alter", Feature.ALTER)

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        if paused is not None:
            refuse("pause", Feature.PAUSE)
        refuse("max_size=", Feature.MAX_SIZE)

    def backup(self, target: str) -> None:
        refuse("backup", Feature.BACKUP)

    def wall(self) -> float:
        refuse("a schedule", Feature.SCHEDULES)

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        refuse("a schedule", Feature.SCHEDULES)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        refuse("a schedule", Feature.SCHEDULES)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        refuse("a schedule", Feature.SCHEDULES)

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        refuse("move", Feature.MOVE)

    def stay(self) -> None:
        refuse("move", Feature.MOVE)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        refuse("move", Feature.MOVE)

    def adopted(self, mark: str) -> str:
        refuse("move", Feature.MOVE)
