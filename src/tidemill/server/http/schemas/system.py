"""Schemas of schedules, workers and statistics in requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from tidemill.server.http.schemas.queues import QueueOut, Totals
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
    says,
)


class ScheduleIn(Struct, kw_only=True, forbid_unknown_fields=True):
    """A repeated call of a task, at times given by one of ``cron``, ``every`` and ``at``."""

    task: Name
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    cron: Annotated[
        Cron | None,
        says(
            "five fields, or six with seconds first; or @hourly, @daily and so on. An expression "
            "that never fires, such as 30 February, is refused"
        ),
    ] = None
    every: Annotated[
        Interval | Every | None, says("seconds, or a text such as 15 minutes, day or 3 months")
    ] = None
    at: Annotated[
        Epoch | LocalMoment | None,
        says(
            "a single time: epoch seconds, a time with an offset, or a local time in zone. A time "
            "in the past gets 409"
        ),
    ] = None
    zone: Annotated[
        Zone | None,
        says(
            "the time zone of cron, and of days and longer periods, such as Europe/Berlin; "
            "default: UTC. The server's machine must know the zone. A start with another offset, "
            "and times without an offset, need a zone"
        ),
    ] = None
    start: Annotated[
        Epoch | LocalMoment | None,
        says("the schedule does not fire before this time, and every counts from it"),
    ] = None
    end: Annotated[
        Epoch | LocalEnd | None,
        says(
            "the schedule does not fire after this time; not before start. 409 when no time is "
            "left. A time after the year 6325 means no end"
        ),
    ] = None
    repeats: Annotated[Positive | None, says("the number of jobs after which it ends")] = None
    jitter: Annotated[
        Seconds | None,
        says("the longest random delay of each time, in seconds; no longer than every"),
    ] = None
    catch_up: Annotated[bool, says("put a job for each missed time")] = False
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
    arguments: Annotated[str, says("the arguments of its jobs, as text")]
    when: Annotated[str, says("the rule of its times, as text")]
    next: float | None
    last: Annotated[float | None, says("the time of its latest job")]
    last_job: Annotated[str | None, says("the id of that job, which may be deleted meanwhile")]
    fired: Annotated[int, says("the number of jobs that it has put")]
    repeats: int | None
    jitter: float
    catch_up: bool
    paused: bool
    ended: bool
    code: Annotated[bool, says("whether code declares the schedule")]
    app: Annotated[str, says("the app that declares it, if a worker has reported it")]
    declared: Annotated[
        bool | None, says("whether a live worker declares it; null when no worker ever did")
    ]
    undeclared: Annotated[
        float | None,
        says("when the last live worker stopped declaring it; null while one declares it"),
    ]
    known: Annotated[
        bool | None,
        says("whether this server's app or a worker has the task; null if the app has no tasks"),
    ]


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
