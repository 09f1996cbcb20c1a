"""Classes of finished jobs, which tell how long jobs are kept."""

from __future__ import annotations

import struct

import lmdb

from tidemill.brokers.lmdb.record import FAILED, SUCCEEDED, Tail
from tidemill.brokers.lmdb.store import Store
from tidemill.core.purge_mark import is_purged

KEPT_PLAIN, KEPT_RESULT, KEPT_OTHER, KEPT_LINKED = range(4)
"""Classes of finished jobs. In order: succeeded without a result; succeeded with a result,
cancelled or expired; failed or purged; jobs of flows. A job of a flow gets one of the other classes
when no later job needs it any more."""

KEPT = struct.Struct(">QQQ")
"""The numbers of jobs in the first three classes, as stored."""


def kept_counts(store: Store, txn: lmdb.Transaction[bytes]) -> list[int]:
    """The number of finished jobs in each of the first three classes."""
    data = txn.get(store.key("kept"))
    return list(KEPT.unpack(data)) if data else [0, 0, 0]


def class_of(state: int, tail: Tail) -> int:
    """The class of a job.

    Failed and purged jobs are kept for people, and jobs with results for their callers.
    """
    if state == FAILED or is_purged(tail.error):
        return KEPT_OTHER
    return KEPT_PLAIN if state == SUCCEEDED and not tail.result else KEPT_RESULT
