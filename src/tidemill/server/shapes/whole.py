"""Schedules, workers and the store as a whole, as requests and answers have them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from tidemill.server.shapes.queues import QueueOut
from tidemill.server.shapes.terms import (
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
    """A call of a task again and again: one of ``cron``, ``every`` and ``at`` says when."""

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
    """A schedule as it stands; ``next`` is null when it is paused or has ended."""

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
    """A worker, or another owner of jobs; no queues means all."""

    id: str
    kind: str
    name: str
    host: str
    pid: int
    started: float
    queues: list[str]
    concurrency: int


class Workers(Struct):
    """Who is attached now. Null: the broker cannot tell."""

    workers: list[WorkerOut] | None


class Totals(Struct, kw_only=True):
    """Numbers of all queues together. Null: the broker cannot tell."""

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


class Stats(Struct, kw_only=True):
    """The store and the server in numbers. ``workers`` is null where the broker cannot tell."""

    version: str
    url: str
    started: float
    time: float
    workers: int | None
    totals: Totals
    queues: list[QueueOut]
