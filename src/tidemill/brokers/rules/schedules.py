"""Schedules: records that come due, are handed out, and change by compare-and-set."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tidemill.brokers.contract.schedules import CLAIM, Change, Changed, Schedule
from tidemill.brokers.rules.put import put_if_it_fits
from tidemill.brokers.rules.transitions import Jobs

_Entry = tuple[float, int, str]  # when, version, name


class ScheduleTable:
    """All schedules of one broker; used under its lock.

    When a record changes, its entries in the heaps stay. Their old version shows that they are
    stale.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self.records: dict[str, Schedule] = {}
        self._due: list[_Entry] = []  # by wall time
        self._claims: list[_Entry] = []  # claims, by the machine time at which they end

    def page(self, after: str, limit: int) -> list[Schedule]:
        names = sorted(name for name in self.records if name > after)
        return [self.records[name] for name in names[:limit]]

    def change(self, changes: Sequence[Change]) -> list[Changed]:
        """Change the records that still have the expected version, and put their jobs."""
        return [self._change(change) for change in changes]

    def _change(self, change: Change) -> Changed:
        before = self.records.pop(change.name, None)
        if (before.version if before else 0) != change.expect:
            if before:
                self.records[change.name] = before
            return Changed()
        left_out = tuple(filter(None, [put_if_it_fits(self._jobs, job) for job in change.jobs]))
        due, body, gone = change.due, change.body, change.gone
        if change.instead[1] and len(left_out) == len(change.jobs):
            (due, body), gone = change.instead, False
        if gone:
            return Changed(True, 0, left_out)
        version = self._jobs.next_number()
        self.records[change.name] = Schedule(change.name, version, due, body)
        if due:
            heapq.heappush(self._due, (due, version, change.name))
        return Changed(True, version, left_out)

    def hand_out(self, most: int) -> list[Schedule]:
        out: list[Schedule] = []
        for heap, now in ((self._claims, self._jobs.now), (self._due, self._jobs.wall)):
            while self._first(heap) <= now and len(out) < most:
                _, version, name = heapq.heappop(heap)
                out.append(self.records[name])
                heapq.heappush(self._claims, (self._jobs.now + CLAIM, version, name))
        return out

    def next_due(self) -> float:
        """Seconds until a record comes due, at least 0; infinity when no record comes due."""
        claimed = self._first(self._claims) - self._jobs.now
        return max(0.0, min(claimed, self._first(self._due) - self._jobs.wall))

    def _first(self, heap: list[_Entry]) -> float:
        """The time of the first entry of a heap that is not stale."""
        while heap:
            when, version, name = heap[0]
            record = self.records.get(name)
            if record is not None and record.version == version:
                return when
            heapq.heappop(heap)
        return float("inf")
