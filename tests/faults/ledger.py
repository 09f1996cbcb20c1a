"""The checks for a broker that forgets finished jobs, from the ledger of runs alone.

Given the ids that were confirmed, and the times at which something was killed:

    ran        every confirmed job ran to its end, or began at least, if it may fail
    nothing    when all ran nothing is left in the queues, and nothing is held by anybody
    doubles    a run that ended well is repeated only where something was killed since the job was
               put, and before its end was acked: nothing else runs twice. A kill may leave two
               messages of a job, that are as far from their run as the queue is long
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
from excuses import Excuses
from harness import Place, eventually, runs_of
from servers import RabbitMQ, Server
from servers.rabbitmq import Holder

from tidemill.core.clock import id_time

FAILED = "tidemill.failed"
"""The queue of what failed, and stays."""

STANDSTILL = 60.0
"""Seconds without the end of any job after which the jobs that are left count as lost."""

AWAY = 15.0
"""Seconds within which a server that was killed is back, heard, and told of what has ended."""


def check_runs(
    place: Place,
    server: Server,
    confirmed: Iterable[str],
    may_fail: Iterable[str],
    kills: Sequence[float],
    excuses: Excuses | None = None,
) -> dict[str, int]:
    """Run what is left, and check everything; a table of what was seen.

    Raises:
        AssertionError: a law is broken.
    """
    assert isinstance(server, RabbitMQ)
    confirmed, may_fail, excuses = set(confirmed), set(may_fail), excuses or Excuses()
    worker = place.worker("--stuck-grace", "0.4", slots=6).wait_ready()
    _wait_for_runs(place, server, confirmed, may_fail)
    try:
        eventually(lambda: _is_empty(place, server), "nothing left", 60, 0.5)
    except AssertionError:
        raise AssertionError(f"all ran; {_left(place, server)}") from None
    code = worker.stop()
    assert code == 0, f"the last worker ended with {code}; {_left(place, server)}"
    assert place.unfinished() == 0
    runs = runs_of(place.ledger())
    return {
        "confirmed": len(confirmed) + len(may_fail),
        "runs": sum(map(len, runs.values())),
        "repeated after an end": sum(
            _doubles(job_id, runs[job_id], kills, excuses) for job_id in confirmed
        ),
    }


def _wait_for_runs(place: Place, server: RabbitMQ, confirmed: set[str], may_fail: set[str]) -> None:
    """Wait until all jobs ran, as long as some job ends within each ``STANDSTILL``.

    Suspects run alone, and a task that hangs costs a process: the rest may take minutes.
    """
    missing = functools.partial(_missing, place, confirmed, may_fail)
    while left := missing():
        try:
            eventually(lambda left=left: len(missing()) < len(left), "a run", STANDSTILL, pause=1.0)
        except AssertionError:
            raise AssertionError(
                f"{len(left)} of {len(confirmed)} confirmed jobs do not run, such as "
                f"{sorted(left)[:3]}; {_left(place, server)}"
            ) from None


def _missing(place: Place, confirmed: set[str], may_fail: set[str]) -> set[str]:
    lines = place.ledger()
    ended = {line.id for line in lines if line.what == "end"}
    return (confirmed - ended) | (may_fail - {line.id for line in lines})


def _left(place: Place, server: RabbitMQ) -> str:
    rows = {name: count for name, count in server.counts().items() if count}
    holders = "\n".join(map(_told, server.holders())) or "nobody holds any"
    silent = f"not led by the first node: {server.leaderless() or 'none'}"
    return f"the queues hold {rows}\n{holders}\n{silent}\n{place.outputs()[-5000:]}"


def _told(holder: Holder) -> str:
    """Who holds messages, and what has become of it."""
    who = "of a client that has gone"
    with contextlib.suppress(StopIteration, psutil.Error):
        lines = psutil.net_connections("tcp4")
        pid = next(line.pid for line in lines if line.laddr and line.laddr.port == holder.port)
        who = f"of {psutil.Process(pid)}"
    busy = f", and waits in {holder.busy}" if holder.busy else ""
    return f"{holder.channel}, a channel {who}, holds {holder.messages} of {holder.queue}{busy}"


def _is_empty(place: Place, server: RabbitMQ) -> bool:
    """Twice: a message may go from a queue that is counted last to the one that was first."""
    return not any(place.unfinished() or _count(server) for _ in range(2))


def _count(server: RabbitMQ) -> int:
    return sum(count for name, count in server.counts().items() if name != FAILED)


def _doubles(job_id: str, runs: list[Any], kills: Sequence[float], excuses: Excuses) -> int:
    doubles, put = 0, id_time(job_id) or 0.0
    for (_, end), (following, _) in itertools.pairwise(runs):
        if end is not None:
            doubles += 1
            excuses.again(end.time)
            until = min(following.time, excuses.settled(end.time, AWAY))
            broke = excuses.handed_out_again(put, until)
            assert broke or any(put <= kill <= until for kill in kills), (
                f"{job_id} had ended at {end.time} and ran again at {following.time} "
                f"without a kill since it was put at {put}"
            )
    return doubles
