"""History whose rows are summed by clients, so that adding a row costs the store little.

Steps append rows to a list. A client reads the list and the stored sums, and stores new sums in
place of the rows. The store counts these changes, and a client names the count that it has read. If
another client has changed sums meanwhile, the store refuses the change, and this client reads
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow, added

FOLD_MOST = 1000
"""Entries of the list that are summed at a time, and rows that are replaced at a time."""

Key = tuple[int, int, str, str]
"""Span, time, kind and name."""


class Added(msgspec.Struct):
    """The first entries of the list.

    Attributes:
        changes: the store's count of changes.
        entries: tells the store which entries these are.
        rows: the rows of the entries, in order.
        more: True when the list may have more entries.
    """

    changes: Any
    entries: Any
    rows: list[HistoryRow]
    more: bool


class HistoryStore(Protocol):
    """The list and the sums of one store."""

    def added(self, most: int) -> Added:
        """The first entries of the list."""
        ...

    def sums(self, keys: Sequence[Key]) -> tuple[Any, list[HistoryRow | None]]:
        """The store's count of changes, and the stored sums."""
        ...

    def change(self, added: Added, sums: dict[Key, HistoryRow], *, durable: bool) -> bool:
        """Store sums, and drop entries of the list; a sum without numbers and sample is deleted.

        False when ``added.changes`` is not the latest count: then nothing was stored or dropped. A
        ``durable`` change waits for the replicas that the URL asks for.
        """
        ...


def keep(store: HistoryStore, rows: Sequence[HistoryRow]) -> None:
    """Replace rows, or delete rows without counts and without a sample."""
    for start in range(0, len(rows), FOLD_MOST):
        some = {key_of(row): row for row in rows[start : start + FOLD_MOST]}
        while not _change(store, some):
            pass  # repeat while other clients change sums, or more rows must be summed first


def fold(store: HistoryStore) -> None:
    """Store the sums of all added rows."""
    while not _change(store, {}):
        pass


def key_of(row: HistoryRow) -> Key:
    return row.span, row.at, row.kind, row.name


def sum_rows(rows: Iterable[HistoryRow]) -> dict[Key, HistoryRow]:
    """The sums of rows by key. The rows come in order, so the sum keeps the latest sample."""
    sums: dict[Key, HistoryRow] = {}
    for row in rows:
        key = key_of(row)
        sums[key] = added(sums.get(key), row)
    return sums


def _change(store: HistoryStore, kept: dict[Key, HistoryRow]) -> bool:
    """Store the sums of added rows, and then replace rows; False if more calls are needed."""
    found = store.added(FOLD_MOST)
    if not found.rows and not kept:
        return True
    new = sum_rows(found.rows)
    changes, stored = store.sums([*new]) if new else (found.changes, [])
    if changes != found.changes:
        return False
    sums = {key: added(before, row) for (key, row), before in zip(new.items(), stored, strict=True)}
    if not found.more:
        sums |= kept
    return store.change(found, sums, durable=bool(kept)) and not found.more
