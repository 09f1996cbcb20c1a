"""The history of queues from snapshots: differences of totals, and states at a period's end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidemill.brokers.contract.history_rows import ALWAYS, MINUTE, HistoryRow
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
    later,
    latest_of,
)

Read = Callable[[str, int, int, int], list[HistoryRow]]
"""Reads the rows of a kind and a span between two times."""

ReadQueues = Callable[[], Sequence[QueueStats]]
"""Reads the queues as they are now."""

_ADDED_NOTHING: Counts = (0,) * TOTALS


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
    first = {name: _first(found.get(name, {}), latest.get(name), span) for name in names}
    if stats is not None:
        queues = counts_of(stats(), now)
        for name in first.keys() | queues.keys():
            counts = queues.get(name, NOTHING)
            if name not in first:
                first[name] = Latest(NOTHING if latest else before_history(counts), current)
            found.setdefault(name, {})[current] = counts
    times = range(since, current + span, span)
    lines = {name: _points(times, found.get(name, {}), first[name]) for name in sorted(first)}
    return [
        QueueNumbers(name, span, [QueuePoint(*point) for point in points])
        for name, points in (("", _sum(times, lines)), *lines.items())
    ]


def _first(rows: Mapping[int, Counts], latest: Latest | None, span: int) -> Latest:
    """The first known numbers of a queue, with their period, to compare later numbers with."""
    if rows:
        return Latest(rows[min(rows)], min(rows))
    assert latest is not None  # a queue without a row in this time has not changed
    return Latest(latest.counts, latest.at + MINUTE - span)


def _points(times: Sequence[int], rows: Mapping[int, Counts], first: Latest) -> list[Counts]:
    """A point for each time. A time without a row adds nothing and keeps the last states.

    A total may fall, because a queue was deleted and made again. Then the point adds nothing.
    """
    points, (last, last_at) = [], first
    for at in times:
        counts = rows.get(at)
        if counts is None:
            points.append((at, *_ADDED_NOTHING, *later(last, at - last_at)[TOTALS:]))
        else:
            added = [max(0, now - then) for now, then in zip(counts, last[:TOTALS], strict=False)]
            points.append((at, *added, *counts[TOTALS:]))
            last, last_at = counts, at
    return points


def _sum(times: Sequence[int], lines: Mapping[str, Sequence[Counts]]) -> list[Counts]:
    """The sums of the points of all queues, and the age of the oldest job in all queues."""
    sums = []
    for place, at in enumerate(times):
        columns = [*zip(NOTHING, *(points[place][1:] for points in lines.values()), strict=True)]
        sums.append((at, *map(sum, columns[:-1]), max(columns[-1])))
    return sums
