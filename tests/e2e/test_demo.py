"""The demo on a small folder: its findings, and a ledger that would show work done twice."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from demo_runs import FILES, PATIENCE, finish, make_folder, png, start

from tidemill.demo.images import image_size
from tidemill.demo.ledger import Ledger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.mark.everyday
def test_the_demo_measures_every_file(folder: Path) -> None:
    report = finish(start(folder))
    # then the files are what they are
    assert report["files"] == FILES + 5
    assert report["lines"] == 2 * FILES + 5 + png(30, 20).count(b"\n") - 1
    assert (report["images"], report["pixels"]) == (1, 600)
    assert report["duplicates"] == [[f"alike{n}.txt" for n in range(3)]]
    assert report["failed"] == []
    # and the other jobs did what they are there for
    assert report["late_ms"] >= 0
    assert "timeout of 1 s" in report["timed_out"]
    assert report["retried"] > 0
    # and every execution is accounted for: one for each job, and the retries
    assert report["executions"] == report["jobs"] + report["retried"]
    assert (report["interrupted"], report["redone"], report["unfinished"]) == (0, [], 0)
    assert json.loads((folder / ".tidemill/demo/report.json").read_text()) == report
    # when it is started again, then nothing runs; when a file changes, that one does
    executions = report["executions"]
    report = finish(start(folder))
    assert (report["executions"], report["done_before"]) == (executions, report["jobs"])
    (folder / "alike0.txt").write_text("not any more\n")
    report = finish(start(folder))
    assert report["executions"] - executions in (1, 2)  # its first attempt may fail
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
    assert (again["done_before"], again["executions"]) == (0, first["executions"])
    assert (home / "mine.txt").read_text() == "keep me"


def test_the_ledger_sees_work_done_twice(tmp_path: Path) -> None:
    # given a ledger with a line torn by a kill
    ledger = Ledger(tmp_path / "ledger")
    ledger.ran("a", 1)
    ledger.finished(["a"])
    with open(ledger.path, "a") as file:
        file.write("\nran\t17")
    ledger.ran("b", 1)
    assert (ledger.read().runs, ledger.read().redone) == ({"a": 1, "b": 1}, [])
    # when a finished job runs again
    ledger.ran("a", 1)
    # then it says so
    assert ledger.read().redone == ["a"]


JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    b"\xff\xc2\x00\x11\x08\x00\x14\x00\x1e\x03\x01\x22\x00"
)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (png(30, 20), [30, 20]),
        (b"GIF89a\x1e\x00\x14\x00", [30, 20]),
        (JPEG, [30, 20]),
        (JPEG[:20], None),
        (b"\x89PNG\r\n\x1a\n", None),
        (b"GIF89a", None),
        (b"", None),
        (b"plain text", None),
    ],
)
def test_image_sizes(head: bytes, size: list[int] | None) -> None:
    assert image_size(head) == size
