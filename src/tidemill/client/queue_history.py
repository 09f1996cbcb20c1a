"""The history of queues from snapshots: differences of totals, and states at a period's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import astuple

from tidemill.brokers.contract.history_rows import ALWAYS, HistoryRow
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.history_numbers import QueueNumbers, QueuePoint
from tidemill.client.queue_rows import (
    ALL_QUEUES,
    NOTHING,
    TOTALS,
    Counts,
    Latest,
    before_history,
    counts_of,
    latest_of,
)

Read = Callable[[str, int, int, int], list[HistoryRow]]
"""Reads the rows of a kind and a span between two times."""

ReadQueues = Callable[[], Sequence[QueueStats]]
"""Reads the queues as they are now."""


def queue_numbers(
    read: Read, stats: ReadQueues | None, since: int, span: int, now: float
) -> list[QueueNumbers]:
    """The numbers of all queues together, then of each, from ``since`` up to now.

    ``stats`` is None when the broker cannot read its queues. The newest numbers are read last. So
    no number of a period is newer than the numbers of the next period.
    """
    latest = latest_of(read("queue", ALWAYS, 0, 1))
    current = int(now) - int(now) % span
    found: dict[str, dict[int, Counts]] = {}
    for row in read("queue", span, since - span, current + span):
        found.setdefault(row.name, {})[row.at] = row.counts
    names = (found.keys() | latest.keys()) - {ALL_QUEUES}
    first = {name: _first(found.get(name, {}), latest.get(name)) for name in names}
    if stats is not None:
        queues = counts_of(stats())
        for name in first.keys() | queues.keys():
            counts = queues.get(name, NOTHING)
            if name not in first:
                first[name] = NOTHING if latest else before_history(counts)
            found.setdefault(name, {})[current] = counts
    ends = [(at, min(at + span, int(now))) for at in range(since, current + span, span)]
    lines = {name: _points(ends, found.get(name, {}), first[name]) for name in sorted(first)}
    return [
        QueueNumbers(name, span, points)
        for name, points in (("", _sum(ends, lines.values())), *lines.items())
    ]


def _first(rows: Mapping[int, Counts], latest: Latest | None) -> Counts:
    """The first known numbers of a queue, to compare later numbers with."""
    if rows:
        return rows[min(rows)]
    assert latest is not None  # a queue without a row in this time has not changed
    return latest.counts


def _points(
    ends: Sequence[tuple[int, int]], rows: Mapping[int, Counts], last: Counts
) -> list[QueuePoint]:
    """A point for each period. A period without a row adds nothing and keeps the last states.

    A total may fall, because a queue was deleted and made again. Then the point adds nothing.
    """
    points = []
    for at, end in ends:
        counts = rows.get(at, last)
        added = [max(0, now - then) for now, then in zip(counts, last[:TOTALS], strict=False)]
        *states, oldest = counts[TOTALS:]
        numbers = at, *added, *states, max(1, end - oldest) if oldest else 0
        points.append(QueuePoint(*numbers))
        last = counts
    return points


def _sum(
    ends: Sequence[tuple[int, int]], lines: Iterable[Sequence[QueuePoint]]
) -> list[QueuePoint]:
    """The sums of the points of all queues, and the age of the oldest job in all queues."""
    sums = []
    for (at, _), *points in zip(ends, *lines, strict=True):
        columns = [*zip(NOTHING, *[astuple(point)[1:] for point in points], strict=True)]
        numbers = at, *map(sum, columns[:-1]), max(columns[-1])
        sums.append(QueuePoint(*numbers))
    return sums
