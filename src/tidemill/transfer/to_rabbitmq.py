"""Move ready and scheduled jobs of a store into RabbitMQ, by puts.

The store is closed by then, so no worker takes its jobs. RabbitMQ gets the jobs in the order of
their acceptance, page by page. The store deletes each page that RabbitMQ has. After a kill the next
call goes on with the jobs that the store still has. So at most one page is put twice: at least
once. Finished jobs stay, also failed jobs. A retried job keeps its remaining attempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.topics import bindings
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope, LimitSettings
from tidemill.core.job import Record, State
from tidemill.errors import InvalidOption

PAGE = 500
_UNFINISHED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})


class Moved(msgspec.Struct):
    """The progress of a move, in jobs.

    Attributes:
        stayed: ids of jobs that stay, because the target has their id or key already.
        stayed_schedules: names of schedules that stay, because the target has their name already.
        left: the numbers of jobs, by kind, that stay because RabbitMQ cannot hold them.
    """

    total: int = 0
    done: int = 0
    running: int = 0
    stayed: list[str] = []
    schedules: int = 0
    stayed_schedules: list[str] = []
    left: dict[str, int] = {}

    @property
    def gone(self) -> int:
        return self.done - len(self.stayed)


def check_fits(source: Store, target: Store) -> None:
    """Raise InvalidOption, with kinds and counts, for jobs that the target cannot hold."""
    paused = _paused(source)
    reasons = Counter[str]({"paused queues": len(paused)} if paused else {}) + _bounds(source)
    for record in _unfinished(source):
        if why := _unfit(record.envelope):
            reasons[f"jobs {why}"] += 1
    parts = listed(reasons)
    if Feature.SCHEDULES in source.features and source.list_schedules(LAST_OWN, 1):
        parts.append("schedules")
    if parts:
        scheme = target.url.split("://", 1)[0]
        raise InvalidOption(
            f"{scheme}:// cannot hold these parts of {source.url}: {', '.join(parts)}; "
            "finish or delete the jobs, remove the schedules, resume and unbind the queues and "
            "lift their bounds first, or leave all of these behind with --leave"
        )


def put_all(source: Store, target: Store, progress: Moved, tell: Callable[[Moved], None]) -> None:
    """Move all jobs of a departed store that the target can hold; other jobs stay."""
    # Jobs of paused queues stay, too, because the target would run them.
    paused, reasons, fitting = _paused(source), _bounds(source), list[tuple[int, str]]()
    for record in _unfinished(source):
        why = _unfit(record.envelope)
        if not why and record.envelope.queue in paused:
            why = "of a paused queue"
        if why:
            reasons[f"jobs {why}"] += 1
        else:
            fitting.append((record.seq, record.envelope.id))
    fitting.sort()
    progress.left, progress.total = dict(reasons), len(fitting)
    for start in range(0, len(fitting), PAGE):
        ids = [job_id for _, job_id in fitting[start : start + PAGE]]
        found = source.wait_for(ids, 0)  # a list lacks bodies
        # A job that has ended since the list was read stays, as all finished jobs do.
        going = [_as_put(record) for record in found if record and not record.state.finished]
        point("move.putting")
        target.put(going)
        point("move.put")
        source.delete([envelope.id for envelope in going])
        progress.done += len(going)
        tell(progress)


def _as_put(record: Record) -> Envelope:
    e, most = record.envelope, record.max_attempts
    created = e.created or clock.wall()
    return replace(
        e,
        created=created,
        rank=record.rank,
        delay=0.0,
        at=record.due,
        expires=max(record.expires - created, 0.001) if record.expires else 0.0,
        retries=replace(e.retries, limit=max(0, most - record.attempt - 1) if most else -1),
    )


def listed(reasons: dict[str, int]) -> list[str]:
    return [f"{count:,} {what}" for what, count in sorted(reasons.items())]


def _unfinished(source: Store) -> Iterator[Record]:
    """The unfinished jobs, each once, also if a job comes due between two pages."""
    seen, cursor = set[str](), ""
    while True:
        page = source.find(Filter(states=_UNFINISHED), PAGE, cursor)
        for record in page.records:
            if record.envelope.id not in seen:
                seen.add(record.envelope.id)
                yield record
        cursor = page.cursor
        if not cursor:
            return


def _paused(source: Store) -> frozenset[str]:
    return frozenset(row.name for row in source.stats() if row.paused)


def _bounds(source: Store) -> Counter[str]:
    """The kinds of queue settings that RabbitMQ cannot hold, with their counts."""
    bounds = Counter[str]()
    if sizes := sum(bool(row.max_size) for row in source.stats()):
        bounds["queues with max_size"] = sizes
    if Feature.LIMITS in source.features:
        limits = with_limits(source, "limits").limits()
        if bounded := sum(limit.queue and limit.terms != LimitSettings() for limit in limits):
            bounds["limits of queues"] = bounded
    if Feature.TOPICS in source.features:
        table = bindings(source).table
        if bound := len({binding.queue for binding in table}):
            bounds["queues bound to topics"] = bound
    return bounds


def _unfit(job: Envelope) -> str:
    """The reason that RabbitMQ cannot hold a job; empty when it can."""
    if job.links is not None:
        return "that wait for other jobs or that other jobs wait for"
    if job.key:
        return "with a key"
    if job.limit is not None:
        return "with a limit"
    if "*" in job.queue or "#" in job.queue:
        return "of a queue with * or # in its name"
    return ""
