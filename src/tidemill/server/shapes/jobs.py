"""Jobs as requests and answers have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tidemill.server.shapes.terms import (
    LONGEST_POLL,
    Conflict,
    Count,
    Encoding,
    Epoch,
    Moment,
    Name,
    OutEncoding,
    Priority,
    Rate,
    Retries,
    Seconds,
    StateName,
    Thousand,
)


class MessageOptions(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a message is put; those that are not given are as the queue has them."""

    id: Name | None = None
    delay: Seconds | None = None
    at: Epoch | None = None
    priority: Priority | None = None
    ttr: Seconds | None = None
    key: Name | None = None
    on_conflict: Conflict | None = None
    unique_for: Seconds | None = None
    max_wait: Seconds | None = None
    expires: Seconds | None = None
    retries: Retries | None = None
    limit: Rate | None = None
    tags: list[Name] | None = None


class JobOptions(MessageOptions):
    """The same in JSON, with those of tasks; ``at`` may be a time with its zone (RFC 3339)."""

    at: Epoch | Moment | None = None  # type: ignore[assignment]  # wider
    timeout: Seconds | None = None
    result_ttl: Seconds | None = None
    headers: dict[str, str] | None = None


class JobIn(JobOptions):
    """A job: a message with a ``body`` for a ``queue``, or a call of a ``task``.

    ``body`` is any JSON; with ``encoding`` base64, a text that stands for bytes.
    """

    queue: Name | None = None
    body: Any = UNSET
    encoding: Encoding = "json"
    task: Name | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class BatchIn(Struct, forbid_unknown_fields=True):
    """Many jobs, stored all or none, in order."""

    jobs: Annotated[list[JobIn], Meta(max_length=10_000)]


class Placed(Struct):
    """The job that now stands for what was put, and how that came to be."""

    id: str
    placed: Literal["created", "kept", "replaced", "merged", "successor"]


class PlacedMany(Struct):
    """The same of many, in order."""

    jobs: list[Placed]


class LimitOf(Struct):
    """The limit a job is subject to."""

    name: str
    key: str


class AttemptOut(Struct):
    """One attempt at a job, in one of its runs."""

    run: int
    number: int
    worker: str
    leased: float | None
    started: float | None
    ended: float | None
    outcome: Literal[
        "success", "retry", "fail", "release", "snooze", "cancelled", "expired", "carry", "unknown"
    ]
    error: str | None
    traceback: str | None


class LogLine(Struct):
    """A line the job logged."""

    time: float
    line: str


class EventOut(Struct):
    """One thing that happened to a job."""

    time: float | None
    what: str
    detail: str
    traceback: str | None


class JobOut(Struct, kw_only=True):
    """A job as it stands. A message has no task; ``max_attempts`` is 0 for no limit.

    ``progress`` is how much is done and of how much, 0 when that is not known. A job that is
    ``unknown`` is set aside until a worker comes that knows its task.
    """

    id: str
    queue: str
    task: str | None
    state: StateName
    priority: float
    sequence: int
    created: float
    due: float | None
    expires: float | None
    finished: float | None
    key: str | None
    limit: LimitOf | None
    tags: list[str]
    headers: dict[str, str]
    summary: str
    schedule: str | None
    planned: float | None
    run: int
    attempt: int
    max_attempts: int
    losses: int
    pending: int
    failures: int
    timeout: float | None
    ttr: float | None
    worker: str | None
    error: str | None
    cancelling: bool
    unknown: bool
    progress: list[float] | None
    attempts: list[AttemptOut]
    log: list[LogLine]


class JobTrail(JobOut, kw_only=True):
    """A job with all that happened to it, why it is where it is, and its body or arguments."""

    trail: list[EventOut]
    explanation: str
    body: Any
    encoding: OutEncoding


class JobListed(JobOut, kw_only=True):
    """A job in a list; with its body, or its arguments, where that was asked for."""

    body: Any = UNSET
    encoding: OutEncoding | UnsetType = UNSET


class Jobs(Struct):
    """Jobs, newest first; a null cursor means there are no more."""

    jobs: list[JobListed]
    cursor: str | None


class JobQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which jobs; every condition given must hold, and ``state`` may be given several times."""

    state: list[StateName] = []
    queue: str = ""
    task: str = ""
    key: str = ""
    tag: str = ""
    group: str = ""
    search: str = ""
    limit: Thousand = 100
    cursor: str = ""
    bodies: bool = False


class Matching(Struct, kw_only=True, forbid_unknown_fields=True):
    """Jobs in these states; every other condition given must hold, too."""

    state: Annotated[list[StateName], Meta(min_length=1)]
    queue: str = ""
    task: str = ""
    key: str = ""
    tag: str = ""
    group: str = ""
    search: str = ""
    limit: Count = 1000


class CancelMatching(Matching):
    """Which jobs, and whether what runs is ended at once."""

    terminate: bool = False


class KickMatching(Matching):
    """Which jobs, and whether those that succeeded run again, too."""

    force: bool = False


class Acted(Struct):
    """Which jobs matched, and for each whether it was done; ``more``: others may match."""

    ids: list[str]
    done: list[bool]
    more: bool


class CancelIn(Struct, forbid_unknown_fields=True):
    """``terminate`` ends what runs at once, instead of asking it to."""

    terminate: bool = False


class Ids(Struct, forbid_unknown_fields=True):
    """Which jobs."""

    ids: Annotated[list[Name], Meta(max_length=10_000)]


class CancelMany(Ids):
    """Which jobs, and how."""

    terminate: bool = False


class KickQuery(Struct, forbid_unknown_fields=True):
    """``force`` runs a job again that succeeded, or whose key another success holds."""

    force: bool = False


class KickMany(Ids):
    """Which jobs, and whether those that succeeded run again, too."""

    force: bool = False


class Done(Struct):
    """For each, in order, whether it was done; false: it is not there, or it was too late."""

    done: list[bool]


class WaitQuery(Struct, forbid_unknown_fields=True):
    """How long to wait for the end, in seconds."""

    wait: Annotated[float, Meta(ge=0, le=LONGEST_POLL)] = 0.0


class ResultOut(Struct, kw_only=True):
    """How a job ended, or where it is. ``result`` is null until it has succeeded."""

    id: str
    state: StateName
    finished: float | None
    result: Any
    encoding: OutEncoding
    error: str | None
    traceback: str | None
