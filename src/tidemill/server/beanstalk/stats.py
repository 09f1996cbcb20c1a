"""Statistics in YAML, with every field of beanstalkd.

Counters of commands, connections and single jobs are in memory, and begin at 0 with the port.
Urgent and buried jobs are counted up to ``COUNTED`` in each tube.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import time

from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.search import users_queues
from tidemill.core.clock import clock
from tidemill.core.job import Record, State
from tidemill.server.beanstalk.parser import NOT_FOUND, yaml_reply
from tidemill.server.beanstalk.shared_state import Client, PortState

VERSION = "1.12"  # the version of beanstalkd that the port reports, since clients check the version

COUNTED = 1000
URGENT = 1024  # priorities below this are urgent

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


def record_of(port: PortState, number: int) -> Record | None:
    """The record of a job; None for a job that clients do not see."""
    port.come_due()
    record = port.broker.get(port.numbers.id_of(number))
    return record if record is not None and record.state in _SHOWN else None


async def job_stats(port: PortState, client: Client, number: int) -> bytes:
    record = await port.run(record_of, port, number)
    if record is None:
        return NOT_FOUND
    port.end_late()
    counters, envelope, now = port.counters_of(number), record.envelope, clock.wall()
    facts = {
        "id": number,
        "tube": envelope.queue,
        "state": _SHOWN[record.state],
        "pri": record.rank,
        "age": max(0, int(now - envelope.created)),
        "delay": counters.delay if counters.delay >= 0 else int(envelope.delay),
        "ttr": int(envelope.ttr) if envelope.ttr > 0 else 60,
        "time-left": _time_left(port, number, record),
        "file": 0,
        "reserves": counters.reserves,
        "timeouts": counters.timeouts,
        "releases": counters.releases,
        "buries": counters.buries,
        "kicks": counters.kicks,
    }
    return yaml_reply([f"{name}: {value}" for name, value in facts.items()])


def _time_left(port: PortState, number: int, record: Record) -> int:
    if record.state is State.SCHEDULED:
        return max(0, int(record.due - clock.wall()))
    if record.state is not State.RUNNING:
        return 0
    holders = (client for client in port.clients if number in client.reservations)
    holder = next(holders, None)
    reservation = holder.reservations[number] if holder is not None else None
    if reservation is None or not reservation.ttr:  # the job is not reserved at this port
        return 0
    return max(0, int(reservation.deadline - time.monotonic()))


def _rows(port: PortState) -> dict[str, QueueStats]:
    return {row.name: row for row in users_queues(port.broker.stats())}


def has_jobs(port: PortState, name: str) -> bool:
    row = _rows(port).get(name)
    return row is not None and _has_jobs(port, row)


def _has_jobs(port: PortState, row: QueueStats) -> bool:
    return row.size > 0 or (
        row.failed > 0 and bool(port.store_numbers.head(row.name, State.FAILED, 1))
    )


def _existing(port: PortState) -> dict[str, QueueStats]:
    """All tubes in the order of their creation; tubes that no client of the port used come last."""
    port.come_due()
    rows = _rows(port)
    names = set(port.tubes.in_use())
    names |= {name for name, row in rows.items() if name not in names and _has_jobs(port, row)}
    places = port.tubes.places()
    ordered = sorted(names, key=lambda name: (places.get(name, len(places)), name))
    return {name: rows.get(name) or QueueStats(name=name) for name in ordered}


async def list_tubes(port: PortState, client: Client) -> bytes:
    return yaml_reply([f"- {name}" for name in await port.run(_existing, port)])


def list_watched(port: PortState, client: Client) -> bytes:
    return yaml_reply([f"- {name}" for name in client.watch])


def _counted(port: PortState, row: QueueStats) -> dict[str, int]:
    head = port.store_numbers.head
    ready = head(row.name, State.READY, COUNTED) if row.ready else []
    return {
        "current-jobs-urgent": sum(record.rank < URGENT for record in ready),
        "current-jobs-ready": row.ready,
        "current-jobs-reserved": row.running,
        "current-jobs-delayed": row.scheduled + row.waiting,
        "current-jobs-buried": (len(head(row.name, State.FAILED, COUNTED)) if row.failed else 0),
        "total-jobs": row.accepted,
    }


async def tube_stats(port: PortState, client: Client, name: str) -> bytes:
    numbers = await port.run(_tube_numbers, port, name)
    if numbers is None:
        return NOT_FOUND
    tube = port.tubes[name]
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


def _tube_numbers(port: PortState, name: str) -> dict[str, int] | None:
    port.come_due()
    row = _rows(port).get(name) or QueueStats(name=name)
    if not port.tubes.is_in_use(name) and not _has_jobs(port, row):
        return None
    return _counted(port, row)


async def server_stats(port: PortState, client: Client) -> bytes:
    tubes, numbers = await port.run(_all_numbers, port)
    port.end_late()
    clients, usage = port.clients, resource.getrusage(resource.RUSAGE_SELF)
    total = numbers.pop("total-jobs")
    facts = {
        **numbers,
        **{f"cmd-{verb}": port.counts[verb] for verb in _COMMANDS},
        "job-timeouts": port.timeouts,
        "total-jobs": total,
        "max-job-size": port.max_job_size,
        "current-tubes": tubes,
        "current-connections": len(clients),
        "current-producers": sum(client.produces for client in clients),
        "current-workers": sum(client.works for client in clients),
        "current-waiting": sum(client.waiting for client in clients),
        "total-connections": port.connections,
        "pid": os.getpid(),
        "version": f'"{VERSION}"',
        "rusage-utime": f"{usage.ru_utime:.6f}",
        "rusage-stime": f"{usage.ru_stime:.6f}",
        "uptime": int(time.monotonic() - port.begun),
        "binlog-oldest-index": 0,
        "binlog-current-index": 0,
        "binlog-records-migrated": 0,
        "binlog-records-written": 0,
        "binlog-max-size": 0,
        "draining": "true" if port.draining else "false",
        "id": port.instance,
        # In quotes, as in beanstalkd 1.13: a kernel version may begin with #, a comment in YAML.
        "hostname": f'"{socket.gethostname()}"',
        "os": f'"{platform.version()}"',
        "platform": f'"{platform.machine()}"',
    }
    return yaml_reply([f"{name}: {value}" for name, value in facts.items()])


def _all_numbers(port: PortState) -> tuple[int, dict[str, int]]:
    """The number of tubes, and the sums of their statistics."""
    rows = _existing(port)
    counted = [_counted(port, row) for row in rows.values()]
    return len(rows), {name: sum(each[name] for each in counted) for name in counted[0]}
