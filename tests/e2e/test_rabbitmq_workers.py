"""Real workers on RabbitMQ without a store; their ledger tells how jobs ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LIMIT, Place, alive, check_no_overlap, eventually, open_place, runs_of
from servers import RabbitMQ, rabbitmq_url

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


def test_a_task_that_enqueues_may_hold_the_lock(at: Callable[..., Place]) -> None:
    place = at("&owner_lease=2")
    place.worker(slots=2).wait_ready()
    place.enqueue("sows", 100)
    place.wait_notes("short", 100)
    place.wait_notes("end", 101)
    assert len(place.notes()) == 3 * 100 + 1


@pytest.mark.everyday
def test_strict_queues_are_emptied_in_their_order(place: Place) -> None:  # law 10
    for queue, first in (("c", 20), ("b", 10), ("a", 0)):
        place.enqueue_many("short", [(first + n,) for n in range(10)], queue=queue)
    place.worker("--burst", "-Q", "a,b,c", slots=1).wait()
    ran = [int(line.split()[1]) for line in place.notes() if line.startswith("short")]
    assert ran == list(range(30))


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
