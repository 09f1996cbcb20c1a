"""Limits with real workers: several processes, also when some of them are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Line, Place, check_counters, eventually, open_place
from servers import NETWORK

from tidemill import Breaker, Limit, State
from tidemill.core.clock import new_id

APP = """
from tidemill import Limit

if "TIDEMILL_SUPERVISOR" in os.environ:
    note("loaded", os.getpid())

forever = Retries(1000, delay=0)

@mill.task(retries=forever)
def quick(who=""):
    begin(); end()

@mill.task(retries=forever)
def tenant(who):
    begin(); time.sleep(0.01); end()

@mill.task(retries=forever)
def slow(seconds=0.05):
    begin(); time.sleep(seconds); end()

@mill.task(retries=Retries(100, delay=0), queue="shaky")
def shaky():
    begin()
    note("tried", time.time())
    if not os.path.exists(os.path.join(HERE, "healed")):
        raise ValueError("not yet")
    end()
"""


@pytest.fixture(params=["lmdb", "redis", "postgresql", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "p"
    folder.mkdir()
    lease = "&owner_lease=4" if request.param == "http" else ""  # else the dead are seen at once
    url = NETWORK[request.param](f"t{new_id()}{lease}") if request.param in NETWORK else ""
    with open_place(folder, url) as place:
        place.write(APP)
        yield place


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
@pytest.mark.parametrize("what", ["queue", "task"])
def test_a_rate_holds_over_all_workers(place: Place, what: str) -> None:
    # law 13, case S5: never more than the burst and what came since, whoever starts them
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
def test_so_many_run_at_a_time_also_when_workers_are_killed(place: Place) -> None:
    # law 13
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


def test_one_tenant_does_not_starve_the_others(place: Place) -> None:
    # law 13
    limit = Limit(key=lambda who: who)
    many = place.enqueue_many("tenant", [("big",)] * 300, limit=limit)
    few = place.enqueue_many("tenant", [(f"small{n % 5}",) for n in range(25)], limit=limit)
    place.worker(processes=2).wait_ready()
    place.finish([*many, *few])
    order = [line.id for line in begins(place)]
    small = {job.id for job in few}
    last = max(order.index(job_id) for job_id in small)
    # In turns: they were leased among the first thirty; the rest is what was held in advance.
    assert last < 150


def test_a_queue_that_fails_in_a_row_pauses_and_opens_again(place: Place) -> None:
    # case S6
    place.mill.queue("shaky", breaker=Breaker(3, pause=0.5))
    jobs = place.enqueue_many("shaky", [()] * 20)
    place.worker(slots=1).wait_ready()
    place.wait_notes("tried", 5)
    times = [float(line.split()[1]) for line in place.wait_notes("tried", 5)]
    assert times[3] - times[2] > 0.45
    assert times[4] - times[3] > 0.45
    waiting = next(job for job in jobs if job.refresh().state is State.READY)
    (row,) = place.mill.limits.list()
    assert row.failures >= 3
    broker: Any = place.mill.broker
    held = eventually(lambda: broker.held(waiting.id), "the queue pauses")
    assert held.broken
    (place.path / "healed").touch()
    place.finish(jobs)
    assert place.mill.limits.list()[0].failures == 0


def test_a_change_reaches_workers_that_sleep(place: Place) -> None:
    # case S5: rate 0 dispatches nothing, a change takes effect at once
    orders = place.mill.queue("default", rate="0/s")
    place.worker(processes=2).wait_ready()
    jobs = place.enqueue_many("quick", [()] * 40)
    other = place.enqueue("slow", 0, queue="other")
    place.finish([other])  # the worker has looked, and goes on elsewhere
    assert [line.id for line in begins(place)] == [other.id]
    orders.limit(rate="1000/s")
    place.finish(jobs)


def test_a_message_consumer_waits_for_the_limit(place: Place) -> None:
    mill = place.mill
    orders = mill.queue("orders", rate="10/s", burst=1)
    orders.put_many([1, 2, 3])
    begun = time.monotonic()  # the first is taken after this, however late we hear of it
    for expected in (1, 2, 3):
        message: Any = orders.get(timeout=20)
        assert message.body == expected
        message.ack()
    assert time.monotonic() - begun >= 0.19


def test_a_run_that_was_interrupted_has_spent_its_token(place: Place) -> None:
    # law 13
    job = place.enqueue("slow", 60, limit="1/h")
    worker = place.worker("--shutdown-timeout", "0.2").wait_ready()
    place.wait_notes("begin")
    worker.send(signal.SIGTERM)
    worker.wait()
    assert job.refresh().state is State.READY
    found = place.mill.broker.held(job.id)  # type: ignore[attr-defined]
    assert found is not None
    assert found.until > 3000
