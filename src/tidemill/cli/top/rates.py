"""Rates of queues, from the totals of two snapshots and from the history of the store.

A look is one read of the store, which makes one snapshot (:mod:`.snapshot`).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history_rows import MINUTE
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.core.clock import clock

POINTS = 20
"""The number of points of a sparkline."""

_WINDOW = 10.0
"""Rates are measured over at least this many seconds, as soon as the first look is old enough."""

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

    def public(self) -> dict[str, Any]:
        """The rates for programs."""
        names = {"in_per_second": self.into, "out_per_second": self.out}
        return names | {"failed_per_second": self.failed}


class _Totals(msgspec.Struct, frozen=True):
    """The totals of a queue at one moment; ``at`` is in seconds of any clock."""

    at: float
    into: int
    out: int
    failed: int

    def since(self, before: _Totals) -> Rates:
        """The rates between two moments; 0 for a total that fell: the queue was made again."""
        seconds = max(self.at - before.at, 1e-6)
        return Rates(
            max(0, self.into - before.into) / seconds,
            max(0, self.out - before.out) / seconds,
            max(0, self.failed - before.failed) / seconds,
        )


class Meter:
    """Measures rates from look to look."""

    def __init__(self) -> None:
        self._seen: dict[str, collections.deque[_Totals]] = {}
        self._minute = 0
        self._minutes: dict[str, Rates] = {}

    def measure(self, mill: Tidemill, queues: Iterable[QueueStats]) -> dict[str, Rates]:
        """The rates of each queue by name, since a look about ten seconds ago.

        The first look has the rates of the last whole minute, where the store keeps history.
        """
        self._read_minutes(mill)
        now = clock.machine()
        return {row.name: self._rates(row, now) for row in queues}

    def _rates(self, row: QueueStats, now: float) -> Rates:
        if "accepted" in row.unknown:
            return Rates()
        ended = sum(getattr(row, name) for name in _ENDS)
        latest = _Totals(now, row.accepted, ended, row.failed)
        seen = self._seen.setdefault(row.name, collections.deque(maxlen=POINTS + 1))
        seen.append(latest)
        minutes = self._minutes.get(row.name)
        points = _points(seen) if minutes is None else minutes.points
        if len(seen) < 2:
            return msgspec.structs.replace(minutes or Rates(), points=points)
        before = next((t for t in reversed(seen) if now - t.at >= _WINDOW), seen[0])
        return msgspec.structs.replace(latest.since(before), points=points)

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


def _points(totals: Iterable[_Totals]) -> tuple[float, ...]:
    """The rates of ended jobs between successive moments, the latest last."""
    rates: Sequence[float] = [b.since(a).out or 0.0 for a, b in itertools.pairwise(totals)]
    return tuple(rates[-POINTS:])
