"""Inspection: records of jobs, queues, and facts about the store and its server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.broker import KEEP_ATTEMPTS
from tidemill.brokers.contract.inspection import (
    LOOK_MOST,
    TOTALS,
    Filter,
    Page,
    QueueStats,
    matches,
    number_of,
)
from tidemill.brokers.postgres import grants
from tidemill.brokers.postgres.encoding import texts
from tidemill.brokers.postgres.statements import Session
from tidemill.brokers.postgres.vacuum_horizon import held_back_by
from tidemill.core.envelope import decode_envelope, decode_listed
from tidemill.core.job import Attempt, Outcome, Record, State, run_of, whole_progress

_STATES = tuple(State)
_SCAN = 2000  # jobs that one query reads when the filter looks inside envelopes


class _Row(msgspec.Struct):
    """A row of the view ``shown``, and two columns of its lease."""

    seq: int
    rank: int
    tries: int
    losses: int
    due: float
    expires: float
    cancelling: bool
    trail: list[list[Any]] | None
    envelope: bytes
    state: int
    attempt: int
    error: str
    finished: float | None
    result: bytes | None
    last: int | None
    last_leased: float
    started: float
    ended: float
    last_worker: str
    leased: float | None
    worker: str | None
    progress: float | None
    total: float | None
    progress_text: str | None
    log: list[list[Any]] | None
    pending: int
    failures: int
    token: int | None
    deadline: float | None

    def record(self, *, listed: bool = False) -> Record:
        """Return the record of the job; with ``listed`` as lists show it."""
        attempts = [msgspec.convert(row, Attempt) for row in self.trail or ()]
        if self.last is not None:
            times = self.last_leased, self.started, self.ended
            last = Attempt(self.last, self.last_worker, *times, int(Outcome.SUCCESS))
            last.run = run_of(attempts, last.number)
            attempts.append(last)
        done, total = self.progress, self.total or 0.0
        return Record(
            envelope=(decode_listed if listed else decode_envelope)(self.envelope),
            listed=listed,
            state=_STATES[self.state],
            seq=self.seq,
            rank=self.rank,
            max_attempts=self.tries,
            attempt=self.attempt,
            losses=self.losses,
            pending=self.pending,
            failures=self.failures,
            due=self.due,
            expires=self.expires,
            finished=self.finished or 0.0,
            raw_result=self.result or b"",
            error=self.error,
            worker=self.worker or "",
            leased=self.leased or 0.0,
            cancelling=self.cancelling,
            attempts=attempts[-KEEP_ATTEMPTS:],
            progress=None if done is None else whole_progress(done, total),
            progress_text=self.progress_text or "",
            log=[(float(when), line) for when, line in self.log or ()],
            token=self.token or 0 if self.worker else 0,
            lease_ends=self.deadline or 0.0 if self.worker else 0.0,
        )


_OF_LEASE = ("token", "deadline")
_WITHOUT_BODY = """CASE WHEN body IS NULL THEN envelope ELSE overlay(envelope
    PLACING E'\\\\xc400'::bytea FROM length(envelope) - body[1] - body[2] + 1 FOR body[1]) END"""


def _select(session: Session, *, listed: bool = False) -> str:
    """Select records; with ``listed`` as lists show them."""
    schema = session.address.schema
    columns = {name: name for name in _Row.__struct_fields__ if name not in _OF_LEASE}
    if listed:
        columns |= {"envelope": _WITHOUT_BODY, "result": "NULL", "log": "NULL"}
    of_lease = ", ".join(
        f'(SELECT {column} FROM "{schema}".lease WHERE lease.seq = shown.seq)'
        for column in _OF_LEASE
    )
    return f'SELECT {", ".join(columns.values())}, {of_lease} FROM "{schema}".shown WHERE '


def get(session: Session, ids: Sequence[str], *, brisk: bool = False) -> list[Record | None]:
    """Return records of one moment, in the order of the ids."""
    wanted = [job_id for job_id in ids if "\0" not in job_id]
    rows = session.query(_select(session) + "id = ANY (%s)", [texts(wanted)], brisk=brisk)
    records = [_Row(*row).record() for row in rows]
    found = {record.envelope.id: record for record in records}
    return [found.get(job_id) for job_id in ids]


def find(session: Session, what: Filter, limit: int = 100, cursor: str = "") -> Page:
    """Find records, newest first. The cursor is the number below which the next page begins."""
    where, arguments = _conditions(session, what)
    inside = bool(what.task or what.tag or what.text)
    below, above = number_of(cursor) if cursor else 1 << 62, -1
    most = LOOK_MOST if what.id_suffix else what.look if inside else 0
    if most:
        above = _last_below(session, below) - most
    found: list[Record] = []
    while True:
        some = _SCAN if inside else limit - len(found) + 1
        select = _select(session, listed=True)
        text = f"{select} {where} AND seq < %s AND seq > %s ORDER BY seq DESC LIMIT %s"
        rows = [_Row(*row) for row in session.query(text, [*arguments, below, above, some])]
        for row in rows:
            if len(found) == limit:
                return Page(found, str(below))
            below = row.seq
            record = row.record(listed=True)
            if matches(record, what):
                found.append(record)
        if len(rows) < some:
            return Page(found, str(above + 1) if above >= 0 else "")


def _last_below(session: Session, below: int) -> int:
    """The highest job number below a number; 0 if there is none."""
    text = f'SELECT coalesce(max(seq), 0) FROM "{session.address.schema}".job WHERE seq < %s'
    [(number,)] = session.query(text, [below])
    return int(number)


def _conditions(session: Session, what: Filter) -> tuple[str, list[Any]]:
    """Return the conditions that the server can check by its columns."""
    parts = ["true"]
    arguments: list[Any] = []
    if what.states:
        parts.append("state = ANY (%s)")
        arguments.append([_STATES.index(state) for state in what.states])
    if what.states == {State.RUNNING}:  # read the few leases instead of all jobs
        parts.append(f'seq IN (SELECT seq FROM "{session.address.schema}".lease WHERE owner > 0)')
    if what.queue:
        names = f'SELECT number FROM "{session.address.schema}".queue WHERE name = %s'
        parts.append(f"line / 4 = ({names})")
        arguments.append(what.queue)
    if what.key:
        parts.append("key = %s")
        arguments.append(what.key)
    if what.id_prefix:
        parts.append("starts_with(id, %s)")
        arguments.append(what.id_prefix)
    if what.id_suffix:
        parts.append("right(id, length(%s)) = %s")
        arguments += [what.id_suffix, what.id_suffix]
    return " AND ".join(parts), arguments


_ORDER = {
    State.READY: ("ready", "{0}.rank, {0}.seq"),
    State.SCHEDULED: ("later", "{0}.due, {0}.seq"),
    State.FAILED: ("done", "{0}.finished, {0}.seq"),
}


def head(session: Session, queue: str, state: State, count: int) -> list[Record]:
    schema = session.address.schema
    table, order = f'"{schema}".{_ORDER[state][0]}', _ORDER[state][1]
    where = f"""seq IN (
        SELECT x.seq FROM {table} AS x JOIN "{schema}".job AS j USING (seq)
        WHERE j.line / 4 = (SELECT number FROM "{schema}".queue WHERE name = %s)
          AND {{}} ORDER BY {order.format("x")} LIMIT %s)"""
    condition = {State.SCHEDULED: "NOT x.waiting", State.FAILED: "x.state = 5"}.get(state, "true")
    text = _select(session, listed=True) + where.format(condition)
    records = [_Row(*row).record(listed=True) for row in session.query(text, [queue, count])]
    return sorted((r for r in records if r.state is state), key=_PLACE[state])


_PLACE: dict[State, Callable[[Record], tuple[float, int]]] = {
    State.READY: lambda r: (r.rank, r.seq),
    State.SCHEDULED: lambda r: (r.due, r.seq),
    State.FAILED: lambda r: (r.finished, r.seq),
}


def ahead(session: Session, job_id: str, most: int) -> int:
    schema = session.address.schema
    text = f"""
        WITH one AS (
            SELECT lane, line, rank, seq FROM "{schema}".job WHERE id = %s
            AND NOT EXISTS (SELECT FROM "{schema}".lease WHERE lease.seq = job.seq)
            AND NOT EXISTS (SELECT FROM "{schema}".later WHERE later.seq = job.seq)
            AND NOT EXISTS (SELECT FROM "{schema}".done WHERE done.seq = job.seq))
        SELECT count(*) FROM (
            SELECT 1 FROM one, "{schema}".ready AS r WHERE one.lane IS NULL
            AND r.line = one.line AND (r.rank, r.seq) < (one.rank, one.seq)
            UNION ALL
            SELECT 1 FROM one, "{schema}".parked AS p WHERE p.lane = one.lane
            AND p.line = one.line AND (p.rank, p.seq) < (one.rank, one.seq)
            LIMIT %s) AS before"""
    [(number,)] = session.query(text, [job_id.replace("\0", ""), most])
    return int(number)


def stats(session: Session) -> list[QueueStats]:
    """Return every queue that was used, by name."""
    rows = session.query(f'SELECT * FROM "{session.address.schema}".queue_stats()')
    return [
        QueueStats(
            name=name,
            paused=paused,
            max_size=max_size,
            oldest=decode_envelope(oldest).created if oldest else 0.0,
            **dict(zip(TOTALS, (count or 0 for count in counts), strict=True)),
        )
        for name, paused, max_size, counts, oldest in rows
    ]


def info(session: Session) -> dict[str, Any]:
    schema = session.address.schema
    [(jobs, size, version, sync, commit, names, connections, most, moves_to)] = session.query(
        f'SELECT (SELECT count(*) FROM "{schema}".job), '
        "(SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class AS c "
        " WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r'), "
        "current_setting('server_version'), current_setting('fsync'), "
        "current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), "
        "(SELECT count(*) FROM pg_stat_activity "
        " WHERE backend_type = 'client backend'), current_setting('max_connections')::int, "
        f'(SELECT moves_to FROM "{schema}".departure)',
        [schema],
    )
    standby = ""
    if names and commit in ("on", "remote_write", "remote_apply"):
        standby = f", synchronous_standby_names={names}: puts wait for a standby"
    return {
        "broker": "postgresql",
        "url": session.address.shown,
        "made": session.installed.born,
        "jobs": jobs,
        "durable": sync == "on" and commit != "off",
        "durability": f"fsync={sync}, synchronous_commit={commit}{standby}",
        "schema": schema,
        "format": session.installed.version,
        "tables_bytes": size,
        "connections": f"{connections} of {most}",
        "pooled": bool(session.connections.pooled),
        "hears": session.wake_ups is not None or not session.connections.pooled,
        "server": f"PostgreSQL {version}",
        "missing_grants": grants.missing(session),
        "held_back_by": held_back_by(session),
        **({"moves_to": moves_to} if moves_to else {}),
    }
