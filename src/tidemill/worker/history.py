"""The numbers of a worker's verdicts on their way into the history of the store.

A verdict counts after the store has taken it. Its numbers go with the next step that has verdicts,
or ``TICK`` seconds later. A step that only takes leases has none: numbers need a commit, and the
jobs would start after the commit. A kill loses these numbers; the totals of the store stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tidemill.brokers.contract.history_rows import (
    ALWAYS,
    HOUR,
    MINUTE,
    HistoryRow,
    added,
    join_name,
    split_name,
)
from tidemill.core.clock import clock
from tidemill.core.fingerprint import OTHER
from tidemill.core.job import Lease, Verdict
from tidemill.worker.counting import Concluded, Counting
from tidemill.worker.parts import Part

TICK = 1.0  # seconds that numbers wait at most for a step with verdicts
FAILURES_MOST = 200  # different failures that count in an hour; all others count as ``OTHER``


class WorkerHistory(Part):
    """The numbers of one worker. Callers hold the lock of the process pool.

    After the store has refused a step, steps have no numbers for ``pause`` seconds: the numbers may
    be the reason.
    """

    def __init__(self, worker: str, release: str, pause: float) -> None:
        self.pause = pause
        self.on = False  # True when the broker keeps history
        self._worker = worker
        self._release = release
        self._ended: list[tuple[Sequence[Lease], Sequence[HistoryRow]]] = []  # not yet settled
        self._asked = 0  # the number of entries of ``_ended`` whose verdicts are in the latest step
        self._counting = Counting(worker)  # the sums of settled verdicts
        self._rows: list[HistoryRow] = []  # rows of a step, until the store has them
        self._sent = False  # True when the latest step has these rows
        self._paused = 0.0  # machine time until which steps have no numbers
        self._due_at = math.inf  # machine time at which a step without verdicts has numbers
        self._hour = 0
        self._known: set[str] = set()  # names of failures counted in this hour

    def hear(self, leases: Sequence[Lease], rows: Sequence[HistoryRow]) -> None:
        """Keep the sums of verdicts on these leases until the store has answered the verdicts."""
        if self.on:
            self._ended.append((leases, rows))

    def conclude(self, concluded: Sequence[Concluded]) -> None:
        """Sum verdicts one by one, and keep the sums until the store has answered."""
        if self.on:
            sums = Counting(self._worker)
            sums.count(concluded)
            self.hear([lease for _, lease, _ in concluded if lease is not None], sums.take())

    def forget(self) -> None:
        """Drop the verdicts that are not settled: their leases are lost."""
        self._ended = []

    def rows(self, *, settles: bool) -> list[HistoryRow]:
        """The rows for a step with all verdicts so far; ``settles``: there are such verdicts."""
        # Until the store has them, these rows come first in each later step with rows, unchanged.
        self._asked = len(self._ended)
        now = clock.machine()
        self._sent = now >= self._paused and (settles or now >= self._due_at)
        if not self._sent:
            return []
        self._rows = [*self._rows, *self._in_periods(self._counting.take(), int(clock.wall()))]
        # The time of the next try, unless the store answers.
        self._due_at = now + TICK if self._rows else math.inf
        return self._rows

    def settled(
        self, verdicts: Sequence[Verdict], answers: Sequence[bool | None], *, refused: bool = False
    ) -> None:
        """Count the verdicts of the latest step that the store has taken.

        A verdict with the answer None comes again. The store has the rows of the step, unless it
        ``refused`` the step. Then it took the verdicts by themselves, and some may be replaced.
        """
        ended, self._ended = self._ended[: self._asked], self._ended[self._asked :]
        if refused:
            self._paused = clock.machine() + self.pause
            self._rows = _summed(self._rows)
        elif self._sent:
            self._rows = []
        self._count(ended, verdicts, answers, whole=not refused and all(answers))
        waiting = self._counting or self._rows
        self._due_at = min(self._due_at, clock.machine() + TICK) if waiting else math.inf

    def _count(
        self,
        ended: Sequence[tuple[Sequence[Lease], Sequence[HistoryRow]]],
        verdicts: Sequence[Verdict],
        answers: Sequence[bool | None],
        *,
        whole: bool,
    ) -> None:
        """Count the settled verdicts; ``whole``: the store has taken all verdicts of ``ended``."""
        if whole:
            for _, rows in ended:
                self._counting.add(rows)
            return
        leases = {lease.token: lease for some, _ in ended for lease in some}
        again: list[Concluded] = []
        for verdict, answer in zip(verdicts, answers, strict=True):
            # A held verdict and the verdict that follows it have one token; only the first counts.
            lease = leases.pop(verdict.token, None)
            if answer:
                self._counting.count([(verdict, lease, None)])
            elif answer is None:
                again.append((verdict, lease, None))
        self.conclude(again)

    @property
    def due(self) -> float:  # type: ignore[override]
        return max(self._due_at, self._paused)

    def _in_periods(self, rows: Iterable[HistoryRow], now: int) -> list[HistoryRow]:
        """The rows for the minute and the hour, named with the release; for tasks also a total."""
        made = []
        for row in rows:
            name = self._name(row, now)
            for span in (MINUTE, HOUR):
                at = now - now % span
                made.append(HistoryRow(row.kind, name, span, at, row.counts, row.sample))
            if row.kind == "task":
                made.append(HistoryRow(row.kind, join_name(row.name, ""), ALWAYS, 0, row.counts))
        return made

    def _name(self, row: HistoryRow, now: int) -> str:
        """The name with the release. Failures beyond ``FAILURES_MOST`` share one name."""
        if row.kind == "failure":
            if now // HOUR != self._hour:
                self._hour, self._known = now // HOUR, set()
            if row.name not in self._known and len(self._known) >= FAILURES_MOST:
                return join_name(OTHER, split_name(row.name)[1], self._release)
            self._known.add(row.name)
        return join_name(row.name, self._release)


def _summed(rows: Iterable[HistoryRow]) -> list[HistoryRow]:
    sums: dict[tuple[str, int, int, str], HistoryRow] = {}
    for row in rows:
        key = row.kind, row.span, row.at, row.name
        sums[key] = added(sums.get(key), row)
    return [*sums.values()]
