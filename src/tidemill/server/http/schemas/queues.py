"""Schemas of queues and limits in requests and answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from tidemill.server.http.schemas.types import Bound, Count, Positive, Rate, Seconds, Window, says


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


class QueueOut(Totals, kw_only=True):
    """A queue in numbers. Totals count since the store was created, or the queue last deleted.

    A number is null when the broker cannot count it.

    ``oldest`` is also null when no job is ready. ``consumers`` is present when the broker counts
    consumers and little else.
    """

    name: str
    size: int | None
    oldest: float | None
    paused: bool
    max_size: int
    consumers: int | UnsetType = UNSET


class Queues(Struct):
    """All queues, by name."""

    queues: list[QueueOut]


class QueueIn(Struct, forbid_unknown_fields=True):
    """The settings of a queue to change."""

    paused: bool | None = None
    max_size: Bound | None = None


class DeleteQuery(Struct, forbid_unknown_fields=True):
    """With ``force`` the jobs of the queue are deleted, too."""

    force: bool = False


class PurgeQuery(Struct, forbid_unknown_fields=True):
    """With ``now`` the jobs are deleted for good."""

    now: bool = False


class PurgeOut(Struct):
    """A purge that can be restored.

    ``at`` is its time, and ``jobs`` the number of jobs that it keeps; 0 when it was interrupted.
    """

    id: str
    at: float
    jobs: int


class PurgesOut(Struct):
    """The purges of a queue, the latest first."""

    purges: list[PurgeOut]


class RestoreIn(Struct, forbid_unknown_fields=True):
    """The id of the purge; without an id, the latest purge."""

    purge: Annotated[str, Meta(max_length=64)] = ""


class RestoredOut(Struct):
    """The number of restored jobs, and of jobs that stay purged."""

    count: int
    left: int


class RetryIn(Struct, forbid_unknown_fields=True):
    """The most jobs to retry, the newest first."""

    count: Count = 1000


class Number(Struct):
    """The number of jobs."""

    count: int


class BreakerIn(Struct, forbid_unknown_fields=True):
    """A circuit breaker: ``failures`` in a row pause the queue for ``pause`` seconds."""

    failures: Positive
    pause: Seconds = 30.0


class LimitIn(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of a limit to change. Null removes a setting; a missing field changes nothing.

    Rates are texts such as ``10/s``, ``100/m`` or ``10/30s``.
    """

    rate: Annotated[
        Rate | UnsetType | None,
        says("the rate at which jobs may start, such as 10/s, 100/m or 10/30s"),
    ] = UNSET
    burst: Annotated[
        Annotated[float, Meta(ge=1, le=1e9)] | UnsetType | None,
        says("jobs that may start at once; 409 if the limit has no rate and the request has none"),
    ] = UNSET
    window: Annotated[
        Window | UnsetType | None,
        says("jobs that may start in any period of this length, such as 100/m"),
    ] = UNSET
    concurrency: Annotated[Bound | UnsetType | None, says("jobs that may run at the same time")] = (
        UNSET
    )


class QueueLimitIn(LimitIn):
    """The settings of a queue's limit to change. Such a limit may also have a breaker."""

    breaker: BreakerIn | UnsetType | None = UNSET


class BreakerOut(Struct):
    """The settings of a breaker: see ``BreakerIn``."""

    failures: int
    pause: float


class LimitOut(Struct, kw_only=True):
    """A limit in numbers. ``queue`` is true for the limit of a queue.

    ``failures`` is the number of failures in a row, ``keys`` the number of known keys. After
    ``starts_in`` seconds a job may start; null when that is not known.
    """

    name: str
    queue: bool
    rate: str | None
    burst: float | None
    window: str | None
    concurrency: int | None
    breaker: BreakerOut | None
    by_hand: bool
    running: int
    failures: int
    keys: int
    starts_in: float | None


class LimitsOut(Struct):
    """All limits, the limits of queues first."""

    limits: list[LimitOut]
