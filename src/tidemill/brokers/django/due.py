"""Due times: jobs that come due, expire or time out, and finished jobs to prune.

Each function works on one piece, so that a transaction is short however many jobs are due.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tidemill.brokers.contract.retention import Retention
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.rows import IN_FLOW
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.rules.due import check_due
from tidemill.brokers.rules.workflows import is_needed

PIECE = 500  # the most jobs of one piece


def come_due(jobs: StoredJobs) -> bool:
    """Move some of the jobs whose time has come; True when more such jobs may be left."""
    now = jobs.now
    if jobs.sealed or not jobs.is_late:
        return False
    jobs.alarm_passed = True
    text = (
        "SELECT seq, state, due, expires FROM tidemill_job WHERE alarm <= %s "
        "ORDER BY alarm LIMIT %s"
    )
    found = jobs.rows.execute(text, [now, PIECE])
    plain: list[int] = []
    others: list[int] = []
    for seq, state, due, expires in found:
        is_plain = state == 1 and due <= now and not 0 < expires <= now
        (plain if is_plain else others).append(seq)
    if plain:
        jobs.rows.send_in(
            "UPDATE tidemill_job SET state = 2, "
            "alarm = CASE WHEN expires > 0 THEN expires ELSE NULL END WHERE seq IN",
            plain,
        )
        jobs.news = True
    for item in jobs.need_numbers(others):
        if item.record.envelope.id in jobs.items:
            check_due(jobs, item)
    jobs.flush()
    return len(found) == PIECE


def next_due(jobs: StoredJobs) -> float:
    """Seconds until a job comes due, at least 0; infinity when no job will."""
    if jobs.sealed:
        return math.inf
    alarms = [jobs.alarm, jobs.soonest]
    if jobs.alarm_passed:
        text = "SELECT min(alarm) FROM tidemill_job WHERE alarm IS NOT NULL"
        alarms = [alarm for (alarm,) in jobs.rows.execute(text)]
    return min([max(0.0, when - jobs.now) for when in alarms if when is not None], default=math.inf)


def prune(jobs: StoredJobs) -> bool:
    """Delete finished jobs that are too old; True when more such jobs may be left."""
    if jobs.sealed:
        return False
    text = "SELECT seq, linked FROM tidemill_job WHERE prune <= %s ORDER BY prune LIMIT %s"
    due = jobs.rows.execute(text, [jobs.now, PIECE])
    in_flow = jobs.need_numbers([seq for seq, linked in due if linked == IN_FLOW])
    jobs.need_flows(in_flow)
    old = [seq for seq, linked in due if linked != IN_FLOW]
    needed = [is_needed(jobs, item) for item in in_flow]
    for item, is_kept in zip(in_flow, needed, strict=True):
        if is_kept:
            jobs.keep_linked(item, jobs.retention.protect)
        else:
            jobs.keep_plainly(item)
    jobs.flush()
    jobs.rows.send_in("DELETE FROM tidemill_job WHERE seq IN", old)
    return len(due) == PIECE or not all(needed)


_KEPT = "prune IS NOT NULL AND linked IN (0, 2) AND state IN (4, 6, 7)"


def surplus(rows: Rows, retention: Retention) -> list[int]:
    """The numbers of the finished jobs above the count to keep; read without a lock."""
    # Failed and purged jobs do not count. Young results stay, and jobs without a result are deleted
    # first. One query chooses all the jobs, so two processes at the same time choose the same jobs,
    # not twice as many.
    keep = retention.count
    [(count,)] = rows.execute("SELECT count(*) FROM tidemill_job WHERE prune IS NOT NULL", [])
    if count <= keep:
        return []
    text = (
        f"SELECT seq, linked, finished FROM tidemill_job WHERE {_KEPT} "
        "ORDER BY CASE WHEN linked = 2 THEN 2 WHEN finished <= %s THEN 1 ELSE 0 END, "
        "prune DESC, seq DESC LIMIT %s OFFSET %s"
    )
    last = rows.now() - retention.protect
    found = rows.execute(text, [last, 1 << 40, keep])
    return [seq for seq, linked, finished in reversed(found) if linked == 2 or finished <= last]


def delete_surplus(numbers: Sequence[int], jobs: StoredJobs) -> None:
    """Delete these jobs, except jobs that were made ready again."""
    if not jobs.sealed:
        jobs.rows.send_in(f"DELETE FROM tidemill_job WHERE {_KEPT} AND seq IN", numbers)
