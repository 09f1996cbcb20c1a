"""The history of queues: snapshots of their totals, and the differences of snapshots.

A worker that has acted in a minute stores a snapshot soon after the minute ends, and a server does
so in every minute. The first of them stores the snapshot; the others find that the minute has one.
An idle worker stores no snapshot. If two processes store one minute at the same moment, the last
writer's rows stay. Sums over several minutes are exact all the same.

A snapshot stores the queues that have changed since the previous snapshot. For such a queue it
stores a row by minute, a row by hour, and a row without a period. The row without a period has the
latest numbers, followed by their minute. The next snapshot compares its numbers with these rows.

If the queue did not change in the previous minute, the snapshot also stores the old numbers as a
row of that minute. A reader starts from the numbers of the first row that it finds. So a reader
needs no older row, and an idle queue costs no rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import astuple

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, MINUTE, HistoryRow, join_name
from tidemill.brokers.contract.inspection import QueueStats, is_own
from tidemill.brokers.contract.store import Store
from tidemill.client.history_numbers import QueueNumbers, QueuePoint
from tidemill.core.clock import clock
from tidemill.core.errors import BrokerUnavailable, TidemillError
from tidemill.core.rollup import QUEUE_STATES, QUEUE_TOTALS

log = logging.getLogger("tidemill")

Counts = tuple[int, ...]
"""The totals, the states, and the time since which the oldest job is ready (0 without one)."""

TOTALS = len(QUEUE_TOTALS)
"""The number of totals, which come first."""

NOTHING: Counts = (0,) * (TOTALS + len(QUEUE_STATES) + 1)
"""The numbers of a queue that does not exist."""

ALL_QUEUES = join_name("", "")
"""The name of a row without counts, which has the minute of the latest snapshot. No queue has this
name."""

_RAN = slice(1, 4)  # succeeded, failed, retried

_LATE = 0.05
"""A snapshot is due this many seconds after its minute, because clocks differ a little."""

_NEEDS = {Feature.HISTORY, Feature.INSPECT}

Read = Callable[[str, int, int, int], list[HistoryRow]]
"""Reads the rows of a kind and a span between two times."""

ReadQueues = Callable[[], Sequence[QueueStats]]
"""Reads the queues as they are now."""


class Latest(NamedTuple):
    """The numbers of a queue in the latest snapshot with a row of the queue, and the minute."""

    counts: Counts
    at: int


def counts_of(stats: Iterable[QueueStats]) -> dict[str, Counts]:
    """The numbers of each queue as it is now."""
    names: Sequence[str] = (*QUEUE_TOTALS, *QUEUE_STATES)
    return {
        one.name: (*(getattr(one, name) for name in names), int(one.oldest))
        for one in stats
        if not is_own(one.name)
    }


def before_history(counts: Counts) -> Counts:
    """The numbers of a queue before the first snapshot of a store.

    If no job of the queue has run yet, all numbers before it were 0. Otherwise a move brought jobs
    that had ended. Then the result is the present numbers, so that the first snapshot adds nothing.
    """
    return counts if any(counts[_RAN]) else NOTHING


def latest_of(rows: Iterable[HistoryRow]) -> dict[str, Latest]:
    """The latest numbers by queue, from the rows without a period."""
    return {row.name: Latest(row.counts[:-1], row.counts[-1]) for row in rows}


def changed_rows(
    latest: Mapping[str, Latest], counts: Mapping[str, Counts], minute: int
) -> list[HistoryRow]:
    """The rows of queues that have changed; ``counts`` are the numbers at the end of a minute."""
    changed: list[HistoryRow] = []
    for name in counts.keys() | (latest.keys() - {ALL_QUEUES}):
        now, known = counts.get(name), latest.get(name)
        if now is None or known is None or now != known.counts:
            changed += _rows(name, now, known, minute, begins=not latest)
    return changed


def _rows(
    name: str, now: Counts | None, known: Latest | None, minute: int, *, begins: bool
) -> Iterator[HistoryRow]:
    counts = now or NOTHING
    before = known or Latest(before_history(counts) if begins else NOTHING, 0)
    for span in (MINUTE, HOUR):
        at = minute - minute % span
        if before.at - before.at % span < at - span:
            yield HistoryRow("queue", name, span, at - span, before.counts)
        yield HistoryRow("queue", name, span, at, counts)
    # A row without counts deletes the stored row, because the queue no longer exists.
    yield HistoryRow("queue", name, ALWAYS, 0, () if now is None else (*counts, minute))


# -- storing ---------------------------------------------------------------------------------------


class QueueSnapshots:
    """The snapshots that one process stores."""

    def __init__(self) -> None:
        self._due = 0.0  # wall time; at once, since later snapshots are compared with the first

    def acted(self) -> None:
        """Record that this process did something with jobs in this minute."""
        self._due = min(self._due, _minute_of(clock.wall()) + MINUTE + _LATE)

    def due_in(self) -> float:
        """Seconds until the next snapshot is due; infinity until the process acts."""
        return max(0.0, self._due - clock.wall())

    def keep(self, broker: Store, *, ending: bool = False) -> None:
        """Store the snapshot that is due, if any: the totals at the end of the minute before now.

        Give ``ending`` when the process ends: then the snapshot of this minute is stored early.

        Raises:
            BrokerUnavailable: the store cannot be reached. The next try comes a minute later.
        """
        now = clock.wall()
        if now < self._due and not (ending and self._due < float("inf")):
            return
        self._due = now + MINUTE
        if broker.features.issuperset(_NEEDS):
            try:
                _store(broker, now, ending)
            except BrokerUnavailable:
                raise
            except TidemillError as error:
                log.warning("the totals of queues are not kept for this minute: %s", error)
        self._due = float("inf")


def _store(broker: Store, now: float, ending: bool) -> None:
    minute = _minute_of(now) - (0 if ending else MINUTE)
    history = with_history(broker, "a snapshot of the queues")
    latest = latest_of(history.history("queue", ALWAYS, 0, 1))
    if not ending and ALL_QUEUES in latest and latest[ALL_QUEUES].at >= minute:
        return  # another process has stored it
    rows = changed_rows(latest, counts_of(broker.stats()), minute)
    if not ending and (rows or not latest):  # after ``ending``, others store this minute again
        rows.append(HistoryRow("queue", ALL_QUEUES, ALWAYS, 0, (minute,)))
    if rows:
        history.keep_history(rows)


def _minute_of(now: float) -> int:
    return int(now) - int(now) % MINUTE


# -- reading ---------------------------------------------------------------------------------------


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
        numbers = [*map(sum, columns[:-1]), max(columns[-1])]
        sums.append(QueuePoint(at, *numbers))
    return sums
