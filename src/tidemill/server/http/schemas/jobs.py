"""Schemas of jobs in requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tidemill.server.http.schemas.types import (
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
    says,
)


class PublishOptions(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The options of each copy of a message. A missing option has the default of the queue."""

    delay: Annotated[Seconds | None, says("seconds until the job is ready")] = None
    at: Annotated[
        Epoch | None,
        says(
            "the time at which the job is ready, instead of a delay: epoch seconds, up to the year "
            "6325"
        ),
    ] = None
    priority: Annotated[Priority | None, says("-100 to 100, higher first")] = None
    ttr: Annotated[
        Seconds | None,
        says(
            "for a message: seconds in which it must be settled; 0: acknowledged when it is "
            "delivered"
        ),
    ] = None
    expires: Annotated[
        Seconds | None, says("seconds in which the job must start; after them it ends as expired")
    ] = None
    retries: Annotated[Retries | None, says("attempts after the first attempt")] = None
    tags: Annotated[list[Name] | None, says("names by which the job can be found")] = None


class MessageOptions(PublishOptions):
    """The options of a message. A missing option has the default of the queue."""

    id: Annotated[Name | None, says("an id of your choice; an existing id is refused")] = None
    key: Annotated[Name | None, says("a unique key: at most one unfinished job has it")] = None
    on_conflict: Annotated[
        Conflict | None,
        says("with key: what a put does when another job has the key; default: keep"),
    ] = None
    hold: Annotated[
        Seconds | None,
        says(
            "with key, unless on_conflict is replace: seconds for which a succeeded job "
            "also keeps the key"
        ),
    ] = None
    max_wait: Annotated[
        Seconds | None,
        says(
            "with on_conflict replace: the longest time that replacing may delay the job, in "
            "seconds"
        ),
    ] = None
    limit: Annotated[Rate | None, says("a rate over all workers, such as 10/s or 10/30s")] = None


_At = Annotated[
    Epoch | Moment | None,
    says(
        "the time at which the job is ready, instead of a delay: epoch seconds, or a time with "
        "its zone; from 1970 to the year 6325"
    ),
]


class JobOptions(MessageOptions):
    """The options of a job. ``at`` may also be a time with its zone (RFC 3339)."""

    at: _At = None  # type: ignore[assignment]  # a wider type
    key: Annotated[
        Name | None,
        says(
            "a unique key: at most one unfinished job has it. A task may have a key of its own, "
            "which this key replaces"
        ),
    ] = None
    timeout: Annotated[Seconds | None, says("for a call: seconds that one run may take")] = None
    result_ttl: Annotated[
        Seconds | None, says("for a call: seconds for which the result of a success is kept")
    ] = None
    headers: Annotated[dict[str, str] | None, says("stored and delivered with the job")] = None


class JobIn(JobOptions):
    """A job: a message with a ``body`` for a ``queue``, or a call of a ``task``.

    ``body`` is any JSON; with ``encoding`` base64 it is bytes as a base64 text.
    """

    queue: Annotated[
        Name | None, says("the queue of the job; without it, the queue of the task, or default")
    ] = None
    body: Any = UNSET
    encoding: Encoding = "json"
    task: Name | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class BatchIn(Struct, forbid_unknown_fields=True):
    """Many jobs, stored all or none, in this order."""

    jobs: Annotated[list[JobIn], Meta(max_length=10_000)]


class Placed(Struct):
    """The job that exists after the put: a new job, or another job with the same key."""

    id: str
    placed: Literal["created", "kept", "replaced", "merged", "successor"]


class PlacedMany(Struct):
    """The jobs that exist after the put, in order."""

    jobs: list[Placed]


class LimitOf(Struct):
    """The limit that applies to a job."""

    name: str
    key: str


class AttemptOut(Struct):
    """One attempt of a job, in one of its runs."""

    run: int
    number: int
    worker: str
    leased: float | None
    started: float | None
    ended: float | None
    outcome: Literal["success", "retry", "fail", "release", "snooze", "cancelled", "expired"]
    error: str | None
    traceback: str | None


class LogLine(Struct):
    """A line that the job logged."""

    time: float
    line: str


class EventOut(Struct):
    """One event in the life of a job."""

    time: float | None
    what: str
    detail: str
    traceback: str | None


class JobFacts(Struct, kw_only=True):
    """A job without its log. A message has no task. ``max_attempts`` 0 means no limit.

    ``progress`` is the amount done and the total, which is 0 when unknown; ``progress_text`` is
    the text of that report.
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
    progress: list[int] | None
    progress_text: str | None
    attempts: list[AttemptOut]


class JobOut(JobFacts, kw_only=True):
    """A job with its log."""

    log: list[LogLine]


class JobTrail(JobOut, kw_only=True):
    """A job with all its events, an explanation of its state, and its body or arguments."""

    trail: list[EventOut]
    explanation: str
    body: Any
    encoding: OutEncoding


class JobListed(JobFacts, kw_only=True):
    """A job in a list: no log, and its body or arguments only if the query has ``bodies``."""

    body: Any = UNSET
    encoding: OutEncoding | UnsetType = UNSET


class Jobs(Struct):
    """Jobs, newest first. The cursor is null when there are no more jobs."""

    jobs: list[JobListed]
    cursor: str | None


class Conditions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Conditions for jobs; all must hold."""

    queue: str = ""
    task: str = ""
    key: str = ""
    tag: Annotated[str, says("a tag of the job")] = ""
    group: Annotated[str, says("the id of a group, a chain or a flow, for all its jobs")] = ""
    search: Annotated[str, says("a text in the summary of the arguments or the body")] = ""


class JobQuery(Conditions, kw_only=True):
    """Conditions for jobs; all must hold. Of several ``state`` values, any one is enough."""

    state: list[StateName] = []
    limit: Annotated[Thousand, says("the most jobs; a shorter list may have a cursor for more")] = (
        100
    )
    cursor: Annotated[str, says("the cursor of the previous list; it continues that list")] = ""
    bodies: Annotated[bool, says("include bodies or arguments, of at most 16 jobs")] = False


class Matching(Conditions, kw_only=True):
    """Conditions for jobs: one of the states, and every other condition."""

    state: Annotated[list[StateName], Meta(min_length=1)]
    limit: Annotated[Count, says("the most jobs, the newest first")] = 1000


class CancelMatching(Matching):
    """Conditions for jobs. With ``terminate`` running jobs are ended at once."""

    terminate: bool = False


class RetryMatching(Matching):
    """Conditions for jobs. With ``force`` succeeded jobs run again, too."""

    force: bool = False


class AlterMatching(Matching):
    """Conditions for jobs, and the new priority, the queue to move the jobs to, or both."""

    to_priority: Priority | None = None
    to_queue: Name | None = None


class Acted(Struct):
    """The jobs that matched, and for each job whether it was changed.

    ``more`` is true when further jobs may match.
    """

    ids: list[str]
    done: list[bool]
    more: bool


class CancelIn(Struct, forbid_unknown_fields=True):
    """With ``terminate`` a running job is ended at once; else its worker is asked to stop it."""

    terminate: bool = False


class Ids(Struct, forbid_unknown_fields=True):
    """The ids of jobs."""

    ids: Annotated[list[Name], Meta(max_length=10_000)]


class CancelMany(Ids):
    """The ids of jobs. With ``terminate`` running jobs are ended at once."""

    terminate: bool = False


class RetryQuery(Struct, forbid_unknown_fields=True):
    """With ``force`` a succeeded job runs again; a job may take its key from a succeeded job."""

    force: bool = False


class RetryMany(Ids):
    """The ids of jobs. With ``force`` succeeded jobs run again, too."""

    force: bool = False


class AlterIn(Struct, kw_only=True, forbid_unknown_fields=True):
    """The new priority, the queue to move the job to, or both."""

    to_priority: Priority | None = None
    to_queue: Name | None = None


class AlterMany(Ids, kw_only=True):
    """The ids of jobs, and the new priority, the queue to move the jobs to, or both."""

    to_priority: Priority | None = None
    to_queue: Name | None = None


class Done(Struct):
    """For each job, in order, whether it was changed.

    False means that the job does not exist, or that its state does not allow the change.
    """

    done: list[bool]


class WaitQuery(Struct, forbid_unknown_fields=True):
    """The seconds to wait for the end of the job."""

    wait: Annotated[float, Meta(ge=0, le=LONGEST_POLL)] = 0.0


class ResultOut(Struct, kw_only=True):
    """The state of a job, and its result. ``result`` is null until the job has succeeded."""

    id: str
    state: StateName
    finished: float | None
    result: Any
    encoding: Annotated[OutEncoding, says("the encoding of result")]
    error: Annotated[str | None, says("the last error, as one line")]
    traceback: str | None


class PublishQuery(PublishOptions):
    """The options of a publish; all copies have them. ``mandatory``: 404 if no queue is bound."""

    mandatory: Annotated[bool, says("answer 404 when no queue is bound to the topic")] = False


class BindingsOut(Struct):
    """The patterns that a queue is bound to, in order."""

    bindings: list[str]
