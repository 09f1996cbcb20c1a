"""Tasks in the hands of workers that speak HTTP, as requests and answers have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from tidemill.server.shapes.jobs import LimitOf
from tidemill.server.shapes.terms import LONGEST_POLL, Encoding, Name, Seconds, Thousand

MOST_NAMES = 100
"""Tasks that one request names at most."""

Amount = Annotated[float, Meta(ge=0, le=1e15)]


class ReserveTasksIn(Struct, forbid_unknown_fields=True):
    """Take calls of these tasks, from these queues."""

    tasks: Annotated[list[Name], Meta(min_length=1, max_length=MOST_NAMES)]
    queues: Annotated[list[Name], Meta(min_length=1, max_length=1000)] = field(
        default_factory=lambda: ["default"]
    )
    count: Thousand = 1
    timeout: Annotated[float, Meta(ge=0, le=LONGEST_POLL)] = 0.0
    order: Literal["strict", "fair", "merged"] = "strict"


class ReservedTask(Struct, kw_only=True):
    """A call taken. To be completed or failed with its receipt, or renewed, in ``ttr`` seconds."""

    receipt: str
    id: str
    queue: str
    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    attempt: int
    max_attempts: int
    losses: int
    ttr: float
    timeout: float | None
    created: float
    priority: float
    key: str | None
    limit: LimitOf | None
    schedule: str | None
    planned: float | None
    tags: list[str]
    headers: dict[str, str]


class ReservedTasks(Struct):
    """What was there; empty when nothing came in time."""

    jobs: list[ReservedTask]


class HeartbeatIn(Struct, forbid_unknown_fields=True):
    """The worker lives: the ttr begins anew, or with so many seconds. What it has done so far."""

    ttr: Seconds | None = None
    progress: Amount | None = None
    total: Amount = 0.0
    log: Annotated[list[str], Meta(max_length=100)] = []


class HeartbeatOut(Struct):
    """``stop`` says why the worker is to stop the job now; null while it is to go on."""

    stop: Literal["cancelled", "timeout"] | None


class CompleteIn(Struct, forbid_unknown_fields=True):
    """What the task returned: any JSON; with ``encoding`` base64, a text that stands for bytes."""

    result: Any = None
    encoding: Encoding = "json"


class FailIn(Struct, forbid_unknown_fields=True):
    """Why this attempt failed. ``retry`` false makes it the last."""

    error: Annotated[str, Meta(min_length=1)]
    traceback: str = ""
    retry: bool = True
    delay: Seconds | None = None


class StoppedIn(Struct, forbid_unknown_fields=True):
    """Why it stopped."""

    reason: str = "it stopped when it was asked to"
