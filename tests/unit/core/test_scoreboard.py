"""The scoreboard shows the running jobs, also after all processes have died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core import scoreboard as module
from tidemill.core.scoreboard import Running, Scoreboard, read_scoreboard, remove_scoreboard


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "board")


ALL = {5, 6, 7, 8, 42, 2**63}


def test_a_running_job_is_listed_until_its_row_is_cleared(path: str) -> None:
    # law 6
    board = Scoreboard(path, 3)
    assert board.running(0, 3, ALL) == []
    board.start(0, 7, 1, 10.0, 0.0)
    board.start(2, 8, 2, 11.0, 99.5)
    assert board.running(0, 3, ALL) == [Running(0, 7, 1, 10.0, 0.0), Running(2, 8, 2, 11.0, 99.5)]
    assert board.running(0, 3, {8}) == [Running(2, 8, 2, 11.0, 99.5)]
    assert board.running(1, 1, ALL) == []
    assert board.running(2, 1, ALL) == [Running(2, 8, 2, 11.0, 99.5)]
    board.clear(0, 1)
    assert [r.slot for r in board.running(0, 3, ALL)] == [2]
    board.clear(1, 2)
    assert board.running(0, 3, ALL) == []
    board.close()


def test_another_reader_sees_running_jobs_at_once(path: str) -> None:
    writer, reader = Scoreboard(path, 2), Scoreboard(path, 2)
    writer.claim("o")
    writer.start(1, 2**63, 4, 1.5, 2.5)
    assert reader.running(0, 2, ALL) == [Running(1, 2**63, 4, 1.5, 2.5)]
    assert read_scoreboard(path, "o") == {2**63: 1.5}
    writer.clear(1, 1)
    assert reader.running(0, 2, ALL) == []
    assert read_scoreboard(path, "o") == {}


def test_a_board_may_grow(path: str) -> None:
    small = Scoreboard(path, 1)
    small.claim("o")
    small.start(0, 5, 1, 1.0, 0.0)
    larger = Scoreboard(path, 4)
    larger.start(3, 6, 1, 2.0, 0.0)
    assert read_scoreboard(path, "o") == {5: 1.0, 6: 2.0}


def test_the_token_is_written_last(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a kill in between must not show a new token with another job's times
    board = Scoreboard(path, 1)
    board.claim("o")

    class Killed(Exception):
        pass

    class Cut:
        """The token's struct of a process that dies just before writing it."""

        def pack_into(self, *_: object) -> None:
            raise Killed

    monkeypatch.setattr(module, "_TOKEN", Cut())
    with pytest.raises(Killed):
        board.start(0, 9, 3, 12.0, 0.0)
    assert board.running(0, 1, ALL) == []
    assert read_scoreboard(path, "o") == {}


def test_a_scoreboard_is_readable_after_a_kill(path: str) -> None:
    # law 6, case T9
    code = (
        "import sys, os, signal; from tidemill.core.scoreboard import Scoreboard\n"
        "board = Scoreboard(sys.argv[1], 2); board.claim('o'); board.start(1, 42, 1, 10.0, 0.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert read_scoreboard(path, "o") == {42: 10.0}


def test_no_board_is_no_witness_and_a_torn_one_is_read_as_far_as_it_goes(path: str) -> None:
    assert read_scoreboard(path, "o") is None
    Path(path).write_bytes(b"")
    assert read_scoreboard(path, "o") is None
    board = Scoreboard(path, 1)
    board.claim("o")
    board.start(0, 3, 1, 1.0, 0.0)
    with open(path, "ab") as file:
        file.write(b"torn")
    assert read_scoreboard(path, "o") == {3: 1.0}
    board.remove()
    board.remove()
    assert not os.path.exists(path)
    assert read_scoreboard(path, "o") is None


def test_the_board_of_another_owner_is_no_witness_and_is_left_alone(path: str) -> None:
    # law 6
    board = Scoreboard(path, 1)
    board.start(0, 3, 1, 1.0, 0.0)
    assert read_scoreboard(path, "mine") is None  # nobody has claimed it
    board.claim("somebody else")
    for owner in ("mine", "", "some", "x" * 40):
        assert read_scoreboard(path, owner) is None
        remove_scoreboard(path, owner)
    assert read_scoreboard(path, "somebody else") == {3: 1.0}
    remove_scoreboard(path, "somebody else")
    remove_scoreboard(path, "somebody else")
    assert not os.path.exists(path)
    for wrong in ("", "x" * 33):
        with pytest.raises(ValueError, match=r"owner id"):
            board.claim(wrong)
