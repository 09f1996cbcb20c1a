"""Queues and limits as requests and answers have them."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from tidemill.server.shapes.terms import Bound, Count, Positive, Rate, Seconds, Window


class QueueOut(Struct, kw_only=True):
    """A queue in numbers. Totals count since the store was made, or the queue deleted.

    Null: the broker cannot tell.

    ``oldest`` is also null when nothing is ready; ``consumers`` is there where a broker can count
    them, and tell little else.
    """

    name: str
    size: int | None
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
    oldest: float | None
    paused: bool
    max_size: int
    carried: int
    consumers: int | UnsetType = UNSET


class Queues(Struct):
    """All queues, by name."""

    queues: list[QueueOut]


class QueueIn(Struct, forbid_unknown_fields=True):
    """What is to change of a queue."""

    paused: bool | None = None
    max_size: Bound | None = None


class DeleteQuery(Struct, forbid_unknown_fields=True):
    """``force`` deletes the jobs of the queue, too."""

    force: bool = False


class KickIn(Struct, forbid_unknown_fields=True):
    """How many at most, the newest first."""

    count: Count = 1000


class Number(Struct):
    """How many jobs that were."""

    count: int


class BreakerIn(Struct, forbid_unknown_fields=True):
    """So many failures in a row pause a queue for so many seconds."""

    failures: Positive
    pause: Seconds = 30.0


class LimitIn(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is to change of a limit; null lifts that part, what is not given stays.

    Rates are texts as ``10/s``, ``100/m``, ``10/30s``.
    """

    rate: Rate | UnsetType | None = UNSET
    burst: Annotated[float, Meta(ge=1, le=1e9)] | UnsetType | None = UNSET
    window: Window | UnsetType | None = UNSET
    concurrency: Bound | UnsetType | None = UNSET


class QueueLimitIn(LimitIn):
    """The same of a queue, which may have a breaker, too."""

    breaker: BreakerIn | UnsetType | None = UNSET


class BreakerOut(Struct):
    """A breaker as it is set: see ``BreakerIn``."""

    failures: int
    pause: float


class LimitOut(Struct, kw_only=True):
    """A limit in numbers; ``queue`` says whether it is a queue's.

    ``failures`` are those in a row that its breaker counts, ``keys`` how many it knows;
    ``opens_in`` is the seconds until it lets a job start, null when no time does that.
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
    opens_in: float | None


class LimitsOut(Struct):
    """All limits, those of queues first."""

    limits: list[LimitOut]
