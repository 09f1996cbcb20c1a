"""Kills at every named step that moves jobs: nothing lost, doubled or miscounted (case Q20).

A worker is started with ``TIDEMILL_CRASH=point:N`` under load and dies there, several times; then
another drains the store, and the checker looks at what is left.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from checker import check
from harness import Place, Worker, eventually, open_place
from servers import NETWORK

from tidemill.core.clock import new_id

APP = """
@mill.task(queue="a", retries=Retries(20, delay=0))
def work(n):
    begin()
    if n % 7 == 0:
        time.sleep(0.003)
    end()
    return n

@mill.task(queue="b", retries=Retries(20, delay=0.01))
async def awork(n):
    begin()
    await asyncio.sleep(0.001)
    end()
    return n
"""

SUPERVISOR = [
    "store.begin",
    "store.begun",
    "store.commit",
    "store.committed",
    "worker.exchanged",
    "worker.handed",
    "worker.collected",
    "worker.spawning",
    "worker.spawned",
]
CHILD = ["process.ended", "process.sent"]
DEATHS = ["store.reaping", "store.reaped"]  # passed by who finds that another one died
BURYING = ["worker.burying"]  # passed by a supervisor that lost a process
ROUNDS = int(os.environ.get("TIDEMILL_ROUNDS", "4"))
"""How often at each point; ``make test`` says 1, and ``make long`` 20."""
LOADS = 20
"""How often jobs are put until a process dies at its point. One load may take fewer steps."""


def kill_times(place: Place) -> list[float]:
    """When processes died at a point, as they noted themselves."""
    try:
        lines = (place.path / "crashes").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [float(line.split()[2]) for line in lines]


def crash_env(place: Place, point: str, count: int) -> dict[str, str]:
    log = str(place.path / "crashes")
    return {"TIDEMILL_CRASH": f"{point}:{count}", "TIDEMILL_CRASH_LOG": log}


def load(place: Place, accepted: list[str]) -> None:
    jobs = place.enqueue_many("work", [(n,) for n in range(60)])
    jobs += place.enqueue_many("awork", [(n,) for n in range(20)])
    accepted += [job.id for job in jobs]


def crash_everywhere(place: Place, point: str, rounds: int, rng: random.Random) -> None:
    place.write(APP)
    accepted: list[str] = []
    for _ in range(rounds):
        load(place, accepted)
        before = len(kill_times(place))
        # Starting passes the store's points some five times, spawning twice; then comes the work.
        least = {"worker.spawning": 1, "worker.spawned": 1}.get(point, 3)
        more = 1 if "spawn" in point else 12
        count = rng.randint(least, least + more) if rounds > 1 else least
        worker = place.worker(processes=2, slots=3, env=crash_env(place, point, count))
        load_until_crash(place, worker, before, functools.partial(load, place, accepted))
        if point in CHILD:
            worker.kill_everything()  # the supervisor
        worker.wait()
    place.drain(slots=4)
    check(place, accepted, [*kill_times(place), *place.killed])


def load_until_crash(place: Place, worker: Worker, before: int, put: Callable[[], object]) -> None:
    """Put more jobs each time that the worker rests, until a process dies at its point."""
    for _ in range(LOADS):
        worker._until(functools.partial(has_crashed_or_rests, place, before), "a crash, or rest")
        if has_crashed(place, before):
            return
        put()
    raise AssertionError(f"no process has died at its point under {LOADS} loads")


@pytest.mark.everyday
@pytest.mark.parametrize("point", [*SUPERVISOR, *CHILD])
def test_kill_at(place: Place, point: str) -> None:  # case Q20
    crash_everywhere(place, point, ROUNDS, random.Random(point))


@pytest.mark.everyday
@pytest.mark.parametrize("point", DEATHS)
def test_kill_while_reaping_the_dead(place: Place, point: str) -> None:  # case Q20
    """One worker is killed; whoever finds out dies in the middle of giving back its jobs."""
    place.write(APP)
    accepted: list[str] = []
    for _ in range(ROUNDS):
        load(place, accepted)
        first = place.worker(slots=2).wait_ready()
        place.wait_notes("end")
        first.kill_everything()
        place.worker(slots=2, env=crash_env(place, point, 1)).wait()
    place.drain(slots=4)
    assert len(kill_times(place)) == ROUNDS
    check(place, accepted, [*kill_times(place), *place.killed])


@pytest.mark.everyday
@pytest.mark.parametrize("broker", ["lmdb", "redis"])
def test_kill_a_worker_that_was_handed_jobs(tmp_path: Path, broker: str) -> None:  # case Q20
    """Jobs come one at a time to a worker that sleeps; it dies before it knows of the last."""
    folder = tmp_path / "p"
    folder.mkdir()
    with open_place(folder, NETWORK[broker]("t" + new_id()) if broker in NETWORK else "") as place:
        kill_when_handed(place)


def kill_when_handed(place: Place) -> None:
    place.write(APP)
    accepted: list[str] = []
    for lives in range(1, ROUNDS + 1):
        before = len(kill_times(place))
        worker = place.worker(slots=3, env=crash_env(place, "store.fetching", lives)).wait_ready()
        for n in range(200):  # it may be awake now and then, and take them itself
            job = place.enqueue("work", n)
            accepted.append(job.id)
            died = functools.partial(has_crashed, place, before)
            eventually(lambda job=job, died=died: job.state.finished or died(), "its end")
            if died():
                break
        worker.wait()
    place.drain(slots=4)
    assert len(kill_times(place)) == ROUNDS
    check(place, accepted, kill_times(place))


@pytest.mark.everyday
@pytest.mark.parametrize("point", BURYING)
def test_kill_while_burying_a_process(place: Place, point: str) -> None:  # case Q20
    """A process dies with its jobs; the supervisor dies while it settles what that one held."""
    place.write(APP + "\n@mill.task(retries=9)\ndef dies():\n    begin(); os.abort()\n")
    accepted: list[str] = []
    for _ in range(ROUNDS):
        load(place, accepted)
        accepted.append(place.enqueue("dies", retries=1).id)
        place.worker(slots=2, env=crash_env(place, point, 1)).wait()
    place.drain(slots=4)
    assert len(kill_times(place)) == ROUNDS
    aborts = [line.time for line in place.ledger() if line.what == "begin"]
    check(place, accepted, [*kill_times(place), *aborts])


UNKNOWN = """
def known(function):
    lacks = os.environ.get("TEST_LACKS") == function.__name__
    return function if lacks else mill.task(retries=Retries(20, delay=0))(function)

@known
def ours(n): begin(); end()

@known
def theirs(n): begin(); end()
"""
GIVEN_BACK = [
    *[("lmdb", point) for point in ("store.begun", "store.commit", "store.committed")],
    *[
        (broker, point)
        for broker in ("lmdb", "redis", "postgresql")
        for point in ("worker.exchanged", "worker.collected", "process.sent")
    ],
]


@pytest.mark.everyday("lmdb-worker.collected", "redis-process.sent")
@pytest.mark.parametrize(("broker", "point"), GIVEN_BACK)
def test_kill_while_jobs_of_unknown_tasks_are_given_back(
    tmp_path: Path, broker: str, point: str
) -> None:
    # case Q20, law 3: two apps on one queue, and each worker dies in turn
    folder, rng = tmp_path / "p", random.Random(f"{broker} {point}")
    folder.mkdir()
    with open_place(folder, NETWORK[broker]("t" + new_id()) if broker in NETWORK else "") as place:
        place.write(UNKNOWN)
        accepted: list[str] = []
        given_back = 0
        least = 8  # starting passes the points, too

        def put() -> None:
            for name in ("ours", "theirs"):
                jobs = place.enqueue_many(name, [(n,) for n in range(30)])
                accepted.extend(job.id for job in jobs)

        for turn in range(ROUNDS):
            put()
            lacks = {"TEST_LACKS": ("ours", "theirs")[turn % 2]}
            count = rng.randint(least, least + 8) if ROUNDS > 1 else least
            crash = crash_env(place, point, count)
            before = len(kill_times(place))
            worker = place.worker(processes=2, slots=3, env={**lacks, **crash})
            load_until_crash(place, worker, before, put)
            worker.kill_everything()
            given_back += sum(row.scheduled for row in place.mill.queues())
        assert given_back
        place.drain(slots=4)
        check(place, accepted, [*kill_times(place), *place.killed])


def has_crashed(place: Place, before: int) -> bool:
    """A process died at its point."""
    return len(kill_times(place)) > before


def has_crashed_or_rests(place: Place, before: int) -> bool:
    """A process died at its point, or all jobs that are left wait for their next try."""
    busy = sum(row.ready + row.running for row in place.mill.queues())
    return has_crashed(place, before) or not busy
