"""Rows of numbers by period."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.history_rows import KEEP, HistoryRow, add_counts
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.tables import Rows, in_parts

_COLUMNS = ("kind", "span", "at", "name", "counts", "sample")
_KEY = _COLUMNS[:4]
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM tidemill_history WHERE "
_encode = msgspec.msgpack.Encoder().encode
_counts = msgspec.msgpack.Decoder(tuple[int, ...])
_PRUNE = 60.0  # seconds between two prunings


def add(jobs: StoredJobs, added: Sequence[HistoryRow]) -> None:
    """Add counts to rows; from time to time, delete old rows."""
    if not added:
        return
    stored = {_key(row): row for row in _read(jobs.rows, added)}
    for row in added:
        before = stored.get(_key(row))
        if before is not None:
            counts = add_counts(before.counts, row.counts)
            row = msgspec.structs.replace(row, counts=counts, sample=row.sample or before.sample)
        stored[_key(row)] = row
    _write(jobs.rows, list(stored.values()))
    if jobs.wall >= jobs.history_pruned + _PRUNE:
        prune(jobs)


def keep(jobs: StoredJobs, rows: Sequence[HistoryRow]) -> None:
    """Replace rows; a row without counts and without a sample is deleted."""
    kept = {_key(row): row for row in rows}
    for key, row in list(kept.items()):
        if not (row.counts or row.sample):
            del kept[key]
            jobs.rows.send(
                "DELETE FROM tidemill_history WHERE kind = %s AND span = %s AND at = %s "
                "AND name = %s",
                key,
            )
    _write(jobs.rows, list(kept.values()))


def find(
    rows: Rows, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
) -> list[HistoryRow]:
    """The rows of a kind and span, by time and name."""
    where, parameters = "kind = %s AND span = %s AND at >= %s AND at < %s", [kind, span, since]
    parameters.append(until)
    if name:
        where += " AND name = %s"
        parameters.append(name)
    found = [_row(row) for row in rows.execute(_SELECT + where, parameters)]
    return sorted(found, key=lambda row: (row.at, row.name))


def kinds(rows: Rows) -> list[tuple[str, int]]:
    found = rows.execute("SELECT DISTINCT kind, span FROM tidemill_history", [])
    return sorted((kind, span) for kind, span in found)


def _key(row: HistoryRow) -> tuple[str, int, int, str]:
    return row.kind, row.span, row.at, row.name


def _read(rows: Rows, wanted: Sequence[HistoryRow]) -> Iterator[HistoryRow]:
    for part in in_parts(list({_key(row): row for row in wanted}), 50):
        where = " OR ".join(["(kind = %s AND span = %s AND at = %s AND name = %s)"] * len(part))
        for row in rows.execute(_SELECT + where, [value for key in part for value in key]):
            yield _row(row)


def _row(row: Sequence[Any]) -> HistoryRow:
    kind, span, at, name, counts, sample = row
    return HistoryRow(kind, name, span, at, _counts.decode(bytes(counts)), bytes(sample))


def _write(rows: Rows, changed: Sequence[HistoryRow]) -> None:
    values = [(*_key(row), _encode(row.counts), row.sample) for row in changed]
    rows.upsert("tidemill_history", _KEY, _COLUMNS, values)


def prune(jobs: StoredJobs) -> None:
    """Delete old rows: rows of each span have their own age limit."""
    jobs.history_pruned = jobs.wall
    for span, seconds in KEEP.items():
        jobs.rows.send(
            "DELETE FROM tidemill_history WHERE span = %s AND at < %s", [span, jobs.wall - seconds]
        )
