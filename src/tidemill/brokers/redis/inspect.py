"""Looking at jobs, queues and the server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.base import Filter, Page, QueueStats, matches, number_of
from tidemill.brokers.redis.durability import read_info, server_facts
from tidemill.brokers.redis.lines import Lines
from tidemill.brokers.redis.record import STATES, read_record
from tidemill.errors import TidemillError
from tidemill.job import Record, State, decode_envelope

__all__ = ["Inspection"]

_SCAN = 500
"""Jobs looked at in one step."""

_COUNTERS = (
    *("waiting", "scheduled", "ready", "running", "accepted", "succeeded", "failed"),
    *("retried", "cancelled", "expired"),
)


class Inspection:
    """Reads one store."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        """Records of one moment."""
        shown = self._lines.call("look", b"get", *(job_id.encode() for job_id in ids))
        return [read_record(one) if one else None for one in shown]

    def find(self, what: Filter, limit: int, cursor: str) -> Page:
        """Newest first. The cursor is the number of the record to go on below."""
        found: list[Record] = []
        states = "".join(str(STATES.index(state)) for state in what.states).encode()
        most = limit if what == Filter() else max(limit, _SCAN)
        below = str(number_of(cursor)) if cursor else ""
        while True:
            on, shown = self._lines.call("look", b"find", below.encode(), b"%d" % most, states)
            for one in shown:
                record = read_record(one)
                if matches(record, what):
                    found.append(record)
                    if len(found) == limit:
                        more = on or one is not shown[-1]
                        return Page(found, str(record.seq) if more else "")
            if not on:
                return Page(found)
            below = on.decode()

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        """The first jobs of a queue that are of a state."""
        place = b"%d" % STATES.index(state)
        return [
            read_record(one)
            for one in self._lines.call("look", b"head", queue.encode(), place, b"%d" % count)
        ]

    def stats(self) -> list[QueueStats]:
        """Every queue, by name."""
        rows = self._lines.call("look", b"stats")
        return [_stats(*rows[i : i + 3]) for i in range(0, len(rows), 3)]

    def info(self) -> dict[str, Any]:
        """Facts about the store."""
        jobs = int(self._lines.ask(b"HLEN", self._lines.key + b":job"))
        info = read_info(self._lines.ask(b"INFO"))
        settings: dict[str, str] = {}
        with contextlib.suppress(TidemillError):  # a hosted server may keep it to itself
            name, value = self._lines.ask(b"CONFIG", b"GET", b"appendfsync")
            settings[name.decode()] = value.decode()
        return {"jobs": jobs, **server_facts(info, settings)}


def _stats(queue: bytes, row: Sequence[bytes], oldest: bytes) -> QueueStats:
    values = {row[i].decode(): int(row[i + 1]) for i in range(0, len(row), 2)}
    carried = values.get("carried", 0)  # which the store counts among what runs
    values["ready"] = values.get("ready", 0) + carried
    values["running"] = values.get("running", 0) - carried
    return QueueStats(
        name=queue.decode(),
        carried=carried,
        paused=bool(values["paused"]),
        max_size=values["max_size"],
        oldest=decode_envelope(oldest).created if oldest else 0.0,
        **{name: values.get(name, 0) for name in _COUNTERS},
    )
