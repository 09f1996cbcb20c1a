"""Rates of queues, from the totals of two looks at the store, and from its history."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

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


class Meter:
    """Measures rates from look to look."""

    def __init__(self) -> None:
        self._seen: dict[str, collections.deque[tuple[float, int, int, int]]] = {}
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
