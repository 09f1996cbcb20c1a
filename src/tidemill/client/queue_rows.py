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
"""The totals, the states, and the time since which the oldest job is ready (0 without one)."""

TOTALS = len(QUEUE_TOTALS)
"""The number of totals, which come first."""

NOTHING: Counts = (0,) * (TOTALS + len(QUEUE_STATES) + 1)
"""The numbers of a queue that does not exist."""

ALL_QUEUES = join_name("", "")
"""The name of a row without counts, which has the minute of the latest snapshot. No queue has this
name."""

_RAN = slice(1, 4)  # succeeded, failed, retried


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

    They are 0 if no job of the queue has run yet. Else jobs that have ended were moved here, so the
    result is the present numbers: the first snapshot then adds nothing.
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
