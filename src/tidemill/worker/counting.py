"""Sums of verdicts for rows of history: by queue and task, and by failure.

A worker process sums the verdicts of each frame, since it has decoded the envelopes. The supervisor
sums only the verdicts that it makes itself, and those of a frame of which the store has taken a
part. The rows of this module have no period: the supervisor adds the period when it hands the rows
in (:mod:`.history`).
"""

from __future__ import annotations

import operator
import socket
from collections.abc import Iterable

import msgspec

from tidemill.brokers.contract.history_rows import (
    BUCKETS,
    CANCELLED,
    FAILED,
    GIVEN_BACK,
    RETRIED,
    RUN_SUM,
    RUNS,
    SUCCEEDED,
    WAIT_SUM,
    WAITS,
    WIDTH,
    HistoryRow,
    bucket_of,
    join_name,
    split_name,
)
from tidemill.core.envelope import Envelope
from tidemill.core.fingerprint import FailureSample, failure_of
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.core.verdicts import outcome_of

Concluded = tuple[Verdict, Lease | None, Envelope | None]
"""A verdict, its lease, and the envelope if it is decoded. The lease may be None if the job was
withdrawn before its start."""

TRACEBACK_MOST = 2_000  # characters that a sample keeps from the end of a traceback
_HOST = socket.gethostname()
_encode = msgspec.msgpack.Encoder().encode
_SUCCESS = int(Outcome.SUCCESS)
_UNCOUNTED = frozenset(map(int, (Outcome.RELEASE, Outcome.SNOOZE)))
_PLACES = {
    int(Outcome.RETRY): RETRIED,
    int(Outcome.FAIL): FAILED,
    int(Outcome.CANCELLED): CANCELLED,
}
_LONGEST = 1 << (BUCKETS - 1)  # milliseconds: times of at least this length are in the last bucket
_FIRST_WAIT, _FIRST_RUN = WAITS.start, RUNS.start


class Counting:
    """The sums of one frame, or of the verdicts of one step. ``worker`` is the worker's name."""

    def __init__(self, worker: str = "") -> None:
        self._worker = worker
        self._tasks: dict[tuple[str, str], list[float]] = {}
        self._failures: dict[str, tuple[list[int], FailureSample | bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._tasks or self._failures)

    def count_frame(self, concluded: Iterable[Concluded]) -> None:
        """Add the verdicts of a frame; fast for first attempts that succeed, the usual case."""
        queue = task = ""
        row: list[float] = []
        for one in concluded:
            verdict, lease, envelope = one
            if verdict.outcome or lease is None or envelope is None:
                self.count((one,))
                continue
            started = verdict.started
            spent = (verdict.ended - started) * 1000
            waited = (started - envelope.created - envelope.delay) * 1000
            usual = lease.attempt == 1 and not envelope.at and envelope.links is None
            if not (usual and 0 <= spent < _LONGEST and 0 <= waited < _LONGEST):
                self.count((one,))
                continue
            if not row or envelope.task != task or envelope.queue != queue:
                queue, task = envelope.queue, envelope.task
                row = self._row(queue, task)
            row[SUCCEEDED] += 1
            row[RUN_SUM] += spent
            row[WAIT_SUM] += waited
            row[_FIRST_RUN + int(spent).bit_length()] += 1
            row[_FIRST_WAIT + int(waited).bit_length()] += 1

    def _row(self, queue: str, task: str) -> list[float]:
        row = self._tasks.get((queue, task))
        if row is None:
            row = self._tasks[queue, task] = [0] * WIDTH
        return row

    def count(self, concluded: Iterable[Concluded]) -> None:
        for verdict, lease, envelope in concluded:
            if lease is None:
                continue
            if envelope is None:
                try:
                    envelope = lease.open()
                except Exception:  # the envelope is broken, so nobody knows its task
                    continue
            self._count(verdict, lease.attempt, envelope)

    def _count(self, verdict: Verdict, attempt: int, envelope: Envelope) -> None:
        outcome = verdict.outcome
        if outcome in _UNCOUNTED and not verdict.started:
            return  # the job has not run
        row = self._row(envelope.queue, envelope.task)
        if outcome == _SUCCESS:
            row[SUCCEEDED] += 1
        elif outcome in _UNCOUNTED:
            row[GIVEN_BACK] += 1
            return
        else:
            self._count_failure(row, verdict, attempt, envelope)
        started = verdict.started
        _add_time(row, RUN_SUM, _FIRST_RUN, verdict.ended - started)
        if attempt == 1 and (envelope.links is None or not envelope.links.waits):
            since = max(envelope.created + envelope.delay, envelope.at)
            _add_time(row, WAIT_SUM, _FIRST_WAIT, started - since)

    def _count_failure(
        self, row: list[float], verdict: Verdict, attempt: int, envelope: Envelope
    ) -> None:
        """Count an attempt that did not succeed; also count its failure unless it was cancelled."""
        place = _PLACES[outcome_of(verdict, attempt, envelope.retries.max_attempts)]
        row[place] += 1
        if place == CANCELLED:
            return
        failure = failure_of(verdict.error, verdict.traceback)
        name = join_name(failure.fingerprint, envelope.task)
        counts, _ = self._failures.get(name) or ([0, 0, 0], b"")
        counts[place] += 1
        sample = FailureSample(
            error=failure.error,
            message=failure.message,
            place=failure.place,
            traceback=verdict.traceback[-TRACEBACK_MOST:],
            job=envelope.id,
            queue=envelope.queue,
            task=envelope.task,
            worker=self._worker,
            host=_HOST,
            time=verdict.ended,
        )
        self._failures[name] = counts, sample

    def add(self, rows: Iterable[HistoryRow]) -> None:
        for row in rows:
            if row.kind == "task":
                queue, task = split_name(row.name)
                before = self._tasks.get((queue, task))
                new: list[float] = list(row.counts)
                if before is not None:
                    new = list(map(operator.add, before, new))
                self._tasks[queue, task] = new
            else:
                known = self._failures.get(row.name) or ([0, 0, 0], b"")
                counts = list(map(operator.add, known[0], row.counts))
                self._failures[row.name] = counts, row.sample or known[1]

    def take(self) -> list[HistoryRow]:
        """Take the sums as rows without a period; the sums begin again with 0."""
        rows = []
        for key, sums in self._tasks.items():
            # Round the sum and not each time: the times of short runs would all be rounded to 0.
            sums[WAIT_SUM], sums[RUN_SUM] = round(sums[WAIT_SUM]), round(sums[RUN_SUM])
            rows.append(HistoryRow("task", join_name(*key), 0, 0, tuple(map(int, sums))))
        for name, (counts, kept) in self._failures.items():
            sample = _encode(kept) if isinstance(kept, FailureSample) else kept
            rows.append(HistoryRow("failure", name, 0, 0, tuple(counts), sample))
        self._tasks, self._failures = {}, {}
        return rows


def _add_time(row: list[float], place: int, first: int, seconds: float) -> None:
    """Add a time to its sum and its bucket; a negative time, from a clock set back, counts as 0."""
    row[place] += max(0.0, seconds) * 1000
    row[first + bucket_of(seconds)] += 1
