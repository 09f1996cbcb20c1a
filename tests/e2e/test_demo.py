"""The demo on a small folder: its findings, and that a second run finds nothing to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tidemill import Tidemill
from tidemill.core.config import lmdb_url

PATIENCE = 90.0
FILES = 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text files, three alike, and some of what must be left out."""
    made = tmp_path / "files"
    for hidden in (".git", ".venv", "node_modules"):
        (made / hidden).mkdir(parents=True)
        (made / hidden / "inside.txt").write_text("no\n")
    for n in range(FILES):
        (made / f"f{n:03}.txt").write_text(f"file {n}\nhas two lines\n")
    for n in range(3):
        (made / f"alike{n}.txt").write_text("all the same\n")
    (made / "an odd\tname.txt").write_text("odd\n")
    (made / "link.txt").symlink_to("f000.txt")
    return made


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The real demo, leading a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tidemill", "demo", ".", "--json", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished_runs(folder: Path) -> dict[str, tuple[float, int]]:
    """The end and the attempts of each job of a measured file that has finished in the store."""
    with Tidemill(lmdb_url(folder / ".tidemill/demo/store")) as mill:
        jobs = [job.record for job in mill.jobs(task="tidemill.demo.tasks.measure")]
        return {r.envelope.id: (r.finished, len(r.attempts)) for r in jobs if r.state.finished}


def finish(demo: subprocess.Popen[str]) -> dict[str, Any]:
    """Its report, once it has ended well."""
    try:
        out, err = demo.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(demo.pid, signal.SIGKILL)
        raise
    assert demo.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


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
