"""The demo killed in the middle: the next run goes on where it was, and nothing is done twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from demo_runs import FILES, PATIENCE, finish, make_folder, start

from tidemill.demo.ledger import Ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def kill_all(demo: subprocess.Popen[str]) -> None:
    """kill -9 of its whole group; the worker processes, in groups of their own, follow."""
    family = psutil.Process(demo.pid).children(recursive=True)
    os.killpg(demo.pid, signal.SIGKILL)
    demo.communicate(timeout=PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == []


def test_killed_in_the_middle_it_goes_on_where_it_was(folder: Path) -> None:
    # case Q7, case T10, law 1: given enough files that a kill falls among them
    for n in range(4000):
        (folder / f"more{n}.txt").write_text(f"more {n}\n")
    ledger = Ledger(folder / ".tidemill/demo/ledger")
    runs = []
    for more in (50, 100):
        # when everything is killed once so many more jobs have begun
        least = more + (runs[-1] if runs else 0)
        demo = start(folder)
        deadline = time.monotonic() + PATIENCE
        while ledger.read().executions < least:
            assert demo.poll() is None, demo.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kill_all(demo)
        runs.append(ledger.read().executions)
    # and it is started again
    report = finish(start(folder))
    # then all is done, and nothing that had finished ran again
    assert report["files"] == FILES + 5 + 4000
    assert report["unfinished"] == 0
    assert report["redone"] == []
    account = ledger.read()
    assert account.redone == []
    assert set(account.runs) >= account.finished
    assert len(account.finished) == report["jobs"]
    # and the kills were real, and cost no more than what was in hand: up to what 8 slots ran, and
    # what they had just done but not yet handed in
    assert runs[0] < runs[1] < report["executions"]
    assert report["done_before"] > 0
    extra = report["executions"] - report["jobs"] - report["retried"]
    assert extra == report["interrupted"] < report["jobs"] / 2


def test_the_worker_ends_when_the_demo_is_killed_alone(folder: Path) -> None:
    # given a demo that is at work
    demo = start(folder)
    ledger = Ledger(folder / ".tidemill/demo/ledger")
    deadline = time.monotonic() + PATIENCE
    while ledger.read().executions < 100:
        assert demo.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    family = psutil.Process(demo.pid).children(recursive=True)
    # when it alone is killed
    demo.kill()
    demo.communicate(timeout=PATIENCE)
    # then its worker and the worker's processes end by themselves
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert alive == []


def test_the_job_that_times_out_does_so_although_it_was_killed(folder: Path) -> None:
    # given a demo whose job that is to time out has begun
    demo = start(folder, "-p", "1")
    path = folder / ".tidemill/demo/ledger"
    deadline = time.monotonic() + PATIENCE
    while not (found := re.search(r"ran\t[\d.]+\t(\d+)\t1\ttimes-out\n", text_of(path))):
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    # when the process it runs in is killed, which is an attempt, and its only one
    os.kill(int(found[1]), signal.SIGKILL)
    # then it is run again, and the report is of its timeout and knows of the kill
    report = finish(demo)
    assert "timeout of 1 s" in report["timed_out"]
    assert report["interrupted"] >= 1
    assert report["executions"] == report["ran"] + report["retried"] + report["interrupted"]
    assert (report["unfinished"], report["redone"]) == (0, [])
    # and a run that comes later finds nothing to do
    assert finish(start(folder))["executions"] == report["executions"]


def test_the_counts_are_right_when_the_folder_changes_between_runs(folder: Path) -> None:
    # given a demo that was killed in the middle
    for n in range(1500):
        (folder / f"more{n}.txt").write_text(f"more {n}\n")
    demo = start(folder)
    ledger = Ledger(folder / ".tidemill/demo/ledger")
    deadline = time.monotonic() + PATIENCE
    while ledger.read().executions < 300:
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    kill_all(demo)
    # when files go, change and come before it is started again
    for n in range(1000):
        (folder / f"more{n}.txt").unlink()
    for n in range(1000, 1010):
        (folder / f"more{n}.txt").write_text("changed\n")
    (folder / "new.txt").write_text("new\n")
    report = finish(start(folder))
    # then what it says of the folder is of the folder as it is
    assert report["files"] == FILES + 5 + 500 + 1
    assert report["jobs"] == report["files"] + 2
    assert (report["unfinished"], report["failed"], report["redone"]) == (0, [], [])
    # and what it says of the runs is of all that ever ran: also of files that are gone
    assert report["ran"] == len(ledger.read().runs) > report["jobs"]
    assert report["executions"] == report["ran"] + report["retried"] + report["interrupted"]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
