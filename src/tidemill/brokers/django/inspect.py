"""Read jobs and queues, without a lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.inspection import (
    LOOK_MOST,
    Filter,
    Page,
    QueueStats,
    matches,
    number_of,
)
from tidemill.brokers.django.rows import SELECT, SELECT_LISTED, STATES, item_of, listed_row
from tidemill.brokers.django.tables import QUEUE_COLUMNS, Rows
from tidemill.core.envelope import decode_envelope
from tidemill.core.job import Record, State

_SCAN = 1000  # jobs that one query reads when the filter looks inside envelopes


def _record(row: Sequence[Any], *, listed: bool = False) -> Record:
    item = item_of(row).item
    running = item.record.state is State.RUNNING
    return msgspec.structs.replace(
        item.record,
        max_attempts=item.limit,
        listed=listed,
        token=item.token if running else 0,
        lease_ends=item.deadline if running else 0.0,
    )


def _listed(rows: Rows, text: str, parameters: Sequence[Any]) -> list[Record]:
    """The records of a list, by the conditions that follow ``SELECT_LISTED``."""

    def read(seq: int, head: bytes, behind: int) -> bytes:
        part = "substr(envelope, 1, %s), substr(envelope, %s)"
        text = f"SELECT {part} FROM tidemill_job WHERE seq = %s"
        ((begin, rest),) = rows.execute(text, [len(head), behind + 1, seq]) or [(b"", b"")]
        if bytes(begin) != head:
            raise LookupError("the job was changed or deleted meanwhile")
        return bytes(rest)

    found = list[Sequence[Any]]()
    for row in rows.execute(SELECT_LISTED + text, parameters):
        try:
            found.append(listed_row(row, read))
        except LookupError:
            found += rows.execute(SELECT + "seq = %s", [row[-3]])
    for_list = [_record(row, listed=True) for row in found]
    for record in for_list:
        record.envelope.body = b""
    return for_list


def get(rows: Rows, ids: Sequence[str]) -> list[Record | None]:
    known = [job_id for job_id in dict.fromkeys(ids) if "\0" not in job_id]
    records = [_record(row) for row in rows.select_in(SELECT + "id IN", known)]
    found = {record.envelope.id: record for record in records}
    return [found.get(job_id) for job_id in ids]


def find(rows: Rows, what: Filter, limit: int = 100, cursor: str = "") -> Page:
    """Records that match, newest first. The cursor is the number of the last record."""
    where, parameters = _conditions(what)
    inside = bool(what.tag or what.text or what.id_suffix)
    below, above = number_of(cursor) if cursor else 1 << 62, -1
    most = what.look or (LOOK_MOST if what.id_suffix else 0)
    # These conditions have no index, so look only at the next ``most`` jobs.
    if most and (inside or what.task):
        above = _last_below(rows, below) - most
    found: list[Record] = []
    while True:
        some = _SCAN if inside else limit - len(found) + 1
        text = f"{where} AND seq < %s AND seq > %s ORDER BY seq DESC LIMIT %s"
        page = _listed(rows, text, [*parameters, below, above, some])
        for record in page:
            if len(found) == limit:
                return Page(found, str(below))
            below = record.seq
            if matches(record, what):
                found.append(record)
        if len(page) < some:
            return Page(found, str(above + 1) if above >= 0 else "")


def _last_below(rows: Rows, below: int) -> int:
    [(number,)] = rows.execute("SELECT max(seq) FROM tidemill_job WHERE seq < %s", [below])
    return number or 0


def _conditions(what: Filter) -> tuple[str, list[Any]]:
    parts, parameters = ["1 = 1"], list[Any]()
    if what.states:
        numbers = [STATES.index(state) for state in what.states]
        parts.append(f"state IN ({', '.join(map(str, numbers))})")
    for column, value in (("queue", what.queue), ("task", what.task), ('"key"', what.key)):
        if value:
            parts.append(f"{column} = %s")
            parameters.append(value)
    if what.id_prefix:
        parts.append(f"substr(id, 1, {len(what.id_prefix)}) = %s")
        parameters.append(what.id_prefix)
    return " AND ".join(parts), parameters


_AHEAD = """
SELECT count(*) FROM (
  SELECT 1 AS one FROM tidemill_job AS job JOIN tidemill_job AS other
    ON other.state = 2 AND other.state <= 3 AND other.queue = job.queue AND other.kind = job.kind
    AND other.share = job.share
    AND (other.rank < job.rank OR (other.rank = job.rank AND other.seq < job.seq))
  WHERE job.id = %s AND job.state = 2 LIMIT %s
) AS found"""


def ahead(rows: Rows, job_id: str, most: int) -> int:
    return int(rows.execute(_AHEAD, [job_id.replace("\0", ""), most])[0][0])


def stats(rows: Rows) -> list[QueueStats]:
    shown: dict[str, QueueStats] = {}
    for values in rows.execute(f"SELECT {', '.join(QUEUE_COLUMNS)} FROM tidemill_queue", []):
        row = QueueStats(**dict(zip(QUEUE_COLUMNS, values, strict=True)))
        row.paused = bool(row.paused)
        shown[row.name] = row
    counts = rows.execute(
        "SELECT queue, state, count(*), sum(fresh), min(seq) FROM tidemill_job "
        "WHERE state <= 3 GROUP BY queue, state",
        [],
    )
    oldest: dict[int, str] = {}
    for queue, state, count, fresh, first in counts:
        row = shown.setdefault(queue, QueueStats(name=queue))
        setattr(row, STATES[state].value, count)
        row.accepted += int(fresh)
        if STATES[state] is State.READY:
            oldest[first] = queue
    text = "SELECT seq, envelope FROM tidemill_job WHERE seq IN"
    for seq, envelope in rows.select_in(text, oldest):
        shown[oldest[seq]].oldest = decode_envelope(bytes(envelope)).created
    return [shown[name] for name in sorted(shown)]


def info(rows: Rows) -> dict[str, Any]:
    [(count,)] = rows.execute("SELECT count(*) FROM tidemill_job")
    return {"jobs": count, "vendor": rows.dialect.vendor}


_ORDER = {
    State.READY: "state = 2 ORDER BY rank, seq",
    State.SCHEDULED: "state = 1 ORDER BY due, seq",
    State.FAILED: "state = 5 ORDER BY finished, seq",
}


def head(rows: Rows, queue: str, state: State, count: int) -> list[Record]:
    return _listed(rows, f"queue = %s AND {_ORDER[state]} LIMIT %s", [queue, count])
