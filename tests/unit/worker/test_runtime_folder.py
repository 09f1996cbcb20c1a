"""A worker's folder: removed at its end, or by the next worker after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.worker.machine import RuntimeFolder

OTHER = """
import sys
from tidemill.worker.machine import RuntimeFolder
folder = RuntimeFolder()
open(folder.path + "/stacks-0", "w").close()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_next_worker_removes_the_folder_of_a_killed_one(temporary: Path) -> None:
    # law 15
    mine = temporary / "tidemill-of-mine"
    mine.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        path = process.stdout.readline().strip()
        first = RuntimeFolder()
        assert os.path.exists(f"{path}/stacks-0")  # it lives
        process.kill()
        process.wait(10)
    second = RuntimeFolder()
    assert not os.path.exists(path)
    assert sorted(os.listdir(temporary)) == sorted(
        [mine.name, os.path.basename(first.path), os.path.basename(second.path)]
    )
    first.remove()
    second.remove()
    assert os.listdir(temporary) == [mine.name]
