"""Finished jobs by class: what they are pruned by."""

from __future__ import annotations

import struct

import lmdb

from tidemill.brokers.lmdb.record import FAILED, SUCCEEDED, Tail
from tidemill.brokers.lmdb.store import Store

__all__ = [
    "KEPT",
    "KEPT_LINKED",
    "KEPT_OTHER",
    "KEPT_PLAIN",
    "KEPT_RESULT",
    "class_of",
    "kept_counts",
]

KEPT_PLAIN, KEPT_RESULT, KEPT_OTHER, KEPT_LINKED = range(4)
"""Classes of finished jobs: succeeded without a result, with one, and ended any other way; and
jobs of flows, which come to one of these once nobody waits for them."""

KEPT = struct.Struct(">QQQ")
"""How many there are of the first three, as stored."""


def kept_counts(store: Store, txn: lmdb.Transaction[bytes]) -> list[int]:
    """How many finished jobs there are of each class."""
    data = txn.get(store.key("kept"))
    return list(KEPT.unpack(data)) if data else [0, 0, 0]


def class_of(state: int, tail: Tail) -> int:
    """Failed jobs are kept for a human; of the rest, those somebody may ask for, for a while."""
    if state == FAILED:
        return KEPT_OTHER
    return KEPT_PLAIN if state == SUCCEEDED and not tail.result else KEPT_RESULT
