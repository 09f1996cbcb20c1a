"""Statistics, as YAML with every field of beanstalkd's.

Counters of commands, connections, and of what happened to single jobs are kept in memory, since the
port began. How many jobs are urgent or buried is counted up to ``COUNTED`` a tube.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import time

from tidemill.brokers.base import QueueStats
from tidemill.clock import wall_time
from tidemill.job import Record, State
from tidemill.server.beanstalk.backing import Backing
from tidemill.server.beanstalk.client import Client, Hold
from tidemill.server.beanstalk.replies import NOT_FOUND, yaml_reply

__all__ = [
    "has_jobs",
    "job_stats",
    "list_tubes",
    "list_watched",
    "record_of",
    "server_stats",
    "tube_stats",
]

SPOKEN = "1.12"
"""The version of beanstalkd whose commands are there: clients look at it for that."""

COUNTED = 1000
URGENT = 1024
"""Priorities below this are urgent."""

_SHOWN = {
    State.WAITING: "delayed",
    State.SCHEDULED: "delayed",
    State.READY: "ready",
    State.RUNNING: "reserved",
    State.FAILED: "buried",
}
_COMMANDS = (
    *("put", "peek", "peek-ready", "peek-delayed", "peek-buried", "reserve"),
    *("reserve-with-timeout", "delete", "release", "use", "watch", "ignore", "bury", "kick"),
    *("touch", "stats", "stats-job", "stats-tube", "list-tubes", "list-tube-used"),
    *("list-tubes-watched", "pause-tube"),
)


# -- one job -------------------------------------------------------------------------------------


def record_of(backing: Backing, number: int) -> Record | None:
    """The record of a job that is there, for a client."""
    backing.come_due()
    record = backing.broker.get(backing.numbers.id_of(number))
    return record if record is not None and record.state in _SHOWN else None


async def job_stats(backing: Backing, client: Client, number: int) -> bytes:
    """The fields of one job."""
    record = await backing.run(record_of, backing, number)
    if record is None:
        return NOT_FOUND
    backing.end_late()
    tally, envelope, now = backing.tally(number), record.envelope, wall_time()
    facts = {
        "id": number,
        "tube": envelope.queue,
        "state": _SHOWN[record.state],
        "pri": record.rank,
        "age": max(0, int(now - envelope.created)),
        "delay": tally.delay if tally.delay >= 0 else int(envelope.delay),
        "ttr": int(envelope.ttr) if envelope.ttr > 0 else 60,
        "time-left": _time_left(backing, number, record),
        "file": 0,
        "reserves": tally.reserves,
        "timeouts": tally.timeouts,
        "releases": tally.releases,
        "buries": tally.buries,
        "kicks": tally.kicks,
    }
    return yaml_reply([f"{name}: {value}" for name, value in facts.items()])


def _time_left(backing: Backing, number: int, record: Record) -> int:
    if record.state is State.SCHEDULED:
        return max(0, int(record.due - wall_time()))
    if record.state is not State.RUNNING:
        return 0
    holds = (client.holds.get(number) for client in backing.clients)
    hold: Hold | None = next((hold for hold in holds if hold), None)
    if hold is None or not hold.ttr:  # it runs elsewhere
        return 0
    return max(0, int(hold.deadline - time.monotonic()))


# -- tubes ---------------------------------------------------------------------------------------


def _rows(backing: Backing) -> dict[str, QueueStats]:
    return {row.name: row for row in backing.broker.stats()}


def has_jobs(backing: Backing, name: str) -> bool:
    """True when the store has jobs of a tube."""
    row = _rows(backing).get(name)
    return row is not None and _has_jobs(backing, row)


def _has_jobs(backing: Backing, row: QueueStats) -> bool:
    return row.size > 0 or (row.failed > 0 and bool(backing.naming.head(row.name, State.FAILED, 1)))


def _existing(backing: Backing) -> dict[str, QueueStats]:
    """All tubes that are there, in order of creation; the port has not seen the last of them."""
    backing.come_due()
    rows = _rows(backing)
    names = set(backing.tubes.in_use())
    names |= {name for name, row in rows.items() if name not in names and _has_jobs(backing, row)}
    places = backing.tubes.places()
    ordered = sorted(names, key=lambda name: (places.get(name, len(places)), name))
    return {name: rows.get(name) or QueueStats(name=name) for name in ordered}


async def list_tubes(backing: Backing, client: Client) -> bytes:
    """All tubes that are there."""
    return yaml_reply([f"- {name}" for name in await backing.run(_existing, backing)])


def list_watched(backing: Backing, client: Client) -> bytes:
    """The tubes that the client watches."""
    return yaml_reply([f"- {name}" for name in client.watch])


def _counted(backing: Backing, row: QueueStats) -> dict[str, int]:
    head = backing.naming.head
    ready = head(row.name, State.READY, COUNTED) if row.ready else []
    return {
        "current-jobs-urgent": sum(record.rank < URGENT for record in ready),
        "current-jobs-ready": row.ready,
        "current-jobs-reserved": row.running,
        "current-jobs-delayed": row.scheduled + row.waiting,
        "current-jobs-buried": (len(head(row.name, State.FAILED, COUNTED)) if row.failed else 0),
        "total-jobs": row.accepted,
    }


async def tube_stats(backing: Backing, client: Client, name: str) -> bytes:
    """The fields of one tube."""
    numbers = await backing.run(_tube_numbers, backing, name)
    if numbers is None:
        return NOT_FOUND
    tube = backing.tubes[name]
    left = tube.pause_left()
    facts = {
        "name": name,
        **numbers,
        "current-using": tube.using,
        "current-watching": tube.watching,
        "current-waiting": tube.waiting,
        "cmd-delete": tube.deletes,
        "cmd-pause-tube": tube.pauses,
        "pause": tube.paused_for,
        "pause-time-left": int(left),
    }
    return yaml_reply([f"{fact}: {value}" for fact, value in facts.items()])


def _tube_numbers(backing: Backing, name: str) -> dict[str, int] | None:
    backing.come_due()
    row = _rows(backing).get(name) or QueueStats(name=name)
    if not backing.tubes.is_in_use(name) and not _has_jobs(backing, row):
        return None
    return _counted(backing, row)


# -- the server ----------------------------------------------------------------------------------


async def server_stats(backing: Backing, client: Client) -> bytes:
    """The fields of the server."""
    tubes, numbers = await backing.run(_all_numbers, backing)
    backing.end_late()
    clients, usage = backing.clients, resource.getrusage(resource.RUSAGE_SELF)
    total = numbers.pop("total-jobs")
    facts = {
        **numbers,
        **{f"cmd-{verb}": backing.counts[verb] for verb in _COMMANDS},
        "job-timeouts": backing.timeouts,
        "total-jobs": total,
        "max-job-size": backing.max_job_size,
        "current-tubes": tubes,
        "current-connections": len(clients),
        "current-producers": sum(client.produces for client in clients),
        "current-workers": sum(client.works for client in clients),
        "current-waiting": sum(client.waiting for client in clients),
        "total-connections": backing.connections,
        "pid": os.getpid(),
        "version": f'"{SPOKEN}"',
        "rusage-utime": f"{usage.ru_utime:.6f}",
        "rusage-stime": f"{usage.ru_stime:.6f}",
        "uptime": int(time.monotonic() - backing.begun),
        "binlog-oldest-index": 0,
        "binlog-current-index": 0,
        "binlog-records-migrated": 0,
        "binlog-records-written": 0,
        "binlog-max-size": 0,
        "draining": "true" if backing.draining else "false",
        "id": backing.instance,
        # In quotes, as from beanstalkd 1.13 on: a kernel's version that begins with # is a comment.
        "hostname": f'"{socket.gethostname()}"',
        "os": f'"{platform.version()}"',
        "platform": f'"{platform.machine()}"',
    }
    return yaml_reply([f"{name}: {value}" for name, value in facts.items()])


def _all_numbers(backing: Backing) -> tuple[int, dict[str, int]]:
    """How many tubes there are, and their numbers added up."""
    rows = _existing(backing)
    counted = [_counted(backing, row) for row in rows.values()]
    return len(rows), {name: sum(each[name] for each in counted) for name in counted[0]}
