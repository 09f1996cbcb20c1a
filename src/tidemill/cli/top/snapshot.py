"""One look at a store for ``tidemill top``: queues, running jobs and workers of one moment.

A look is one read of the queues, one of the owners, and one page of leased jobs. Once a minute, a
look also reads the history. A look never reads jobs one by one, and writes nothing.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history_rows import MINUTE
from tidemill.brokers.contract.inspection import QueueStats, totals_of
from tidemill.client.inline_jobs import move_due
from tidemill.core.clock import clock
from tidemill.core.job import Owner, Record
from tidemill.core.scoreboard import read_runs, runs_by_name
from tidemill.doctor.examine import notes
from tidemill.doctor.findings import Seen
from tidemill.doctor.held import Held
from tidemill.doctor.store import here

JOBS_MOST = 200  # the most running jobs of a snapshot
_MISSING = ("running jobs", "workers", "the ages of jobs", "totals and rates")
"""The numbers that a message broker does not know."""

_UNKNOWN = Held([], frozenset(), is_whole=False, counts={})
"""The leased jobs of a broker that cannot look into its queues."""


class QueueRow(msgspec.Struct):
    """A queue, its rates, and the number of workers that take its jobs.

    ``note`` is the problem of the queue that ``doctor`` finds, in a few words. ``fetched`` is the
    number of leased jobs that wait in their workers; None if it is not known.
    """

    stats: QueueStats
    rates: Rates
    workers: int
    note: str
    fetched: int | None


class RunningJob(msgspec.Struct):
    """A job that a worker holds.

    ``since`` is the wall time at which the run began. If no scoreboard here shows the run, it is
    the wall time at which the job was leased. ``waits`` is True for a job that waits in its worker
    for a slot.
    """

    id: str
    task: str
    queue: str
    worker: str
    since: float
    attempt: int
    progress: tuple[int, int | None] | None
    waits: bool


class WorkerRow(msgspec.Struct):
    """An owner, and the number of its slots that run a job; None for another machine's owner."""

    owner: Owner
    busy: int | None


class Snapshot(msgspec.Struct):
    """One look at a store.

    Attributes:
        at: the wall time of the look.
        jobs: at most :data:`JOBS_MOST` of the leased jobs: running jobs before jobs that wait for a
            slot, the longest run first.
        fetched: the number of leased jobs that wait in their workers; None if it is not known.
        missing: what the broker cannot report, in words for the user, such as "workers".
        moved: the place to which the store moves, and the remedy; empty if the store stays.
    """

    at: float
    queues: list[QueueRow]
    jobs: list[RunningJob]
    workers: list[WorkerRow]
    totals: dict[str, int | None]
    missing: tuple[str, ...]
    fetched: int | None
    moved: str

    def public(self) -> dict[str, Any]:
        queues = [
            row.stats.public()
            | {"in_per_second": row.rates.into, "out_per_second": row.rates.out}
            | {"failed_per_second": row.rates.failed, "workers": row.workers}
            | {"note": row.note or None, "fetched": row.fetched}
            for row in self.queues
        ]
        names = ("id", "kind", "name", "host", "pid", "started", "queues", "concurrency")
        workers = [
            {name: getattr(row.owner, name) for name in names} | {"busy": row.busy}
            for row in self.workers
        ]
        jobs = [msgspec.to_builtins(job) for job in self.jobs]
        return {
            "time": self.at,
            "totals": {**self.totals, "fetched": self.fetched},
            "queues": queues,
            "running": jobs if "running jobs" not in self.missing else None,
            "workers": workers if "workers" not in self.missing else None,
            "missing": list(self.missing),
        }


def take(mill: Tidemill, meter: Meter) -> Snapshot:
    broker = mill.broker
    move_due(broker)
    seen = Seen(mill)
    knows = Feature.INSPECT in broker.features
    rates = meter.measure(mill, seen.queues)
    owners, held = (seen.owners, seen.held) if knows else ([], _UNKNOWN)
    # A store that moves has no worker, and needs none. Only then is this one more read.
    moved = (
        next((f"{f.message}: {f.advice}" for f in here(seen)), "") if knows and not owners else ""
    )
    noted = {} if moved else {name: finding.note for name, finding in notes(seen).items()}
    queues = [
        QueueRow(
            row,
            rates[row.name],
            sum(not o.queues or row.name in o.queues for o in owners) if knows else row.consumers,
            noted.get(row.name, ""),
            held.waiting(row.name),
        )
        for row in seen.queues
    ]
    runs = runs_by_name(owners)
    jobs = [_job(record, runs.get(record.worker), held) for record in held.records]
    jobs.sort(key=lambda job: (job.waits, job.since, job.id))
    tokens = {record.token for record in held.records}
    return Snapshot(
        clock.wall(),
        queues,
        jobs[:JOBS_MOST],
        [WorkerRow(owner, _busy(owner, tokens)) for owner in owners],
        totals_of(seen.queues, knows=knows),
        () if knows else _MISSING,
        held.waiting(),
        moved,
    )


def _busy(owner: Owner, tokens: set[int]) -> int | None:
    runs = read_runs(owner.board, owner.id) if owner.board else None
    return None if runs is None else len(runs.keys() & tokens)


def _job(record: Record, runs: dict[int, tuple[int, float]] | None, held: Held) -> RunningJob:
    envelope, started = record.envelope, record.leased
    if runs is not None and record.token in runs:
        started = runs[record.token][1]
    return RunningJob(
        envelope.id,
        envelope.called or "(message)",
        envelope.queue,
        record.worker,
        started,
        record.current_attempt,
        record.progress,
        record.token in held.fetched,
    )


POINTS = 20  # the number of points of a sparkline
_WINDOW = 10.0  # rates are over at least this many seconds, once the first look is old enough
_ENDS = ("succeeded", "failed", "cancelled", "expired")


class Rates(msgspec.Struct, frozen=True):
    """Jobs per second that a queue accepted, that ended, and that failed; None if not known.

    ``points`` are the rates of jobs that ended, oldest first. With history there is a rate for each
    minute, without history a rate for each look.
    """

    into: float | None = None
    out: float | None = None
    failed: float | None = None
    points: tuple[float, ...] = ()


class Meter:
    """Measures rates from look to look."""

    def __init__(self) -> None:
        self._seen: dict[str, collections.deque[tuple[float, int, int, int]]] = {}
        self._minute = 0
        self._minutes: dict[str, Rates] = {}

    def measure(self, mill: Tidemill, queues: Iterable[QueueStats]) -> dict[str, Rates]:
        """The rates of each queue by name, since a look about ten seconds ago."""
        # The first look has the rates of the last whole minute, where the store keeps history.
        self._read_minutes(mill)
        now = clock.machine()
        return {row.name: self._rates(row, now) for row in queues}

    def _rates(self, row: QueueStats, now: float) -> Rates:
        if "accepted" in row.unknown:
            return Rates()
        seen = self._seen.setdefault(row.name, collections.deque(maxlen=POINTS + 1))
        seen.append((now, row.accepted, sum(getattr(row, name) for name in _ENDS), row.failed))
        minutes = self._minutes.get(row.name, Rates())
        if len(seen) < 2:
            return minutes
        before = next((look for look in reversed(seen) if now - look[0] >= _WINDOW), seen[0])
        points = minutes.points or tuple(_change(*t).out or 0.0 for t in itertools.pairwise(seen))
        return msgspec.structs.replace(_change(before, seen[-1]), points=points)

    def _read_minutes(self, mill: Tidemill) -> None:
        """Read the last whole minutes of the history, once in each minute."""
        minute = int(clock.wall()) // MINUTE
        if minute == self._minute or Feature.HISTORY not in mill.broker.features:
            return
        self._minute = minute
        for queue in mill.history.queues(POINTS * MINUTE):
            whole = queue.points[:-1]
            if not any(
                p.accepted or p.ready or p.running or p.succeeded or p.failed for p in whole
            ):
                continue  # the store may lack these minutes, so show no rates
            out = tuple(sum(getattr(p, name) for name in _ENDS) / MINUTE for p in whole)
            last = whole[-1]
            self._minutes[queue.queue] = Rates(
                last.accepted / MINUTE, out[-1], last.failed / MINUTE, out[-POINTS:]
            )


def _change(before: tuple[float, ...], after: tuple[float, ...]) -> Rates:
    """The rates between two looks; 0 for a total that fell: the queue was made again."""
    seconds, *more = (b - a for a, b in zip(before, after, strict=True))
    into, out, failed = (max(0.0, count) / max(seconds, 1e-6) for count in more)
    return Rates(into, out, failed)
