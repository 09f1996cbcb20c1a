"""The store's calls for rows of history; ``sql/52_history.sql`` is the server's side.

:mod:`~tidemill.brokers.shared.folded_history` sums the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.postgres.encoding import blobs, ints, texts
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

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_decode_all = msgspec.msgpack.Decoder(list[HistoryRow]).decode


def pack_history(rows: Sequence[HistoryRow]) -> bytes:
    """The rows of a step as one value."""
    return encode(rows)


class HistoryTable(FoldedHistory):
    def __init__(self, session: Session) -> None:
        self._session = session

    def read(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        """The rows of a time range, by period and name."""
        types = "%s::text, %s::int, %s::bigint, %s::bigint, %s::text"
        found = self._rows(f"history_of({types})", [kind, span, since, until, name])
        sums = [decode(data) for is_sum, data in found if is_sum]
        new = (row for is_sum, data in found if not is_sum for row in _decode_all(data))
        news = rows_between(new, kind, span, since, until, name)
        if news:
            sums = list(sum_rows([*sums, *news]).values())
            sums.sort(key=lambda row: (row.at, row.name))
        return sums

    def kinds(self) -> list[tuple[str, int]]:
        self.fold()
        return sorted((kind, span) for kind, span in self._rows("history_kinds()", []))

    # -- the calls of folded_history ------------------------------------------------------------

    def added(self, most: int) -> Added:
        ((changes, numbers, packed),) = self._rows("added_history(%s::int)", [most])
        rows = [row for data in packed for row in _decode_all(data)]
        return Added(changes, numbers, rows, len(packed) == most)

    def sums(self, keys: Sequence[Key]) -> tuple[Any, list[HistoryRow | None]]:
        types = "%s::bigint[], %s::text[], %s::bigint[], %s::text[]"
        ((changes, stored),) = self._rows(f"history_sums({types})", _names(keys))
        return changes, [None if data is None else decode(data) for data in stored]

    def change(self, added: Added, sums: dict[Key, HistoryRow], *, durable: bool) -> bool:
        packed = [encoded_sum(row) for row in sums.values()]
        arguments = [added.changes, ints(added.entries), *_names(list(sums)), blobs(packed)]
        types = "bigint, bigint[], bigint[], text[], bigint[], text[], bytea[]"
        return bool(self._session.once("change_history", arguments, types, plain=True))

    def _rows(self, call: str, arguments: list[Any]) -> list[tuple[Any, ...]]:
        return self._session.query(
            f'SELECT * FROM "{self._session.address.schema}".{call}', arguments
        )


def _names(keys: Sequence[Key]) -> list[Any]:
    """Spans, kinds, times and names as arrays."""
    return [
        ints([span for span, *_ in keys]),
        texts([kind for _, _, kind, _ in keys]),
        ints([at for _, at, *_ in keys]),
        texts([name for *_, name in keys]),
    ]
