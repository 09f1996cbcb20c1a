"""Rows of kind ``queue``: the numbers of queues that a snapshot stores.

A snapshot stores the queues that have changed since the previous snapshot. For such a queue it
stores a row by minute, a row by hour, and a row without a period. The row without a period has the
latest numbers, followed by their minute. The next snapshot compares its numbers with these rows.

If the queue did not change in the previous minute, the snapshot also stores the old numbers as a
row of that minute. A reader starts from the numbers of the first row that it finds. So a reader
needs no older row, and an idle queue costs no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, MINUTE, HistoryRow, join_name
from tidemill.brokers.contract.inspection import QueueStats, is_own
from tidemill.core.rollup import QUEUE_STATES, QUEUE_TOTALS

Counts = tuple[int, ...]
"""The totals, the states, and the age of the oldest ready job (0 without a ready job)."""

TOTALS = len(QUEUE_TOTALS)
"""The number of totals, which come first."""

WIDTH = TOTALS + len(QUEUE_STATES) + 1

NOTHING: Counts = (0,) * WIDTH
"""The numbers of a queue that does not exist."""

ALL_QUEUES = join_name("", "")
"""The name of the row that sums all queues. Every snapshot has the row; no queue has the name."""

_RAN = slice(1, 4)  # succeeded, failed, retried


class Latest(NamedTuple):
    """The numbers of a queue in the latest snapshot with a row of the queue, and the minute."""

    counts: Counts
    at: int


def counts_of(stats: Iterable[QueueStats], now: float) -> dict[str, Counts]:
    """The numbers of each queue as it is now."""
    return {one.name: _counts(one, now) for one in stats if not is_own(one.name)}


def _counts(stats: QueueStats, now: float) -> Counts:
    age = max(1, int(now - stats.oldest)) if stats.oldest else 0
    names: Sequence[str] = (*QUEUE_TOTALS, *QUEUE_STATES)
    return (*(getattr(stats, name) for name in names), age)


def later(counts: Counts, seconds: int) -> Counts:
    """The numbers of an unchanged queue some seconds later: only its oldest ready job is older."""
    age = counts[-1]
    return (*counts[:-1], max(1, age + seconds)) if age else counts


def before_history(counts: Counts) -> Counts:
    """The numbers of a queue before the first snapshot of a store.

    They are 0 if no job of the queue has run yet. If jobs have run, the earlier numbers are
    unknown, so the result is the present numbers: the first snapshot then adds nothing.
    """
    return counts if any(counts[_RAN]) else NOTHING


def latest_of(rows: Iterable[HistoryRow]) -> dict[str, Latest]:
    """The latest numbers by queue, from the rows without a period."""
    return {row.name: Latest(row.counts[:WIDTH], row.counts[WIDTH]) for row in rows}


def changed_rows(
    latest: Mapping[str, Latest], counts: Mapping[str, Counts], minute: int
) -> list[list[HistoryRow]]:
    """The rows of each queue that has changed; ``counts`` are the numbers at the end of a minute.

    A new age of the oldest job alone is no change, because this age always grows.
    """
    changed = []
    for name in counts.keys() | (latest.keys() - {ALL_QUEUES}):
        now, known = counts.get(name), latest.get(name)
        if now is None or known is None or now[:-1] != known.counts[:-1]:
            changed.append(list(_rows(name, now, known, minute, begins=not latest)))
    return changed


def _rows(
    name: str, now: Counts | None, known: Latest | None, minute: int, *, begins: bool
) -> Iterator[HistoryRow]:
    counts = now or NOTHING
    before = known or Latest(before_history(counts) if begins else NOTHING, 0)
    for span in (MINUTE, HOUR):
        at = minute - minute % span
        if before.at - before.at % span < at - span:
            idle = at - MINUTE - before.at if known else 0
            yield HistoryRow("queue", name, span, at - span, later(before.counts, idle))
        yield HistoryRow("queue", name, span, at, counts)
    # A row without counts deletes the stored row, because the queue no longer exists.
    yield HistoryRow("queue", name, ALWAYS, 0, () if now is None else (*counts, minute))


def rows_of_all(counts: Iterable[Counts], minute: int) -> list[HistoryRow]:
    """The rows that sum all queues. They also record that this minute has a snapshot."""
    columns = [*zip(NOTHING, *counts, strict=True)]
    total = (*map(sum, columns[:-1]), max(columns[-1]))
    return [
        HistoryRow("queue", ALL_QUEUES, MINUTE, minute, total),
        HistoryRow("queue", ALL_QUEUES, HOUR, minute - minute % HOUR, total),
        HistoryRow("queue", ALL_QUEUES, ALWAYS, 0, (*total, minute)),
    ]
