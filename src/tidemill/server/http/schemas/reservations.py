"""Schemas of reserved messages and tasks in requests and answers."""

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
    OutEncoding,
    Seconds,
    says,
)


class ReserveIn(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reserve messages of these queues, in this ``order``."""

    queues: Annotated[list[Name], Meta(min_length=1, max_length=1000)]
    count: MostReserved = 1
    timeout: FirstWait = 0.0
    order: Order = "strict"


class Reserved(Struct, kw_only=True):
    """A reserved message. Settle it with its receipt within ``ttr`` seconds."""

    receipt: str
    id: str
    queue: str
    body: Any
    encoding: OutEncoding
    attempt: int
    ttr: float | None
    created: float
    priority: float
    key: str | None
    tags: list[str]
    headers: dict[str, str]


class ReservedMany(Struct):
    """The reserved messages; an empty list when no message came in time."""

    jobs: list[Reserved]


class ReleaseIn(Struct, forbid_unknown_fields=True):
    """Release after ``delay`` seconds. With an ``error`` the attempt counts."""

    delay: Seconds = 0.0
    error: str | None = None


class TouchIn(Struct, forbid_unknown_fields=True):
    """Start the ttr again. ``ttr`` sets a new ttr, in seconds."""

    ttr: Seconds | None = None


class BuryIn(Struct, forbid_unknown_fields=True):
    """The reason why the job cannot be done."""

    reason: str = "buried"


class Receipts(Struct, forbid_unknown_fields=True):
    """The receipts of reservations."""

    receipts: Annotated[list[str], Meta(max_length=10_000)]


class ReleaseMany(Receipts):
    """The receipts of reservations, and how to release them: see ``ReleaseIn``."""

    delay: Seconds = 0.0
    error: str | None = None


class TouchMany(Receipts):
    """The receipts of reservations, and their new ttr, if it changes."""

    ttr: Seconds | None = None


class BuryMany(Receipts):
    """The receipts of reservations, and the reason why these jobs cannot be done."""

    reason: str = "buried"


# -- tasks ----------------------------------------------------------------------------------------

MOST_NAMES = 100  # the most tasks that one request may name

Amount = Annotated[float, Meta(ge=0, le=1e15)]


class ReserveTasksIn(ReserveIn, kw_only=True):
    """Reserve calls of these tasks, from these queues."""

    tasks: Annotated[
        Annotated[list[Name], Meta(min_length=1, max_length=MOST_NAMES)],
        says("the names of the tasks that the worker knows"),
    ]
    queues: Annotated[
        list[Name],
        Meta(min_length=1, max_length=1000, description="the queues; default: the queue default"),
    ] = field(default_factory=lambda: ["default"])


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
