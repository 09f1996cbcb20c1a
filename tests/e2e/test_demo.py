"""The demo on a small folder: its findings, and that a second run finds nothing to do."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from demo_runs import FILES, PATIENCE, finish, finished_runs, make_folder, start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.mark.everyday
def test_the_demo_measures_every_file(folder: Path) -> None:
    report = finish(start(folder))
    # then the files are what they are
    assert report["files"] == FILES + 4
    assert report["lines"] == 2 * FILES + 4
    assert report["duplicates"] == [[f"alike{n}.txt" for n in range(3)]]
    assert report["failed"] == []
    # and the other jobs did what they are there for
    assert report["late_ms"] >= 0
    assert "timeout of 1 s" in report["timed_out"]
    assert report["retried"] > 0
    assert report["unfinished"] == 0
    assert json.loads((folder / ".tidemill/demo/report.json").read_text()) == report
    # when it is started again, then nothing runs; when a file changes, that one does
    runs = finished_runs(folder)
    assert finish(start(folder))["done_before"] == report["jobs"]
    assert finished_runs(folder) == runs
    (folder / "alike0.txt").write_text("not any more\n")
    report = finish(start(folder))
    assert len(finished_runs(folder).items() - runs.items()) == 1
    assert report["duplicates"] == [["alike1.txt", "alike2.txt"]]


def test_two_demos_do_not_share_a_home(folder: Path) -> None:
    demo = start(folder)
    try:
        home = folder / ".tidemill/demo"
        deadline = time.monotonic() + PATIENCE
        while not (home / "store").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        demo.send_signal(signal.SIGSTOP)  # else it may end before the other looks
        other = start(folder)
        _, err = other.communicate(timeout=PATIENCE)
        assert other.returncode == 1
        assert "a demo is running in" in err
    finally:
        demo.send_signal(signal.SIGCONT)
        finish(demo)


@pytest.mark.everyday
def test_fresh_starts_over_and_spares_what_is_not_its_own(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = finish(start(folder, "--store", str(home)))
    (home / "mine.txt").write_text("keep me")
    again = finish(start(folder, "--store", str(home), "--fresh"))
    assert (again["done_before"], again["files"]) == (0, first["files"])
    assert (home / "mine.txt").read_text() == "keep me"
