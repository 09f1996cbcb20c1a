"""Limits with real workers: several processes, also when some of them are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence

import pytest
from harness import Line, Place, check_counters

from tidemill import Limit, State

APP = """
from tidemill import Limit

if "TIDEMILL_SUPERVISOR" in os.environ:
    note("loaded", os.getpid())

forever = Retries(1000, delay=0)

@mill.task(retries=forever)
def quick(who=""):
    begin(); end()

@mill.task(retries=forever)
def slow(seconds=0.05):
    begin(); time.sleep(seconds); end()
"""


ON_STORES = pytest.mark.parametrize("place", ["lmdb", "redis", "postgresql"], indirect=True)


def begins(place: Place) -> list[Line]:
    return sorted((line for line in place.ledger() if line.what == "begin"), key=lambda b: b.time)


def most_at_a_time(place: Place, kills: Sequence[tuple[int, Collection[int]]] = ()) -> int:
    """Runs at one moment at most. Those that were killed end with their process, unnoted: ``kills``
    are how many lines the ledger had, and the processes."""
    running: set[tuple[str, int]] = set()
    process: dict[tuple[str, int], int] = {}
    most = 0
    for number, line in enumerate(place.ledger()):
        gone = {pid for lines, pids in kills if lines <= number for pid in pids}
        running = {run for run in running if process[run] not in gone}
        run = line.id, line.attempt
        process[run] = line.pid
        if line.what == "begin":
            running = {(job, attempt) for job, attempt in running if job != line.id} | {run}
        else:
            running.discard(run)
        most = max(most, len(running))
    return most


@pytest.mark.everyday("lmdb")
@ON_STORES
@pytest.mark.parametrize("what", ["queue", "task"])
def test_a_rate_holds_over_all_workers(place: Place, what: str) -> None:
    # law 13, case S5: never more than the burst and what came since, whoever starts them
    place.write(APP)
    rate, burst, count = 50, 10, 60
    limit = None
    if what == "queue":
        place.mill.queue("default", rate=f"{rate}/s", burst=burst)
    else:
        limit = Limit(f"{rate}/s", burst=burst)
    for _ in range(2):
        place.worker(processes=2)
    for worker in place.workers:
        worker.wait_ready()
    place.wait_notes("loaded", 4)
    first = time.time()
    jobs = place.enqueue_many("quick", [()] * count, **({"limit": limit} if limit else {}))
    place.finish(jobs)
    starts = begins(place)
    assert len(starts) == count
    for number, start in enumerate(starts, 1):
        assert start.time >= first + (number - burst) / rate - 0.005
    assert len({start.pid for start in starts}) > 1
    check_counters(place)


@pytest.mark.everyday("lmdb")
@ON_STORES
def test_so_many_run_at_a_time_also_when_workers_are_killed(place: Place) -> None:
    # law 13
    place.write(APP)
    limit = Limit(concurrency=3)
    jobs = place.enqueue_many("slow", [(0.05,)] * 80, limit=limit)
    for _ in range(2):
        place.worker(processes=2).wait_ready()
    kills: list[tuple[int, Collection[int]]] = []
    for turn in range(3):
        place.wait_notes("end", 10 * (turn + 1))
        victim = begins(place)[-1].pid
        kills.append((len(place.ledger()), {victim}))
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue
    kills.append((len(place.ledger()), place.workers[0].kill_everything()))
    place.worker(processes=2)
    place.finish(jobs)
    assert most_at_a_time(place, kills) == 3
    (row,) = place.mill.limits.list()
    assert row.running == 0
    check_counters(place)


def test_a_run_that_was_interrupted_has_spent_its_token(place: Place) -> None:
    # law 13
    place.write(APP)
    job = place.enqueue("slow", 60, limit="1/h")
    worker = place.worker("--shutdown-timeout", "0.2").wait_ready()
    place.wait_notes("begin")
    worker.send(signal.SIGTERM)
    worker.wait()
    assert job.refresh().state is State.READY
    found = place.mill.broker.held(job.id)  # type: ignore[attr-defined]
    assert found.until > 3000
