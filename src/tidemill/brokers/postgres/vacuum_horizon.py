"""Transactions that keep PostgreSQL from clearing away deleted rows.

A deleted row stays as long as any transaction may still see it. Queues delete many rows, and each
claim has to pass over the deleted rows that still exist. So one old transaction slows all queues of
a database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_OLD = 60.0  # the age in seconds from which a transaction is named
_FAR = 50_000  # the age in transactions, for holders without a time: standbys, slots, hidden users

_HOLDERS = """
SELECT kind, pid, who, app, state, seconds, far FROM (
    SELECT 'transaction' AS kind, pid, coalesce(usename, '') AS who,
           coalesce(application_name, '') AS app, coalesce(state, '') AS state,
           extract(epoch FROM clock_timestamp() - xact_start)::float8 AS seconds,
           greatest(age(backend_xmin), age(backend_xid)) AS far
    FROM pg_stat_activity
    WHERE datname = current_database() AND usesysid IS NOT NULL
      AND coalesce(backend_type, 'client backend') = 'client backend'  -- NULL for who may not see
      AND pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
    UNION ALL
    SELECT 'prepared', 0, owner, gid, '', extract(epoch FROM clock_timestamp() - prepared)::float8,
           age(transaction)
    FROM pg_prepared_xacts WHERE database = current_database()
    UNION ALL
    SELECT 'standby', pid, coalesce(usename, ''), coalesce(application_name, ''), '', NULL,
           age(backend_xmin)
    FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
    UNION ALL
    SELECT 'slot', coalesce(active_pid, 0), '', slot_name, '', NULL, age(xmin)
    FROM pg_replication_slots WHERE xmin IS NOT NULL) AS x
WHERE seconds > %s OR seconds IS NULL AND far > %s
ORDER BY seconds DESC NULLS LAST, far DESC LIMIT 5
"""


def held_back_by(session: Session) -> list[str]:
    """Return a phrase for each transaction old enough to slow the queues, the oldest first."""
    return [_phrase(*row) for row in session.query(_HOLDERS, [_OLD, _FAR])]


def _phrase(
    kind: str, pid: int, who: str, app: str, state: str, seconds: float | None, far: int
) -> str:
    age = f"{far:,} transactions" if seconds is None else f"{seconds:,.0f} s"
    if kind == "prepared":
        return f"prepared transaction {app!r} of user {who} is {age} old"
    if kind == "slot":
        return f"replication slot {app!r} is {age} behind"
    if kind == "standby":
        return f"standby {app!r} (pid {pid}, hot_standby_feedback) is {age} behind"
    text = f"pid {pid} of user {who}"
    if app:
        text += f" ({app})"
    return f"{text} has had a transaction open for {age}" + (f", {state}" if state else "")
