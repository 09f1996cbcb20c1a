"""Move ready, scheduled and failed jobs of a store into a message broker.

A message broker takes jobs one after the other. So first ready and scheduled jobs go in the order
of their acceptance. Then failed jobs go in the order of their ends. The message broker stores the
cursor after each page. After a kill, the next call continues at this cursor. Then the jobs of at
most one page exist twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from tidemill.brokers.contract.carried_jobs import CarriedJobs, carried_jobs
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.store import Store
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.generic.topics import bindings
from tidemill.core.crash_points import point
from tidemill.core.errors import InvalidOption
from tidemill.core.job import Record, State
from tidemill.core.limit_settings import LimitSettings
from tidemill.transfer.progress import Moved

PAGE = 500
_UNFINISHED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})


def check_fits(source: Store, target: Store) -> None:
    """Refuse a source with jobs that the target cannot hold, except failed jobs, which may stay.

    Raises:
        InvalidOption: the source has such jobs; the message lists their kinds and counts.
    """
    contents, paused = carried_jobs(target), _paused(source)
    reasons = Counter[str]({"paused queues": len(paused)} if paused else {}) + _bounds(source)
    for record in _of(source, _UNFINISHED):
        reasons.update(_unfit(contents, record, ()))
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


def fill_carrier(
    source: Store,
    target: Store,
    departure: Departure,
    progress: Moved,
    tell: Callable[[Moved], None],
) -> None:
    """Move all jobs of a sealed store that the target can hold; other jobs stay.

    Jobs of paused queues stay, too, because the target would run them.
    """
    contents, paused, reasons = carried_jobs(target), _paused(source), _bounds(source)
    fitting: list[tuple[float, int, str]] = []
    for record in _of(source, _UNFINISHED | {State.FAILED}):
        if why := _unfit(contents, record, paused):
            reasons.update(why)
        else:
            fitting.append((record.finished, record.seq, record.envelope.id))
    fitting.sort()
    progress.left = dict(reasons)
    progress.total = len(fitting)
    for start in range(int(target.adopted(departure.mark) or 0), len(fitting), PAGE):
        ids = [job_id for *_, job_id in fitting[start : start + PAGE]]
        found = source.wait_for(ids, 0)
        point("move.adopting")
        records = [record for record in found if record is not None]
        target.adopt(departure, records, str(start + len(ids)))
        point("move.adopted")
        progress.done += len(ids)
        tell(progress)


def listed(reasons: dict[str, int]) -> list[str]:
    """The kinds of jobs with their counts, for an error message."""
    return [f"{count:,} {what}" for what, count in sorted(reasons.items())]


def _of(source: Store, states: frozenset[State]) -> Iterator[Record]:
    cursor = ""
    while True:
        page = source.find(Filter(states=states), PAGE, cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return


def _paused(source: Store) -> frozenset[str]:
    return frozenset(row.name for row in source.stats() if row.paused)


def _bounds(source: Store) -> Counter[str]:
    """The kinds of queue settings that a message broker cannot hold, with their counts."""
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


def _unfit(contents: CarriedJobs, record: Record, paused: Collection[str]) -> list[str]:
    """The reason that a message broker cannot hold a job; an empty list when it can."""
    why, failed = contents.unfit(record.envelope), ""
    if record.state is State.FAILED:
        failed = "failed "
    elif not why and record.envelope.queue in paused:
        why = "of a paused queue"
    return [f"{failed}jobs {why}"] if why else []
