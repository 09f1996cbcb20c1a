"""The demo killed in the middle: the next run goes on where it was, and nothing is done twice."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from demo_runs import FILES, PATIENCE, finish, finished_runs, make_folder, start, wait_for_runs


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
    done: dict[str, tuple[float, int]] = {}
    for more in (50, 100):
        # when everything is killed once so many more jobs have finished
        demo = start(folder)
        wait_for_runs(demo, folder, len(done) + more)
        kill_all(demo)
        runs = finished_runs(folder)
        # then the jobs that had finished stay as they were
        assert runs.items() >= done.items()
        done = runs
    # and when it is started again, it does the rest, and no finished job ran again
    assert len(done) < FILES + 4000
    report = finish(start(folder))
    assert (report["files"], report["unfinished"]) == (FILES + 4 + 4000, 0)
    assert report["done_before"] >= len(done)
    assert finished_runs(folder).items() >= done.items()
