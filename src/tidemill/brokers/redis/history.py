"""Rows of history. ``lua/history.lua`` is the server's side.

:mod:`~tidemill.brokers.shared.folded_history` sums the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.shared.folded_history import (
    Added,
    FoldedHistory,
    Key,
    decode,
    encode,
    encoded_sum,
    rows_between,
    sum_rows,
)

_PERIODS_MOST = 200  # periods that one call reads


def pack_history(rows: Sequence[HistoryRow]) -> list[bytes]:
    """The rows of history of a step, as arguments."""
    return [b"%d" % len(rows), *map(encode, rows)]


class HistoryTable(FoldedHistory):
    def __init__(self, lines: ServerConnections) -> None:
        self._lines = lines
        self.unfolded = 0  # rows that steps of this process have added since its last fold

    def read(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        """The rows of a time range, by period and name. Each call reads some periods."""
        rows: list[HistoryRow] = []
        until = max(0, min(until, 1 << 52))  # scores are doubles
        where = b"%d" % span, kind.encode()
        while since < until:
            more = b"%d" % until, b"%d" % _PERIODS_MOST, name.encode()
            fresh, *found = self._lines.call("history", b"range", *where, b"%d" % since, *more)
            periods = [int(at) for at in found[::2]]
            end = periods[-1] + 1 if len(periods) == _PERIODS_MOST else until
            sums = [decode(data) for sums in found[1::2] for data in sums[1::2]]
            news = rows_between(map(decode, fresh), kind, span, since, end, name)
            rows += sum_rows([*sums, *news]).values()
            since = end
        return sorted(rows, key=lambda row: (row.at, row.name))

    def kinds(self) -> list[tuple[str, int]]:
        self.fold()
        found = self._lines.ask(b"SMEMBERS", self._lines.key + b":kinds")
        pairs = (name.decode().partition(":") for name in found)
        return sorted((kind, int(span)) for span, _, kind in pairs)

    def fold(self) -> None:
        self.unfolded = 0
        super().fold()

    # -- the calls of folded_history ------------------------------------------------------------

    def added(self, most: int) -> Added:
        changes, packed = self._lines.call("history", b"added", b"%d" % most)
        entries = b"%d" % len(packed)
        return Added(changes, entries, [decode(row) for row in packed], len(packed) == most)

    def sums(self, keys: Sequence[Key]) -> tuple[Any, list[HistoryRow | None]]:
        names = [part for key in keys for part in _name(key)]
        changes, *stored = self._lines.call("history", b"sums", *names)
        return changes, [decode(data) if data else None for data in stored]

    def change(self, added: Added, sums: dict[Key, HistoryRow], *, durable: bool) -> bool:
        args = [arg for key, row in sums.items() for arg in (*_name(key), encoded_sum(row))]
        args = [b"change", added.changes, added.entries, *args]
        return bool(self._lines.call("history_change", *args, once=True, replicated=durable))


def _name(key: Key) -> tuple[bytes, ...]:
    span, at, kind, name = key
    return b"%d" % span, b"%d" % at, kind.encode(), name.encode()
