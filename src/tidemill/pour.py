"""What of a store can go to a broker that only carries jobs: what is ready and what is scheduled.

Such a broker takes jobs one behind the other, so they go in the order of their acceptance. It notes
how far that was after each page; killed in between, the next call goes on there, and at worst the
last page is there twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tidemill.brokers.base import Broker, Departure, Feature, Filter
from tidemill.crash import point
from tidemill.errors import InvalidOption
from tidemill.job import Record, State

if TYPE_CHECKING:
    from tidemill.move import Moved

__all__ = ["check_fits", "pour"]

PAGE = 500
_LEFT = frozenset({State.WAITING, State.SCHEDULED, State.READY, State.RUNNING})


def check_fits(source: Broker, target: Broker) -> None:
    """Refuse a source that has what the target cannot carry.

    Raises:
        InvalidOption: it has; the sentence says what, and how many of each.
    """
    reasons = Counter(why for record in _unfinished(source) if (why := _unfit(record)))
    parts = [f"{count:,} jobs {why}" for why, count in sorted(reasons.items())]
    if Feature.SCHEDULES in source.features and source.list_schedules("", 1):
        parts.append("schedules")
    if parts:
        scheme = target.url.split("://", 1)[0]
        raise InvalidOption(
            f"{scheme}:// cannot carry what {source.url} has: {', '.join(parts)}; "
            "finish or delete them first, or leave them behind with --leave"
        )


def pour(
    source: Broker,
    target: Broker,
    departure: Departure,
    progress: Moved,
    tell: Callable[[Moved], None],
) -> None:
    """Have the target take all that it can of a sealed store; what it cannot stays."""
    fitting: list[tuple[int, str]] = []
    for record in _unfinished(source):
        if _unfit(record):
            progress.left += 1
        else:
            fitting.append((record.seq, record.envelope.id))
    fitting.sort()
    progress.total = len(fitting)
    for start in range(int(target.adopted(departure.mark) or 0), len(fitting), PAGE):
        ids = [job_id for _, job_id in fitting[start : start + PAGE]]
        found = source.wait_for(ids, 0)
        point("move.adopting")
        target.adopt(departure, [r for r in found if r is not None], str(start + len(ids)))
        point("move.adopted")
        progress.done += len(ids)
        tell(progress)


def _unfinished(source: Broker) -> Iterator[Record]:
    cursor = ""
    while True:
        page = source.find(Filter(states=_LEFT), PAGE, cursor)
        yield from page.records
        cursor = page.cursor
        if not cursor:
            return


def _unfit(record: Record) -> str:
    """What a carrier of jobs cannot keep of one; empty when it can carry it."""
    envelope = record.envelope
    if envelope.links is not None:
        return "that wait for others, or others for them"
    if envelope.key:
        return "with a key"
    return "with a limit" if envelope.limit is not None else ""
