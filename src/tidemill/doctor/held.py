"""Leased jobs: which of them run, and which their workers have only fetched.

The store says ``running`` of every leased job. A worker leases more jobs than it has slots. A
*fetched* job waits in its worker for a slot.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tidemill.brokers.contract.inspection import Filter, Inspection, Page, QueueStats
from tidemill.core.job import Owner, Record, State
from tidemill.core.scoreboard import runs_by_name

MOST = 1000  # the most leased jobs that a look reads


class Held(msgspec.Struct, frozen=True):
    """The leased jobs of a store at one moment.

    Attributes:
        records: the latest accepted leased jobs, at most :data:`MOST`.
        fetched: the tokens of those that have not begun.
        is_whole: False when the store has more leased jobs.
        counts: the number of fetched jobs of each queue that has one.
        started: when the runs began, by token, of workers with a scoreboard on this machine.
    """

    records: list[Record]
    fetched: frozenset[int]
    is_whole: bool
    counts: dict[str, int]
    started: dict[int, float] = {}

    def waiting(self, queue: str = "") -> int | None:
        """The number of fetched jobs, of all queues or of one; None if not all were read."""
        if not self.is_whole:
            return None
        return self.counts.get(queue, 0) if queue else sum(self.counts.values())


def held_jobs(broker: Inspection, owners: Iterable[Owner], queues: Sequence[QueueStats]) -> Held:
    """Read the leased jobs: one page, or nothing if the numbers of the queues show no such job.

    The numbers only tell whether to read. The page also has the messages of holds, whose queues are
    not in ``queues``, and the jobs that were leased since the numbers were read.
    """
    page = Page([])
    if any(row.running for row in queues):
        page = broker.find(Filter(states=frozenset({State.RUNNING})), MOST)
    workers = [owner for owner in owners if owner.kind == "worker"]
    boards = runs_by_name(workers)
    fetched = _fetched_of(page.records, workers, boards)
    runs = [(record.token, boards.get(record.worker) or {}) for record in page.records]
    started = {token: known[token][1] for token, known in runs if token in known}
    counts = collections.Counter(r.envelope.queue for r in page.records if r.token in fetched)
    return Held(page.records, fetched, not page.cursor, counts, started)


def _fetched_of(
    records: Iterable[Record],
    workers: Sequence[Owner],
    boards: Mapping[str, dict[int, tuple[int, float]] | None],
) -> frozenset[int]:
    """The tokens of the jobs that their workers have not begun. Messages have begun.

    A worker with a free slot begins a fetched job at once. So a worker whose scoreboard is on
    another machine runs the jobs that it leased first, one in each slot.
    """
    mine: dict[str, list[Record]] = collections.defaultdict(list)
    for record in sorted(records, key=lambda record: (record.leased, record.seq)):
        if not record.envelope.is_message:
            mine[record.worker].append(record)
    found: set[int] = set()
    for name, runs in boards.items():
        slots = sum(owner.concurrency for owner in workers if owner.name == name)
        waiting = mine[name][slots:] if runs is None else mine[name]
        found.update(record.token for record in waiting if runs is None or record.token not in runs)
    return frozenset(found)
