"""What of a store can go to a broker that only carries jobs: what it is to run, and what failed.

Such a broker takes jobs one behind the other, so they go in the order of their acceptance, and then
what failed in the order in which it did. It notes how far that was after each page; killed in
between, the next call goes on there, and at worst the last page is there twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from tidemill.brokers.base import Broker, Departure, Feature, Filter
from tidemill.brokers.draining import Contents, draining
from tidemill.brokers.limiting import limiting
from tidemill.brokers.unknown import arriving
from tidemill.crash import point
from tidemill.errors import InvalidOption
from tidemill.gate import Terms
from tidemill.job import Record, State
from tidemill.moved import Moved

__all__ = ["check_fits", "listed", "pour"]

PAGE = 500
_UNFINISHED = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})


def check_fits(source: Broker, target: Broker) -> None:
    """Refuse a source that has what the target cannot carry. What failed may stay.

    Raises:
        InvalidOption: it has; the sentence says what, and how many of each.
    """
    contents, paused = draining(target), _paused(source)
    reasons = Counter[str]({"paused queues": len(paused)} if paused else {}) + _bounds(source)
    for record in _of(source, _UNFINISHED):
        reasons.update(_unfit(contents, record, ()))
    parts = listed(reasons)
    if Feature.SCHEDULES in source.features and source.list_schedules("", 1):
        parts.append("schedules")
    if parts:
        scheme = target.url.split("://", 1)[0]
        raise InvalidOption(
            f"{scheme}:// cannot carry what {source.url} has: {', '.join(parts)}; "
            "finish or delete them first (of queues: resume them, lift what bounds them), "
            "or leave them behind with --leave"
        )


def pour(
    source: Broker,
    target: Broker,
    departure: Departure,
    progress: Moved,
    tell: Callable[[Moved], None],
) -> None:
    """Have the target take all that it can of a sealed store; what it cannot stays.

    Jobs of paused queues stay, too: there they would run.
    """
    contents, paused, reasons = draining(target), _paused(source), _bounds(source)
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
        records = [arriving(record) for record in found if record is not None]
        target.adopt(departure, records, str(start + len(ids)))
        point("move.adopted")
        progress.done += len(ids)
        tell(progress)


def listed(reasons: dict[str, int]) -> list[str]:
    """How many of each, for a sentence."""
    return [f"{count:,} {what}" for what, count in sorted(reasons.items())]


def _of(source: Broker, states: frozenset[State]) -> Iterator[Record]:
    cursor = ""
    while True:
        page = source.find(Filter(states=states), PAGE, cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return


def _paused(source: Broker) -> frozenset[str]:
    return frozenset(row.name for row in source.stats() if row.paused)


def _bounds(source: Broker) -> Counter[str]:
    """What holds for queues of a store, and for nothing that only carries jobs; how many each."""
    bounds = Counter[str]()
    if sizes := sum(bool(row.max_size) for row in source.stats()):
        bounds["queues with max_size"] = sizes
    if Feature.LIMITS in source.features:
        limits = limiting(source, "limits").limits()
        if bounded := sum(limit.queue and limit.terms != Terms() for limit in limits):
            bounds["limits of queues"] = bounded
    return bounds


def _unfit(contents: Contents, record: Record, paused: Collection[str]) -> list[str]:
    """What a carrier of jobs cannot keep of one, with what it is; nothing when it can carry it."""
    why, failed = contents.unfit(record.envelope), ""
    if record.state is State.FAILED:
        failed = "failed "
    elif not why and record.envelope.queue in paused:
        why = "of a paused queue"
    return [f"{failed}jobs {why}"] if why else []
