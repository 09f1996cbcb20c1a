"""The numbers of a worker's verdicts on their way into the history of the store.

A step hands in verdicts together with their numbers. If the store refuses some of the verdicts, the
next step takes back the numbers of these verdicts. If the store does not answer, the step is
repeated with its verdicts and their numbers. If the store refuses a whole step, its numbers may be
the reason: its verdicts are handed in without numbers (:mod:`.refused_verdicts`). The numbers of
the verdicts that the store takes follow in a later step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tidemill.brokers.contract.exchange import Reply, is_lost
from tidemill.brokers.contract.history_rows import (
    ALWAYS,
    HOUR,
    MINUTE,
    HistoryRow,
    join_name,
    split_name,
)
from tidemill.core.clock import clock
from tidemill.core.fingerprint import OTHER
from tidemill.core.job import Lease, Verdict
from tidemill.worker.counting import Concluded, Counting

FAILURES_MOST = 200
"""At most this many different failures count in an hour; all others count as ``OTHER``."""


class Numbers(msgspec.Struct):
    """The numbers in one step.

    Attributes:
        sums: rows without a period.
        refunds: rows with a period, to take back numbers of refused verdicts.
        leases: the leases of the verdicts.
        at: the wall time of the step, which decides the periods.
    """

    sums: list[HistoryRow] = []
    refunds: list[HistoryRow] = []
    leases: list[Lease] = []
    at: int = 0


class WorkerHistory:
    """The numbers of one worker. Callers hold the lock of the process pool.

    After the store has refused a step, steps have no numbers for ``pause`` seconds.
    """

    def __init__(self, worker: str, release: str, pause: float) -> None:
        self.pause = pause
        self.on = False  # True when the broker keeps history
        self._worker = worker
        self._release = release
        self._counting = Counting(worker)
        self._leases: list[Lease] = []  # leases of verdicts that the store has not taken
        self._refunds: list[HistoryRow] = []
        self._paused = 0.0  # machine time until which steps have no numbers
        self._hour = 0
        self._known: set[str] = set()  # names of failures counted in this hour

    # -- verdicts come --------------------------------------------------------------------------

    def hear(
        self,
        verdicts: Sequence[Verdict],
        leases: Sequence[Lease],
        rows: list[HistoryRow],
        *,
        whole: bool,
    ) -> None:
        """Add the rows of a whole frame, or count ``verdicts`` one by one.

        Without ``whole`` some verdicts of the frame were dropped, so the counts of its rows are too
        high. Then only ``verdicts`` count.
        """
        if not self.on:
            return
        self._leases += leases
        if whole:
            self._counting.add(rows)
        else:
            pairs = zip(verdicts, leases, strict=True)
            self._counting.count([(verdict, lease, None) for verdict, lease in pairs])

    def conclude(self, concluded: Sequence[Concluded]) -> None:
        """Count verdicts that the supervisor makes itself."""
        if self.on:
            self._leases += [lease for _, lease, _ in concluded if lease is not None]
            self._counting.count(concluded)

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """Drop the numbers of these verdicts. Numbers of stored verdicts stay."""
        self._uncount(verdicts, self._leases)
        self._leases = []

    # -- steps ----------------------------------------------------------------------------------

    def send(self) -> tuple[list[HistoryRow], Numbers]:
        """The rows for the next step, and the numbers to pass to :meth:`answered`."""
        if not self.on:
            return [], Numbers()
        leases, self._leases = self._leases, []
        numbers = Numbers(leases=leases, at=int(clock.wall()))
        if clock.machine() >= self._paused:
            numbers.sums = self._counting.take() if self._counting else []
            numbers.refunds, self._refunds = self._refunds, []
        return self._in_periods(numbers.sums, numbers.at) + numbers.refunds, numbers

    def again(self, numbers: Numbers) -> None:
        """Keep the numbers for the next step, with their verdicts: the store did not answer."""
        self._counting.add(numbers.sums)
        self._refunds = numbers.refunds + self._refunds
        self._leases = numbers.leases + self._leases

    def answered(self, numbers: Numbers, verdicts: Sequence[Verdict], reply: Reply) -> None:
        """Take back the numbers of the verdicts that the reply refuses."""
        if is_lost(reply):  # the store gave up this owner before the step, and took nothing
            self.again(numbers)
            self._uncount(verdicts, numbers.leases)
            return
        if False not in reply.settled:
            return
        leases = {lease.token: lease for lease in numbers.leases}
        refused = [v for v, ok in zip(verdicts, reply.settled, strict=True) if not ok]
        back = Counting(self._worker)
        back.count([(v, leases.get(v.token), None) for v in refused], sign=-1)
        self._refunds += self._in_periods(back.take(), numbers.at)

    def refused(self, numbers: Numbers) -> None:
        """Keep the numbers of a refused step, and send no numbers for a while."""
        self._paused = clock.machine() + self.pause
        self.again(numbers)

    def lost(self, numbers: Numbers, verdicts: Sequence[Verdict]) -> None:
        """Take back the numbers of these verdicts of a refused step: their leases are lost."""
        self._uncount(verdicts, numbers.leases)

    def settled(self, numbers: Numbers, verdicts: Sequence[Verdict]) -> None:
        """The store has now answered these verdicts of a refused step: forget their leases."""
        tokens = {verdict.token for verdict in verdicts}
        numbers.leases = [lease for lease in numbers.leases if lease.token not in tokens]

    def replaced(self, numbers: Numbers, verdict: Verdict, stored: Verdict) -> None:
        """Count ``stored``, which the store took in place of the refused ``verdict``."""
        for lease in numbers.leases:
            if lease.token == verdict.token:
                self._counting.count([(verdict, lease, None)], sign=-1)
                self._counting.count([(stored, lease, None)])

    def _uncount(self, verdicts: Sequence[Verdict], leases: Sequence[Lease]) -> None:
        """Take back the numbers of these verdicts, which the store has not taken."""
        of = {lease.token: lease for lease in leases}
        self._counting.count([(one, of.get(one.token), None) for one in verdicts], sign=-1)

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
