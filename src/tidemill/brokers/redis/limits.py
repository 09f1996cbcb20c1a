"""Reads limits and packs changes. The Lua part: limiter, limits, partitions and set_limit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.record import MICRO, TERMS, pack_terms
from tidemill.core.envelope import LimitSettings
from tidemill.limits.arithmetic import Held, LimitStats

_PARTITIONS_MOST = b"500"  # the most partitions of a limit that one call counts


class Ledger:
    def __init__(self, lines: ServerConnections) -> None:
        self._lines = lines

    def all(self) -> list[LimitStats]:
        """Every limit in numbers, by name, queues first."""
        # The partitions of a limit are counted in pieces; jobs may start and end in between.
        facts = self._lines.call("inspect", b"limits")
        rows = []
        for i in range(0, len(facts), 8):
            kind, name, terms, declared, running, failures, until, by_hand = facts[i : i + 8]
            row = LimitStats(
                name=name.decode(),
                queue=kind == b"q",
                terms=_read_terms(terms),
                declared=_read_terms(declared) if declared else None,
                running=running,
                failures=failures,
                until=_seconds(until),
                by_hand=bool(by_hand),
            )
            rows.append(self._counted(row))
        return sorted(rows, key=lambda row: (not row.queue, row.name))

    def _counted(self, row: LimitStats) -> LimitStats:
        """Add to a limit the numbers of its running jobs and of its partitions in use."""
        if row.queue:
            return row
        running, keys, behind = 0, 0, b""
        while True:
            piece = self._lines.call(
                "inspect", b"partitions", row.name.encode(), behind, _PARTITIONS_MOST
            )
            running, keys, behind = running + piece[0], keys + piece[1], piece[2]
            if not behind:
                return msgspec.structs.replace(row, running=running, keys=keys)

    def held(self, job_id: str) -> Held | None:
        facts = self._lines.call("inspect", b"held", job_id.encode())
        if not facts:
            return None
        name, key, queue, until, running, terms, broken = facts
        seconds = _seconds(until)
        return Held(
            *(name.decode(), key.decode(), bool(queue), seconds, running),
            _read_terms(terms),
            bool(broken),
        )


def change(
    name: str, terms: LimitSettings | None, *, queue: bool, declared: bool
) -> Sequence[bytes]:
    packed = pack_terms(terms) if terms is not None else b""
    kind = b"q" if queue else b"n"
    return kind, name.encode(), packed, b"1" if declared else b"0"


def _seconds(until: int) -> float:
    return until / MICRO if until >= 0 else float("inf")


def _read_terms(packed: bytes) -> LimitSettings:
    which, jobs, seconds, burst, most, length, concurrency, failures, pause = TERMS.unpack(packed)
    return LimitSettings(
        rate=(jobs, seconds) if which & 1 else None,
        burst=burst,
        window=(most, length) if which & 2 else None,
        concurrency=int(concurrency) if which & 4 else None,
        breaker=(int(failures), pause) if which & 8 else None,
    )
