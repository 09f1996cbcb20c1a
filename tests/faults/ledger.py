"""What must hold where the broker forgets what is done, told from the ledger of runs alone.

Given the ids that were confirmed, and the times at which something was killed:

    ran        every confirmed job ran to its end, or began at least, if it may fail
    nothing    when all ran nothing is left in the queues, and nothing is held by anybody
    doubles    a run that ended well is repeated only where something was killed while it ran or
               before its end was acked: nothing else runs twice
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from harness import Line, Place, eventually, runs_of
from servers import RabbitMQ, Server

AWAY = 15.0
"""Seconds within which a server that was killed is back, heard, and told of what has ended."""


def check_runs(
    place: Place,
    server: Server,
    confirmed: Iterable[str],
    may_fail: Iterable[str],
    kills: Sequence[float],
) -> dict[str, int]:
    """Run what is left, and check everything; a table of what was seen.

    Raises:
        AssertionError: a law is broken.
    """
    assert isinstance(server, RabbitMQ)
    confirmed, may_fail = set(confirmed), set(may_fail)
    worker = place.worker("--drain", "0.4", slots=6)
    try:
        eventually(lambda: not _missing(place, confirmed, may_fail), "running all", 120, 0.5)
    except AssertionError:
        lost = sorted(_missing(place, confirmed, may_fail))
        where = {name: row["messages"] for name, row in server.queues().items()}
        raise AssertionError(
            f"{len(lost)} of {len(confirmed)} confirmed jobs did not run, such as {lost[:3]}; "
            f"the queues hold {where}\n{place.outputs()[-5000:]}"
        ) from None
    # How many there are in a quorum queue its server counts every 5 s.
    eventually(lambda: not place.unfinished() and not _held(server), "nothing left", 60, 0.5)
    assert worker.stop() == 0
    assert place.unfinished() == 0
    runs = runs_of(place.ledger())
    return {
        "confirmed": len(confirmed) + len(may_fail),
        "runs": sum(map(len, runs.values())),
        "repeated after an end": sum(_doubles(job_id, runs[job_id], kills) for job_id in confirmed),
    }


def _missing(place: Place, confirmed: set[str], may_fail: set[str]) -> set[str]:
    lines = place.ledger()
    ended = {line.id for line in lines if line.what == "end"}
    return (confirmed - ended) | (may_fail - {line.id for line in lines})


def _held(server: RabbitMQ) -> int:
    return sum(row["messages_unacknowledged"] for row in server.queues().values())


def _doubles(job_id: str, runs: list[Any], kills: Sequence[float]) -> int:
    doubles = 0
    begin: Line
    for (begin, end), (following, _) in itertools.pairwise(runs):
        if end is not None:
            doubles += 1
            until = min(following.time, end.time + AWAY)
            assert any(begin.time - AWAY <= kill <= until for kill in kills), (
                f"{job_id} had ended at {end.time} and ran again at {following.time} "
                "without a kill in between"
            )
    return doubles
