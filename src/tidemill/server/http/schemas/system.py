"""Schemas of schedules, workers and statistics in requests and answers."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from tidemill.server.http.schemas.queues import QueueOut
from tidemill.server.http.schemas.types import (
    Cron,
    Epoch,
    Every,
    Interval,
    LocalEnd,
    LocalMoment,
    Name,
    Positive,
    Priority,
    Retries,
    Seconds,
    Zone,
)


class ScheduleIn(Struct, kw_only=True, forbid_unknown_fields=True):
    """A repeated call of a task, at times given by one of ``cron``, ``every`` and ``at``."""

    task: Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    cron: Cron | None = None
    every: Interval | Every | None = None
    at: Epoch | LocalMoment | None = None
    zone: Zone | None = None
    start: Epoch | LocalMoment | None = None
    end: Epoch | LocalEnd | None = None
    repeats: Positive | None = None
    jitter: Seconds | None = None
    catch_up: bool = False
    queue: Name | None = None
    priority: Priority | None = None
    key: Name | None = None
    retries: Retries | None = None
    timeout: Seconds | None = None
    tags: list[Name] | None = None


class ScheduleOut(Struct, kw_only=True):
    """The state of a schedule. ``next`` is null when it is paused or has ended."""

    name: str
    task: str
    queue: str
    arguments: str
    when: str
    next: float | None
    last: float | None
    fired: int
    repeats: int | None
    jitter: float
    catch_up: bool
    paused: bool
    ended: bool
    code: bool
    app: str
    declared: bool | None
    undeclared: float | None
    known: bool | None


class Schedules(Struct):
    """All schedules, by name."""

    schedules: list[ScheduleOut]


class WorkerOut(Struct, kw_only=True):
    """A worker, or another owner of jobs. An empty list of queues means all queues."""

    id: str
    kind: str
    name: str
    host: str
    pid: int
    started: float
    queues: list[str]
    concurrency: int


class Workers(Struct):
    """All owners that are attached now; null when the broker cannot list them."""

    workers: list[WorkerOut] | None


class Totals(Struct, kw_only=True):
    """Sums over all queues. A number is null when the broker cannot count it."""

    waiting: int | None
    scheduled: int | None
    ready: int | None
    running: int | None
    accepted: int | None
    succeeded: int | None
    failed: int | None
    retried: int | None
    cancelled: int | None
    expired: int | None
    purged: int | None


class FindingOut(Struct, kw_only=True):
    """Something that is wrong, and what to do; ``note`` says it in a few words, for a table.

    ``queue``, ``task`` and ``schedule`` name what the finding is about; empty for none.
    """

    check: str
    status: Literal["warn", "fail"]
    message: str
    advice: str
    queue: str
    note: str
    task: str
    schedule: str


class Health(Struct):
    """What is wrong now, the worst first. ``ok`` is false if a finding is ``fail``."""

    ok: bool
    findings: list[FindingOut]


class Stats(Struct, kw_only=True):
    """The store and the server in numbers. ``workers`` is null if the broker cannot count them."""

    version: str
    url: str
    started: float
    time: float
    workers: int | None
    totals: Totals
    queues: list[QueueOut]
