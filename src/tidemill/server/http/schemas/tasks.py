"""Schemas of tasks that workers over HTTP reserve and settle."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from tidemill.server.http.schemas.jobs import LimitOf
from tidemill.server.http.schemas.types import (
    Encoding,
    FirstWait,
    MostReserved,
    Name,
    Order,
    Seconds,
    says,
)

MOST_NAMES = 100
"""The most tasks that one request may name."""

Amount = Annotated[float, Meta(ge=0, le=1e15)]


class ReserveTasksIn(Struct, forbid_unknown_fields=True):
    """Reserve calls of these tasks, from these queues."""

    tasks: Annotated[
        Annotated[list[Name], Meta(min_length=1, max_length=MOST_NAMES)],
        says("the names of the tasks that the worker knows"),
    ]
    queues: Annotated[
        list[Name],
        Meta(min_length=1, max_length=1000, description="the queues; default: the queue default"),
    ] = field(default_factory=lambda: ["default"])
    count: MostReserved = 1
    timeout: FirstWait = 0.0
    order: Order = "strict"


class ReservedTask(Struct, kw_only=True):
    """A reserved call. Complete it, fail it or send a heartbeat within ``ttr`` seconds."""

    receipt: str
    id: str
    queue: str
    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    attempt: Annotated[int, says("the number of the attempt in this run, from 1")]
    max_attempts: int
    losses: Annotated[
        int, says("how often the job was lost with its worker; such a job should run alone")
    ]
    ttr: Annotated[float, says("seconds in which the next heartbeat must come")]
    timeout: Annotated[float | None, says("seconds that one run may take")]
    created: float
    priority: float
    key: str | None
    limit: LimitOf | None
    schedule: str | None
    planned: float | None
    tags: list[str]
    headers: dict[str, str]


class ReservedTasks(Struct):
    """The reserved calls; an empty list when no call came in time."""

    jobs: list[ReservedTask]


class HeartbeatIn(Struct, forbid_unknown_fields=True):
    """Start the ttr again, with ``ttr`` as the new value, and report progress and log lines."""

    ttr: Seconds | None = None
    progress: Annotated[
        Amount | None, says("the work done, a whole number; total is all the work, if known")
    ] = None
    total: Amount = 0.0
    text: Annotated[
        str, says("what the task does now; kept with progress, and replaced by its next report")
    ] = ""
    log: Annotated[
        Annotated[list[str], Meta(max_length=100)],
        says("lines for the log of the job, which keeps the last 100"),
    ] = []


class HeartbeatOut(Struct):
    """``stop`` is the reason why the worker must stop the job now; null while it may go on."""

    stop: Literal["cancelled", "timeout"] | None


class CompleteIn(Struct, forbid_unknown_fields=True):
    """The result of the task: any JSON; with ``encoding`` base64, bytes as a base64 text."""

    result: Any = None
    encoding: Encoding = "json"


class Completed(CompleteIn, kw_only=True):
    """The receipt of a reserved task, and its result: see ``CompleteIn``."""

    receipt: str


class CompleteMany(Struct, forbid_unknown_fields=True):
    """The results of many tasks."""

    results: Annotated[list[Completed], Meta(max_length=10_000)]


class FailIn(Struct, forbid_unknown_fields=True):
    """The error of this attempt. With ``retry`` false it is the last attempt."""

    error: Annotated[Annotated[str, Meta(min_length=1)], says("one line, such as Type: message")]
    traceback: str = ""
    retry: bool = True
    delay: Annotated[
        Seconds | None, says("seconds until the job runs again, instead of its backoff")
    ] = None


class StoppedIn(Struct, forbid_unknown_fields=True):
    """The reason why the worker stopped the job."""

    reason: str = "it stopped on request"
