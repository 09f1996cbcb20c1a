"""Schedules: records that come due, are handed out, and change by compare-and-set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tidemill.brokers.contract.schedules import CLAIM, Change, Changed, Schedule
from tidemill.brokers.django.dialects import Statement
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.rules.schedules import ScheduleTable

_SELECT = "SELECT name, version, due, body FROM tidemill_schedule WHERE "
NEXT_SCHEDULE: Statement = (
    "SELECT min(CASE WHEN claimed > 0 THEN claimed ELSE due END) "
    "FROM tidemill_schedule WHERE due > 0",
    (),
)
"""Reads when the next schedule must be handed out."""
_CLAIMED = "(claimed > 0 AND claimed <= %s)"
_DUE = "(claimed = 0 AND due > 0 AND due <= %s)"


def seconds_until(found: Sequence[Any], now: float) -> float:
    """Seconds until the time that :data:`NEXT_SCHEDULE` has found, at least 0."""
    [(when,)] = found
    return math.inf if when is None else max(0.0, when - now)


class _Records(dict[str, Schedule]):
    """Name -> record; see ``ScheduleTable.records``."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        self._looked: set[str] = set()
        self.before: dict[str, Schedule] = {}

    def need(self, names: Iterable[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._looked]
        self._looked.update(new)
        for record in filter(None, read(self._rows, new)):
            self.before[record.name] = self[record.name] = record

    def pop(self, name: str, default: Any = None) -> Any:
        self.need([name])
        return super().pop(name, default)

    def get(self, name: str, default: Any = None) -> Any:
        self.need([name])
        return super().get(name, default)


class StoredSchedules(ScheduleTable):
    """The schedules of a database, in one transaction."""

    def __init__(self, jobs: StoredJobs) -> None:
        super().__init__(jobs)
        self._rows = jobs.rows
        self.records = self._stored = _Records(jobs.rows)

    def change(self, changes: Sequence[Change]) -> list[Changed]:
        """Read the records by few statements, change them, and write them."""
        self._need(changes)
        changed = super().change(changes)
        self._flush()
        return changed

    def _need(self, changes: Sequence[Change]) -> None:
        self._stored.need(change.name for change in changes)
        jobs = self._jobs
        assert isinstance(jobs, StoredJobs)
        envelopes = [job for change in changes for job in change.jobs]
        jobs.need_ids(job.id for job in envelopes)
        jobs.reserve(len(changes) + len(envelopes))

    def hand_out(self, most: int) -> list[Schedule]:
        now = self._jobs.now
        out: list[Schedule] = []
        for where, order in ((_CLAIMED, "claimed"), (_DUE, "due")):
            text = f"{_SELECT}{where} ORDER BY {order}, version LIMIT %s"
            if len(out) < most:
                rows = self._rows.execute(text, [now, most - len(out)])
                out += [_schedule(row) for row in rows]
        if out:
            marks = ", ".join(["%s"] * len(out))
            text = f"UPDATE tidemill_schedule SET claimed = %s WHERE name IN ({marks})"
            self._rows.send(text, [now + CLAIM, *[one.name for one in out]])
        return out

    def next_due(self) -> float:
        return seconds_until(self._rows.execute(*NEXT_SCHEDULE), self._jobs.now)

    def _flush(self) -> None:
        stored = self._stored
        gone = [name for name in stored.before if name not in stored]
        self._rows.send_in("DELETE FROM tidemill_schedule WHERE name IN", gone)
        changed = [one for one in stored.values() if one != stored.before.get(one.name)]
        rows = [(one.name, one.version, one.due, 0.0, one.body) for one in changed]
        columns = ("name", "version", "due", "claimed", "body")
        self._rows.upsert("tidemill_schedule", ["name"], columns, rows)


def _schedule(row: Sequence[Any]) -> Schedule:
    name, version, due, body = row
    return Schedule(name, version, due, bytes(body))


def read(rows: Rows, names: Sequence[str]) -> list[Schedule | None]:
    known = [name for name in names if "\0" not in name]
    found = {row[0]: _schedule(row) for row in rows.select_in(_SELECT + "name IN", known)}
    return [found.get(name) for name in names]


def page(rows: Rows, after: str = "", limit: int = 100) -> list[Schedule]:
    by = 'name COLLATE "C"' if rows.dialect.vendor == "postgresql" else "name"
    found = rows.execute(f"{_SELECT}{by} > %s ORDER BY {by} LIMIT %s", [after, limit])
    return [_schedule(row) for row in found]
