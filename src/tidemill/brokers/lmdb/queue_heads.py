"""The first jobs of a queue that are ready, scheduled or failed, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import lmdb

from tidemill.brokers.lmdb.layout import (
    DUE_JOB,
    DUE_KEY,
    FIN_KEY,
    NUMBER,
    READY_KEY,
    Row,
    Tables,
    rows_of,
)
from tidemill.brokers.lmdb.record import state_and_line
from tidemill.brokers.lmdb.retention import KEPT_LINKED, KEPT_OTHER
from tidemill.core.job import State

Txn: TypeAlias = "lmdb.Transaction[bytes]"


def first_ids(
    txn: Txn, views: Txn, tables: Tables, row: Row, state: State, ahead: int
) -> Iterator[bytes]:
    """Ids of a queue's jobs in this state, in order. The caller must check each job's state.

    ``ahead``: wall time minus the store's time.
    """
    lines = *row.lines, row.lost_line
    if state is State.READY:
        found = heapq.merge(*(_line(txn, tables, line) for line in lines))
        return (job_id for _, job_id in found)
    if state is State.SCHEDULED:
        ids = _scheduled(txn, tables, ahead) if row.scheduled else iter(())
    else:
        classes = (_ended(txn, tables, kept) for kept in (KEPT_OTHER, KEPT_LINKED))
        ids = itertools.chain(*classes) if row.failed else iter(())
    return (job_id for job_id in ids if _is_of(views, tables, job_id, lines))


def _line(txn: Txn, tables: Tables, line: int) -> Iterator[tuple[bytes, bytes]]:
    """(rank and sequence, id) of the entries of a line."""
    for key, job_id in rows_of(txn, tables.ready, READY_KEY.pack(line, 0, 0)[:4]):
        yield key[4:], job_id


def _scheduled(txn: Txn, tables: Tables, ahead: int) -> Iterator[bytes]:
    """Ids of all scheduled jobs, by due time."""
    clocks = (_due_by(txn, tables, clock, less) for clock, less in ((0, 0), (1, ahead)))
    return (job_id for _, job_id in heapq.merge(*clocks))


def _due_by(txn: Txn, tables: Tables, clock: int, less: int) -> Iterator[tuple[int, bytes]]:
    """(time - ``less``, id) of jobs scheduled on a clock: 0 is the store's, 1 is wall time."""
    for key, job_id in rows_of(txn, tables.due, DUE_KEY.pack(clock, 0, 0, 0)[:1]):
        _, time, kind, _ = DUE_KEY.unpack(key)
        if kind == DUE_JOB:
            yield time - less, job_id


def _ended(txn: Txn, tables: Tables, kept: int) -> Iterator[bytes]:
    """Ids of a class of finished jobs, in the order in which the jobs ended."""
    for _, value in rows_of(txn, tables.fin, FIN_KEY.pack(kept, 0, 0)[:1]):
        yield value[NUMBER.size :]


def _is_of(views: Txn, tables: Tables, job_id: bytes, lines: Sequence[int]) -> bool:
    data = views.get(job_id, db=tables.job)
    return data is not None and state_and_line(data)[1] in lines
