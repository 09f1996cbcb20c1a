"""Real workers on RabbitMQ without a store; their ledger tells how jobs ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, SLACK, Place, alive, check_no_overlap, eventually, open_place, runs_of
from servers import RabbitMQ, free_port, rabbitmq_url

from tidemill import Tidemill
from tidemill.core.clock import new_id

APP = """
@mill.task(retries=Retries(3, delay=0))
def long(seconds=30.0):
    begin()
    until = time.time() + seconds
    while time.time() < until and not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task
def short(n=0): begin(); note("short", n); end()

@mill.task
def sows(n):
    jobs = []
    for number in range(n):
        jobs.append(short.call(number))
        if number % 10 == 9:
            hold_gil(0.3)
            mill.enqueue_many(jobs)
            jobs = []
    end()
"""


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Open a place on the server, with options for its url."""
    with contextlib.ExitStack() as opened:

        def open_at(options: str = "") -> Place:
            url = f"{rabbitmq_url()}?prefix=t{new_id()[-12:]}{options}"
            place = opened.enter_context(open_place(tmp_path, url))
            place.write(APP)
            return place

        yield open_at


@pytest.fixture
def place(at: Callable[..., Place]) -> Place:
    return at()


def failed(place: Place, count: int = 1) -> list[Any]:
    """The records of what failed, when there are so many."""

    def enough() -> list[Any] | None:
        jobs = [job.record for job in place.mill.jobs(state="failed")]
        return jobs if len(jobs) >= count else None

    return eventually(enough, f"{count} failed")


def test_kill_of_the_supervisor(place: Place) -> None:  # case T10, law 5
    worker = place.worker(processes=2, slots=2).wait_ready()
    job = place.enqueue("long", 300.0)
    place.wait_notes("begin", 1)
    processes = [process.pid for process in worker.children()]
    place.worker(slots=4).wait_ready()
    os.kill(worker.pid, signal.SIGKILL)
    killed = time.time()
    eventually(lambda: not any(map(alive, processes)), "all end by themselves", 2.0 + SLACK)
    worker.wait()
    place.wait_notes(f"begin {job.id}", 2)
    assert place.ledger()[1].time - killed < 1.0 + SLACK  # the server saw the line end


@pytest.mark.everyday
def test_kill_of_everything_in_the_middle_loses_nothing(place: Place) -> None:
    # case T10, laws 1, 2, 3
    worker = place.worker(processes=2, slots=4).wait_ready()
    place.enqueue_many("short", [(n,) for n in range(2000)])
    place.wait_notes("short", 300)
    worker.kill_everything()
    place.worker(processes=2, slots=4).wait_ready()

    def ran() -> set[str]:
        return {line for line in place.notes() if line.startswith("short")}

    eventually(lambda: len(ran()) == 2000, "all run", 3 * LIMIT)
    eventually(lambda: not sum(row.ready for row in place.mill.queues()), "nothing is left")
    assert not place.mill.broker.info()["failed"]
    check_no_overlap(place.ledger())


def test_a_killed_server_loses_nothing_of_what_it_confirmed(tmp_path: Path) -> None:  # law 1
    server = RabbitMQ()
    try:
        with open_place(tmp_path, f"{server.url}?patience=60") as place:
            place.write(APP)
            place.enqueue_many("short", [(n,) for n in range(100)])
            place.enqueue_many("short", [(n,) for n in range(100, 120)], delay=3)
            server.sync()
            place.enqueue_many("short", [(n,) for n in range(120, 300)])
            server.kill()
            server.start()
            place.worker(slots=4).wait_ready()

            def ran() -> set[str]:
                return {line for line in place.notes() if line.startswith("short")}

            eventually(lambda: len(ran()) == 300, "all run", 2 * LIMIT)
    finally:
        server.close()


def test_a_job_longer_than_the_server_waits_runs_once_where_nobody_else_takes_it(
    tmp_path: Path,
) -> None:
    # case T12, law 5: what the server takes back comes again, and is recognized
    server = RabbitMQ("consumer_timeout = 1000")
    try:
        server.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
        with open_place(tmp_path, server.url) as place:
            place.write(APP)
            worker = place.worker(slots=2).wait_ready()
            job = place.enqueue("long", 300.0)
            begun = "took back our messages"
            eventually(lambda: worker.output.count(begun) > 1, "it is taken back, and again", 60)
            (place.path / "go").touch()
            place.wait_notes("end")
            place.enqueue("short")
            place.wait_notes("short")
            eventually(lambda: not any(row["messages"] for row in jobs_of(server)), "their end")
            assert len(runs_of(place.ledger())[job.id]) == 1
            assert place.mill.broker.info()["failed"] == 0
    finally:
        server.close()


def jobs_of(server: RabbitMQ) -> list[dict[str, int]]:
    """The queues in which jobs lie."""
    return [row for name, row in server.queues().items() if ".tasks." in name]


def test_a_worker_that_cannot_reach_the_server_says_so(tmp_path: Path) -> None:
    with open_place(tmp_path, f"amqp://127.0.0.1:{free_port()}/?patience=1") as place:
        place.write(APP)
        worker = place.worker()
        assert worker.wait() == 3
        said = worker.output.strip()
        assert "cannot reach rabbitmq at 127.0.0.1:" in said, said
        assert "Traceback" not in said, said


def test_a_task_that_enqueues_may_hold_the_lock(at: Callable[..., Place]) -> None:
    place = at("&owner_lease=2")
    place.worker(slots=2).wait_ready()
    place.enqueue("sows", 100)
    place.wait_notes("short", 100)
    place.wait_notes("end", 101)
    assert len(place.notes()) == 3 * 100 + 1


def test_urgent_queues_are_emptied_first(place: Place) -> None:  # case T13, law 10
    place.enqueue_many("short", [(n,) for n in range(10)], priority=-5)
    place.enqueue_many("short", [(n,) for n in range(10, 20)])
    place.enqueue_many("short", [(n,) for n in range(20, 30)], priority=5)
    place.worker("--burst", slots=1).wait()
    ran = [int(line.split()[1]) for line in place.wait_notes("short", 30)]
    assert [set(ran[start : start + 10]) for start in (0, 10, 20)] == [
        {*range(20, 30)},
        {*range(10, 20)},
        {*range(10)},
    ], ran


@pytest.mark.everyday
def test_strict_queues_are_emptied_in_their_order(place: Place) -> None:  # law 10
    for queue, first in (("c", 20), ("b", 10), ("a", 0)):
        place.enqueue_many("short", [(first + n,) for n in range(10)], queue=queue)
    place.worker("--burst", "-Q", "a,b,c", slots=1).wait()
    ran = [int(line.split()[1]) for line in place.notes() if line.startswith("short")]
    assert ran == list(range(30))


def test_expired_jobs_do_not_run(place: Place) -> None:  # case T14
    place.enqueue("short", 1, expires=0.05)
    place.enqueue("short", 2, expires=600)
    time.sleep(0.1)
    place.worker("--burst").wait()
    assert [line for line in place.notes() if line.startswith("short")] == ["short 2"]


@pytest.mark.everyday
def test_unsigned_jobs_do_not_run(place: Place) -> None:  # case T15, law 18
    forged = Tidemill(place.url, secret_keys=["another"], allow_imports=["*"])
    place.write(APP, secret_keys=["new", "old"])
    forged.enqueue(place.task("short"), 1)
    old = Tidemill(place.url, secret_keys=["old"], allow_imports=["*"])
    old.enqueue(place.task("short"), 2)
    place.worker().wait_ready()
    place.wait_notes("short 2")
    (record,) = failed(place)
    assert "bad signature" in record.error
    assert not [line for line in place.notes() if line == "short 1"]
    for mill in (forged, old):
        mill.close()


def test_short_jobs_do_not_wait_for_long_ones(place: Place) -> None:  # case T18
    place.worker(processes=2, slots=4).wait_ready()
    place.enqueue_many("long", [(300.0,)] * 7)
    place.wait_notes("begin", 7)
    place.enqueue_many("short", [(n,) for n in range(300)])
    place.wait_notes("short", 300)
    assert not [line for line in place.notes() if line.startswith("end") and "long" in line]
    (place.path / "go").touch()
    place.wait_notes("end", 307)


@pytest.mark.everyday
def test_delayed_jobs_come_in_their_time(place: Place) -> None:  # law 9
    place.worker().wait_ready()
    due: dict[str, float] = {}
    for delay in (0.5, 0.1, 1.3):
        before = time.time()
        due[place.enqueue("short", delay=delay).id] = before + delay
    place.wait_notes("short", 3)
    late = {line.id: line.time - due[line.id] for line in place.ledger() if line.what == "begin"}
    assert len(late) == 3
    assert all(0 <= seconds < SLACK for seconds in late.values()), late


@pytest.mark.everyday
def test_a_worker_killed_while_it_moves_delayed_jobs_on_loses_none(
    place: Place,
) -> None:  # law 1: between the confirm and the acknowledgement
    log = place.path / "crashes"
    env = {"TIDEMILL_CRASH": "timers.moved:1", "TIDEMILL_CRASH_LOG": str(log)}
    victim = place.worker(env=env).wait_ready()
    jobs = {place.enqueue("short", n, delay=1.0).id for n in range(20)}
    eventually(log.exists, "it comes to the point")
    eventually(lambda: not alive(victim.pid), "it dies there")
    place.worker().wait_ready()
    eventually(lambda: {x.id for x in place.ledger() if x.what == "end"} == jobs, "all have run")
    # at most: begun by the worker that died, then run from either place
    assert max(map(len, runs_of(place.ledger()).values())) <= 3
