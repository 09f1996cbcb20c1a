"""``tidemill move`` from a store to RabbitMQ: what it can carry goes, the rest is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Place, eventually, open_place
from servers import rabbitmq_url

from tidemill.clock import new_id

APP = """
@mill.task(retries=3)
def work(n): note("ran", n, current_job().attempt, time.time())
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    url = f"{rabbitmq_url()}?prefix=t{new_id()[-12:]}"
    with open_place(tmp_path / "a") as store, open_place(tmp_path / "b", url) as carrier:
        store.write(APP)
        carrier.app = store.app
        carrier.write(APP, load=False)
        yield store, carrier


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidemill", "move", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def ran(place: Place, count: int) -> list[int]:
    return [int(line.split()[1]) for line in place.wait_notes("ran", count)]


def test_what_it_can_carry_goes_in_its_order(places: tuple[Place, Place]) -> None:
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
    assert sorted(order[1:-1]) == list(range(1200))
    assert order[-1] == 6000
    assert due <= float(carrier.notes()[-1].split()[3]) < due + 15
    again = run(store.url, carrier.url, "--json")
    assert json.loads(again.stdout)["moved"] == 0


def test_what_it_cannot_carry_is_refused_before_anything_moves(
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
    assert "2 jobs were left behind" in done.stdout
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
