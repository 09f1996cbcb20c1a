"""Inspection of jobs, queues and the server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.inspection import (
    TOTALS,
    Filter,
    Page,
    QueueStats,
    matches,
    number_of,
)
from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.durability import read_info, server_facts
from tidemill.brokers.redis.record import STATES, read_record
from tidemill.core.envelope import decode_envelope
from tidemill.core.job import Record, State
from tidemill.errors import TidemillError

_SCAN = 500  # jobs that one call examines
_SCAN_IDS = 10_000  # ids that one call compares, without their jobs

_GET_MOST = 1000
_QUEUES_MOST = b"50"


class Inspection:
    def __init__(self, lines: ServerConnections) -> None:
        self._lines = lines

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        """Read records; each call reads up to 1000 of them at one moment."""
        records: list[Record | None] = []
        for i in range(0, len(ids), _GET_MOST):
            some = [job_id.encode() for job_id in ids[i : i + _GET_MOST]]
            shown = self._lines.call("inspect", b"get", *some)
            records += [read_record(one) if one else None for one in shown]
        return records

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """Find jobs, newest first. The cursor is the number of the last job examined."""
        found: list[Record] = []
        states = "".join(str(STATES.index(state)) for state in what.states).encode()
        by_id = what.id_prefix or what.id_suffix
        most = limit if what == Filter() else max(limit, _SCAN_IDS if by_id else _SCAN)
        ends = what.id_prefix.encode(), what.id_suffix.encode()
        below, looked = str(number_of(cursor)) if cursor else "", 0
        while looked < what.look_most:
            on, shown = self._lines.call(
                "inspect", b"find", below.encode(), b"%d" % most, states, *ends
            )
            looked += most
            for one in shown:
                record = read_record(one, listed=True)
                if matches(record, what):
                    found.append(record)
                    if len(found) == limit:
                        more = on or one is not shown[-1]
                        return Page(found, str(record.seq) if more else "")
            if not on:
                return Page(found)
            below = on.decode()
        return Page(found, below)

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        found: list[Record] = []
        kind, place = b"%d" % STATES.index(state), b""
        while True:
            wanted = b"%d" % (count - len(found))
            place, *shown = self._lines.call(
                "inspect", b"head", queue.encode(), kind, wanted, place
            )
            found += [read_record(one, listed=True) for one in shown]
            if not place or len(found) >= count:
                return found

    def ahead(self, job_id: str, most: int) -> int:
        return int(self._lines.call("inspect", b"ahead", job_id.encode(), b"%d" % most))

    def stats(self) -> list[QueueStats]:
        found: list[QueueStats] = []
        behind = b""
        while True:
            rows = self._lines.call("inspect", b"stats", behind, _QUEUES_MOST)
            found += [_stats(*rows[i : i + 3]) for i in range(0, len(rows), 3)]
            if len(rows) < 3 * int(_QUEUES_MOST):
                return found
            behind = rows[-3]

    def info(self, replicas: int) -> dict[str, Any]:
        """Facts about the store; ``replicas`` is the number that the URL asks for."""
        jobs = int(self._lines.ask(b"HLEN", self._lines.key + b":job"))
        info = read_info(self._lines.ask(b"INFO"))
        settings: dict[str, str] = {}
        with contextlib.suppress(TidemillError):  # a hosted server may refuse CONFIG
            name, value = self._lines.ask(b"CONFIG", b"GET", b"appendfsync")
            settings[name.decode()] = value.decode()
        return {"jobs": jobs, **server_facts(info, settings, replicas)}


def _stats(queue: bytes, row: Sequence[bytes], oldest: bytes) -> QueueStats:
    values = {row[i].decode(): int(row[i + 1]) for i in range(0, len(row), 2)}
    return QueueStats(
        name=queue.decode(),
        paused=bool(values["paused"]),
        max_size=values["max_size"],
        oldest=decode_envelope(oldest).created if oldest else 0.0,
        **{name: values.get(name, 0) for name in TOTALS},
    )
