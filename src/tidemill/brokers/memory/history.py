"""Rows of numbers by period, in one dict."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.history_rows import KEEP, HistoryRow, added
from tidemill.brokers.memory.calls import Part
from tidemill.brokers.rules.transitions import Jobs


def add_history(jobs: Jobs, rows: Sequence[HistoryRow]) -> None:
    """Add to rows, and once a minute delete rows that are old."""
    for row in rows:
        key = row.kind, row.span, row.at, row.name
        jobs.history[key] = added(jobs.history.get(key), row)
    if rows and jobs.wall >= jobs.history_pruned + 60.0:
        prune_history(jobs)


def prune_history(jobs: Jobs) -> None:
    jobs.history_pruned = jobs.wall
    for row in list(jobs.history.values()):
        if row.span in KEEP and row.at < jobs.wall - KEEP[row.span]:
            del jobs.history[row.kind, row.span, row.at, row.name]


class History(Part):
    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        with self._lock:
            rows = list(self._jobs.history.values())
        found = [
            row
            for row in rows
            if (row.kind, row.span) == (kind, span)
            and since <= row.at < until
            and name in ("", row.name)
        ]
        return sorted(found, key=lambda row: (row.at, row.name))

    def history_kinds(self) -> list[tuple[str, int]]:
        with self._lock:
            return sorted({(row.kind, row.span) for row in self._jobs.history.values()})

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        with self._lock:
            for row in rows:
                key = row.kind, row.span, row.at, row.name
                if row.counts or row.sample:
                    self._jobs.history[key] = row
                else:
                    self._jobs.history.pop(key, None)
