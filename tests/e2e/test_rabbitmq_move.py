"""``tidemill move`` to RabbitMQ: jobs that it can hold, in order and at least once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LIMIT, SLACK, Place, eventually, open_place
from servers import rabbitmq_url

from tidemill.core.clock import new_id

APP = """
@mill.task(retries=3)
def work(n): note("ran", n, this_job().attempt, time.time())

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
    with open_place(tmp_path / "a") as store, open_place(tmp_path / "b", url) as rabbit:
        store.write(APP)
        rabbit.app = store.app
        rabbit.write(APP)
        yield store, rabbit


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


def test_jobs_that_rabbitmq_can_hold_move_in_order(places: tuple[Place, Place]) -> None:
    store, rabbit = places
    store.enqueue_many("work", [(n,) for n in range(1200)])
    store.enqueue("work", 5000, priority=5)
    due = time.time() + 6
    store.enqueue("work", 6000, delay=6)
    done = run(store.url, rabbit.url, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["moved"] == 1202
    rabbit.worker(slots=1).wait_ready()
    order = ran(rabbit, 1202)
    assert order[0] == 5000
    assert sorted(order[1:]) == [*range(1200), 6000]
    times = {line.split()[1]: float(line.split()[3]) for line in rabbit.notes()}
    late = times.pop("6000")
    assert due <= late < max(due, *times.values()) + SLACK
    again = run(store.url, rabbit.url, "--json")
    assert json.loads(again.stdout)["moved"] == 0


@pytest.mark.parametrize("where", ["move.putting:2", "move.put:2"])
def test_killed_in_between_it_goes_on(places: tuple[Place, Place], where: str) -> None:
    store, rabbit = places
    store.enqueue_many("work", [(n,) for n in range(1200)])
    assert run(store.url, rabbit.url, TIDEMILL_CRASH=where).returncode == -9
    done = run(store.url, rabbit.url)
    assert done.returncode == 0, done.stderr
    again = 500 if where == "move.put:2" else 0  # at most: a page

    def ready() -> int:
        return sum(row.ready for row in rabbit.mill.queues())

    eventually(lambda: 1200 <= ready() <= 1200 + again, "all is there")
