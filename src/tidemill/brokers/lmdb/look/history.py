"""Rows of history in the main database, ordered by span, kind, period and name.

A key is ``h/``, the span, the kind, a zero byte, the period and the name. So a time range is one
walk of a cursor, and the oldest rows of a kind come first. A name that is too long for a key is
cut, and the hash of the name follows. The value has the whole row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import lmdb
import msgspec

from tidemill.brokers.contract.history_rows import KEEP, HistoryRow, added
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.record import encode

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.transitions import Transitions

_SPAN, _AT = struct.Struct(">I"), struct.Struct(">Q")
_decode = msgspec.msgpack.Decoder(HistoryRow).decode
_LONGEST = 511  # the most bytes of a key in LMDB
_HASH = 16


def add_history(commit: Transitions, rows: Sequence[HistoryRow]) -> None:
    """Add counts to rows of history; the end of the commit writes the sums."""
    for row in rows:
        key = _key(commit.store, row)
        commit.history[key] = added(commit.history.get(key), row)


def write_history(commit: Transitions) -> None:
    """Add the sums of this commit to the stored rows."""
    for key, row in commit.history.items():
        data = commit.txn.get(key)
        commit.txn.put(key, encode(added(_decode(data), row) if data is not None else row))


def keep_rows(commit: Transitions, rows: Sequence[HistoryRow]) -> None:
    """Replace rows, or delete rows without counts and without a sample."""
    # Added rows need room: the disk reserve is for verdicts.
    if any(row.counts or row.sample for row in rows):
        commit.store.room.check(sum(64 + len(row.name) + len(row.sample) for row in rows))
    for row in rows:
        key = _key(commit.store, row)
        commit.history.pop(key, None)
        if row.counts or row.sample:
            commit.txn.put(key, encode(row))
        else:
            commit.txn.delete(key)


def read_history(
    store: Store,
    txn: lmdb.Transaction[bytes],
    kind: str,
    span: int,
    since: int = 0,
    until: int = 1 << 40,
    name: str = "",
) -> list[HistoryRow]:
    """The rows of a time range, by period and name."""
    first, last = (_period(store, kind, span, at) for at in (max(0, since), max(0, until)))
    cursor, rows = txn.cursor(), list[HistoryRow]()
    found = cursor.set_range(first)
    while found and cursor.key() < last:
        row = _decode(cursor.value())
        if name in ("", row.name):
            rows.append(row)
        found = cursor.next()
    # Sort here: keys have only the beginning of long names.
    rows.sort(key=lambda row: (row.at, row.name))
    return rows


def kinds_of_history(store: Store, txn: lmdb.Transaction[bytes]) -> list[tuple[str, int]]:
    """The kinds and spans that have rows, by one seek each."""
    cursor, start, kinds = txn.cursor(), store.key("h/"), list[tuple[str, int]]()
    found = cursor.set_range(start)
    while found and cursor.key().startswith(start):
        row = _decode(cursor.value())
        kinds.append((row.kind, row.span))
        found = cursor.set_range(_period(store, row.kind, row.span, _AT_MOST))
    return sorted(kinds)


def prune_history(commit: Transitions, most: int) -> int:
    """Delete rows whose time is over; at most ``most`` of them."""
    pruned, cursor = 0, commit.txn.cursor()
    for span, keep in KEEP.items():
        start = _spans(commit.store, span)
        oldest = max(0, commit.wall // MICRO - keep)
        found = cursor.set_range(start)
        while found and cursor.key().startswith(start):
            kind = cursor.key()[len(start) :].partition(b"\0")[0].decode()
            last = _period(commit.store, kind, span, oldest)
            while found and cursor.key() < last:
                if pruned >= most:
                    return pruned
                cursor.delete()
                pruned += 1
                found = bool(cursor.key())
            found = cursor.set_range(_period(commit.store, kind, span, _AT_MOST))
    return pruned


_AT_MOST = (1 << 64) - 1


def _spans(store: Store, span: int) -> bytes:
    return store.key("h/") + _SPAN.pack(span)


def _period(store: Store, kind: str, span: int, at: int) -> bytes:
    """The first key of a period."""
    return b"%b%b\0%b" % (_spans(store, span), kind.encode(), _AT.pack(at))


def _key(store: Store, row: HistoryRow) -> bytes:
    key = _period(store, row.kind, row.span, row.at) + row.name.encode()
    if len(key) <= _LONGEST:
        return key
    return key[: _LONGEST - _HASH] + hashlib.blake2b(key, digest_size=_HASH).digest()
