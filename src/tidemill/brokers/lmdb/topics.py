"""Bindings of queues to patterns of topics: one record in the main database.

A change writes the whole record. A publish reads the record in its own commit.
"""

from __future__ import annotations

import lmdb
import msgspec

from tidemill.brokers.contract.topics import Bindings
from tidemill.brokers.lmdb.record import encode
from tidemill.brokers.lmdb.store import Store
from tidemill.brokers.lmdb.transitions import Transitions

_decode = msgspec.msgpack.Decoder(Bindings).decode


def read_bindings(store: Store, txn: lmdb.Transaction[bytes]) -> Bindings:
    """The bindings, as a transaction sees them."""
    data = txn.get(store.key("bindings"))
    return _decode(data) if data is not None else Bindings()


def bind(commit: Transitions, queue: str, pattern: str) -> bool:
    """Bind a queue to a pattern; False when the queue is bound already."""
    row = commit.row(queue)
    row.forgotten, row.dirty = 0, True
    before = read_bindings(commit.store, commit.txn)
    return _replace(commit, before, before.bound(queue, pattern))


def unbind(commit: Transitions, queue: str, pattern: str) -> bool:
    """Delete a binding; False when there is no such binding."""
    before = read_bindings(commit.store, commit.txn)
    return _replace(commit, before, before.unbound(queue, pattern))


def drop_bindings(commit: Transitions, queue: str) -> None:
    """Delete all bindings of a queue."""
    before = read_bindings(commit.store, commit.txn)
    _replace(commit, before, before.without_queue(queue))


def _replace(commit: Transitions, before: Bindings, after: Bindings) -> bool:
    if after is before:
        return False
    commit.txn.put(commit.store.key("bindings"), encode(after))
    return True
