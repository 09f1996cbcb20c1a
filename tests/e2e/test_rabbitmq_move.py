"""``tidemill move`` to RabbitMQ, for jobs that it can carry, and from RabbitMQ, for all jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LIMIT, SLACK, Place, eventually, open_place
from servers import rabbitmq_url

from tidemill.core.clock import new_id
from tidemill.core.job import State

APP = """
@mill.task(retries=3)
def work(n): note("ran", n, current_job().attempt, time.time())

@mill.task(retries=0)
def fails(n): note("failing"); raise ValueError(f"broken {n}")

@mill.task
def waits(n):
    begin()
    while not os.path.exists(os.path.join(HERE, "go")):
        time.sleep(0.01)
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    url = f"{rabbitmq_url()}?prefix=t{new_id()[-12:]}"
    with open_place(tmp_path / "a") as store, open_place(tmp_path / "b", url) as carrier:
        store.write(APP)
        carrier.app = store.app
        carrier.write(APP)
        yield store, carrier


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidemill", "move", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=3 * LIMIT,
    )


def ran(place: Place, count: int) -> list[int]:
    return [int(line.split()[1]) for line in place.wait_notes("ran", count)]


def test_jobs_that_rabbitmq_can_carry_move_in_order(places: tuple[Place, Place]) -> None:
    store, carrier = places
    store.enqueue_many("work", [(n,) for n in range(1200)])
    store.enqueue("work", 5000, priority=5)
    due = time.time() + 6
    store.enqueue("work", 6000, delay=6)
    done = run(store.url, carrier.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["moved"] == 1202
    carrier.worker(slots=1).wait_ready()
    order = ran(carrier, 1202)
    assert order[0] == 5000
    assert sorted(order[1:]) == [*range(1200), 6000]
    times = {line.split()[1]: float(line.split()[3]) for line in carrier.notes()}
    late = times.pop("6000")
    # the server may forward a due job again only after 10 s, or after 20 s
    assert due <= late < max(due, *times.values()) + 20 + SLACK
    again = run(store.url, carrier.url, "--json")
    assert json.loads(again.stdout)["moved"] == 0


def test_jobs_that_rabbitmq_cannot_carry_are_refused_before_anything_moves(
    places: tuple[Place, Place],
) -> None:
    store, carrier = places
    store.enqueue("work", 1)
    store.enqueue("work", 2, key="k")
    store.enqueue("work", 3, limit="1/s")
    done = run(store.url, carrier.url)
    assert done.returncode == 2
    assert "1 jobs with a key, 1 jobs with a limit" in done.stderr
    store.enqueue("work", 4)  # it was not left
    done = run(store.url, carrier.url, "--leave")
    assert done.returncode == 0, done.stderr
    assert "2 jobs moved" in done.stdout
    assert "left behind in" in done.stdout
    assert "1 jobs with a key, 1 jobs with a limit" in done.stdout
    carrier.worker("--burst").wait()
    assert sorted(ran(carrier, 2)) == [1, 4]


@pytest.mark.parametrize("where", ["move.adopting:2", "move.adopted:2"])
def test_killed_in_between_it_goes_on(places: tuple[Place, Place], where: str) -> None:
    store, carrier = places
    store.enqueue_many("work", [(n,) for n in range(1200)])
    assert run(store.url, carrier.url, TIDEMILL_CRASH=where).returncode == -9
    done = run(store.url, carrier.url)
    assert done.returncode == 0, done.stderr
    again = 500 if where.startswith("move.adopted") else 0  # at most: a page

    def ready() -> int:
        return sum(row.ready for row in carrier.mill.queues())

    eventually(lambda: 1200 <= ready() <= 1200 + again, "all is there")


@pytest.mark.everyday
def test_killed_on_the_way_out_it_loses_and_doubles_nothing(places: tuple[Place, Place]) -> None:
    # law 3
    store, carrier = places
    jobs = carrier.enqueue_many("work", [(n,) for n in range(600)])
    later = carrier.enqueue("work", 7000, delay=3600)
    jobs.append(carrier.enqueue("work", 6000, delay=5))
    broken = carrier.enqueue("fails", 1, queue="f")
    worker = carrier.worker("-Q", "f", slots=1)
    carrier.wait_notes("failing")
    assert worker.stop() == 0
    # when: killed at each step in turn
    for where in ("adopting:1", "adopted:2", "acknowledged:1", "adopted:2"):
        killed = run(carrier.url, store.url, TIDEMILL_CRASH=f"move.{where}")
        assert killed.returncode == -signal.SIGKILL, (where, killed.stdout + killed.stderr)
    done = run(carrier.url, store.url, "--json")
    # then
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["stayed"], document["strange"], document["remaining"]) == ([], [], 0)
    assert document["repeated"] > 0
    assert broken_in(store, broken.id) == (State.FAILED, "ValueError: broken 1")
    assert store.mill.job(later.id).state is State.SCHEDULED
    store.worker(slots=1).wait_ready()
    store.finish([store.mill.job(job.id) for job in jobs if job.id != later.id])
    assert sorted(ran(store, 601)) == [*range(600), 6000]


def broken_in(place: Place, job_id: str) -> tuple[State, str]:
    job = place.mill.job(job_id)
    return job.state, job.error.splitlines()[0]


def test_a_move_reports_that_workers_of_the_source_hold_jobs(places: tuple[Place, Place]) -> None:
    store, carrier = places
    carrier.enqueue("waits", 1)
    worker = carrier.worker(slots=1).wait_ready()
    carrier.wait_notes("begin")
    refused = run(carrier.url, store.url, "--cancel")
    assert refused.returncode == 2
    assert "closes nothing" in refused.stderr
    done = run(carrier.url, store.url)
    assert "0 jobs moved" in done.stdout
    assert "consumers still take jobs" in done.stdout
    (carrier.path / "go").touch()
    assert worker.stop() == 0
