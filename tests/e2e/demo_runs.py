"""For the tests of the demo: a small folder, and the real demo on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tidemill import Tidemill
from tidemill.core.config import lmdb_url

PATIENCE = 90.0
FILES = 120


def make_folder(tmp_path: Path) -> Path:
    """Text files, three alike, and some of what must be left out."""
    folder = tmp_path / "files"
    for hidden in (".git", ".venv", "node_modules"):
        (folder / hidden).mkdir(parents=True)
        (folder / hidden / "inside.txt").write_text("no\n")
    for n in range(FILES):
        (folder / f"f{n:03}.txt").write_text(f"file {n}\nhas two lines\n")
    for n in range(3):
        (folder / f"alike{n}.txt").write_text("all the same\n")
    (folder / "an odd\tname.txt").write_text("odd\n")
    (folder / "link.txt").symlink_to("f000.txt")
    return folder


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
