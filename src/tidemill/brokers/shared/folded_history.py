"""History whose rows are summed by clients, so that adding a row costs the store little.

Steps append rows to a list. A client reads the list and the stored sums, and stores new sums in
place of the rows. The store counts these changes, and a client names the count that it has read. If
another client has changed sums meanwhile, the store refuses the change, and this client reads
again.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow, added

FOLD_MOST = 1000  # entries that are summed, and rows that are replaced, at a time

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(HistoryRow).decode

Key = tuple[int, int, str, str]  # span, time, kind and name


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


class FoldedHistory(abc.ABC):
    """The rows of one store: a list, and the sums."""

    @abc.abstractmethod
    def added(self, most: int) -> Added:
        """The first entries of the list."""

    @abc.abstractmethod
    def sums(self, keys: Sequence[Key]) -> tuple[Any, list[HistoryRow | None]]:
        """The store's count of changes, and the stored sums."""

    @abc.abstractmethod
    def change(self, added: Added, sums: dict[Key, HistoryRow], *, durable: bool) -> bool:
        """Store sums, and drop entries of the list; a sum without numbers and sample is deleted.

        False when ``added.changes`` is not the latest count: then nothing was stored or dropped. A
        ``durable`` change waits for the replicas that the URL asks for.
        """

    def keep(self, rows: Sequence[HistoryRow]) -> None:
        """Replace rows, or delete rows without counts and without a sample."""
        for start in range(0, len(rows), FOLD_MOST):
            some = {key_of(row): row for row in rows[start : start + FOLD_MOST]}
            while not self._change(some):
                pass  # repeat while other clients change sums, or more rows must be summed first

    def fold(self) -> None:
        """Store the sums of all added rows, unless another client does the same."""
        while not self._change({}):
            pass

    def _change(self, kept: dict[Key, HistoryRow]) -> bool:
        """Store the sums of added rows, and then replace rows; False if more calls are needed."""
        found = self.added(FOLD_MOST)
        if not found.rows and not kept:
            return True
        new = sum_rows(found.rows)
        changes, stored = self.sums([*new]) if new else (found.changes, [])
        if changes != found.changes:
            return False
        pairs = zip(new.items(), stored, strict=True)
        sums = {key: added(before, row) for (key, row), before in pairs}
        if not found.more:
            sums |= kept
        return self.change(found, sums, durable=bool(kept)) and not found.more


def key_of(row: HistoryRow) -> Key:
    return row.span, row.at, row.kind, row.name


def sum_rows(rows: Iterable[HistoryRow]) -> dict[Key, HistoryRow]:
    """The sums of rows by key. The rows come in order, so the sum keeps the latest sample."""
    sums: dict[Key, HistoryRow] = {}
    for row in rows:
        key = key_of(row)
        sums[key] = added(sums.get(key), row)
    return sums


def encoded_sum(row: HistoryRow) -> bytes:
    """A sum as stored; empty for a sum to delete."""
    return encode(row) if row.counts or row.sample else b""


def rows_between(
    rows: Iterable[HistoryRow], kind: str, span: int, since: int, until: int, name: str
) -> list[HistoryRow]:
    """The rows of a time range; an empty ``name`` means all names."""
    return [
        row
        for row in rows
        if (row.kind, row.span) == (kind, span)
        and since <= row.at < until
        and name in ("", row.name)
    ]
