"""Stacks and profiles of a worker, asked for through the store, and the lines of slow runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Place, eventually, open_place
from servers import NETWORK

from tidemill.brokers.contract.schedules import Schedule
from tidemill.brokers.generic.notes import Notes
from tidemill.client.worker_reports import KIND, question_of
from tidemill.core.clock import new_id

APP = """
def burn_inside(until):
    while time.time() < until:
        sum(range(1000))

@mill.task
def burns(seconds):
    begin()
    burn_inside(time.time() + seconds)

@mill.task
async def rests(seconds):
    begin()
    await asyncio.sleep(seconds)

@mill.task(timeout=600)
def holds(name):
    begin()
    hold_gil_until(name)

@mill.task
def brief(): pass

@mill.task
def dawdles(): time.sleep(0.3)
"""


@pytest.fixture(params=["lmdb", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    url = f"lmdb://{tmp_path}/store"
    if request.param != "lmdb":
        url = NETWORK[request.param](f"r{new_id()}")
    with open_place(tmp_path, url) as place:
        place.write(APP)
        yield place


def run(place: Place, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", *words, "--url", place.url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if not code else done.stderr


def reports(place: Place) -> list[Schedule]:
    return list(Notes(place.mill.broker, KIND, "test").list())


def of_both(place: Place) -> Any:
    found = json.loads(run(place, "workers", "dump", "mill", "--json"))
    return found if len(found["processes"]) == 2 else None


@pytest.mark.everyday("lmdb")
def test_the_stacks_of_a_worker(place: Place) -> None:
    place.worker("--name", "mill-1", processes=2, slots=2).wait_ready()
    place.enqueue("burns", 300)
    place.wait_notes("begin")
    # when somebody asks through the store, with a beginning of the name
    found = eventually(lambda: of_both(place), "both processes are ready, and answer")
    # then one of them shows the job
    assert found["worker"] == "mill-1"
    assert sum("in burn_inside" in p["stacks"] for p in found["processes"]) == 1
    assert found["silent"] == []
    # and nothing is left in the store
    assert reports(place) == []


@pytest.mark.everyday("lmdb")
def test_a_profile_as_a_flame_graph(place: Place, tmp_path: Path) -> None:
    place.worker("--name", "mill-1", slots=4).wait_ready()
    place.enqueue("burns", 300)
    place.enqueue("rests", 300)
    place.wait_notes("begin", 2)
    # when a profile is written
    page, lines = tmp_path / "out.html", tmp_path / "out.txt"
    said = run(place, "profile", "-s", "0.5", "-o", str(page))
    run(place, "profile", "mill-1", "-s", "0.5", "--hertz", "50", "-o", str(lines))
    # then the table and the files show the function that burns, and who called it
    top = next(line for line in said.splitlines() if "burn_inside" in line)
    assert float(top.split()[0].rstrip("%")) > 50
    stacks = [line.rpartition(" ")[0].split(";") for line in lines.read_text().splitlines()]
    names = [[frame.split(" (")[0] for frame in stack] for stack in stacks]
    assert ["burns", "burn_inside"] in names
    assert all("tidemill/worker" not in frame for stack in stacks for frame in stack)
    text = page.read_text()
    assert "burn_inside" in text
    assert not re.search(r"(?:src|href)=|https?:", text)
    # and the sampler is gone
    assert "tidemill-sampler" not in run(place, "workers", "dump")


def test_a_process_that_cannot_answer(tmp_path: Path) -> None:
    with open_place(tmp_path, f"lmdb://{tmp_path}/store") as place:
        place.write(APP)
        place.worker("--name", "mill-1", slots=2).wait_ready()
        open_gate = place.gate("gate")
        place.enqueue("holds", "gate")
        place.wait_notes("begin")
        # then its stacks are read from outside
        assert "in holds" in run(place, "workers", "dump")
        # and its profile is empty
        found: Any = json.loads(run(place, "profile", "-s", "0.1", "--json"))
        assert (found["stacks"], len(found["silent"])) == ({}, 1)
        open_gate()


def test_a_worker_that_is_not_there(tmp_path: Path) -> None:
    with open_place(tmp_path, f"lmdb://{tmp_path}/store") as place:
        place.write(APP)
        place.enqueue("brief")
        assert "no worker is alive" in run(place, "profile", code=2)
        workers = [place.worker("--name", name) for name in ("mill-1", "mill-2")]
        for worker in workers:
            worker.wait_ready()
        assert "there are 2 workers; name one of them: mill-1, mill-2" in run(
            place, "workers", "dump", code=2
        )
        assert "no worker has the name 'mull-1'" in run(place, "workers", "dump", "mull-1", code=2)
        rows = run(place, "workers", "list").splitlines()
        assert [row.split()[0] for row in rows] == ["worker", "mill-1", "mill-2"]


def test_a_report_that_nobody_fetched_is_deleted(tmp_path: Path) -> None:
    with open_place(tmp_path, f"lmdb://{tmp_path}/store") as place:
        place.write(APP)
        place.enqueue("brief")
        notes = Notes(place.mill.broker, KIND, "test")
        notes.put("old", b"x", seconds=0.001)
        place.worker("--name", "mill-1").wait_ready()
        run(place, "workers", "dump")
        eventually(lambda: reports(place) == [], "the worker deletes the old report")


@pytest.mark.parametrize(
    "verb", ["profile x", "profile x 1 0", "profile x 1e9 10", "profile x nan 5", "dump", "x y"]
)
def test_a_command_that_is_no_question(verb: str) -> None:
    assert question_of(verb) is None


def test_slow_runs_have_a_line(tmp_path: Path) -> None:
    with open_place(tmp_path, f"lmdb://{tmp_path}/store") as place:
        place.write(APP)
        fast, slow = place.enqueue("brief"), place.enqueue("dawdles")
        worker = place.worker("--slow", "0.2", "--log-level", "warning")
        line = re.compile(
            rf"WARNING .*dawdles\[{slow.id}\] was slow: it ran \d+\.\d+ s and had waited "
            r"\d+\.\d+ s \(queue default, attempt 1, slow from 0\.2 s\)"
        )
        eventually(lambda: line.search(worker.output), "the line of the slow run")
        assert fast.id not in worker.output
