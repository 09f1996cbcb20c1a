"""``tidemill worker`` as a real process: it works, reloads, and its exit codes are as promised."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_store import Desk
from click.testing import CliRunner

from tidemill import State, Tidemill
from tidemill.cli import main

PATIENCE = 60.0
APP = """
from tidemill import State, Tidemill
from tidemill.cli import main
mill = Tidemill("lmdb://./store")

@mill.task(name="say")
def say():
    return {word!r}
"""


@contextlib.contextmanager
def worker(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process in a folder, ended with all its own at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "worker", *words],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        process.stderr.close()


@pytest.mark.everyday
def test_reload_brings_the_new_code(tmp_path: Path) -> None:
    # given a worker in development mode
    path = tmp_path / "live_app.py"
    path.write_text(APP.format(word="old"))
    with worker(tmp_path, "live_app:mill", "-p", "1", "-c", "2", "--reload") as process:
        with Tidemill(f"lmdb://{tmp_path}/store") as mill:
            say = mill.task(name="say")(stand_in)
            assert say.enqueue().result(PATIENCE) == "old"
            # when the file changes
            path.write_text(APP.format(word="the new one"))
            # then jobs run the new code before long
            deadline = time.monotonic() + PATIENCE
            while (word := say.enqueue().result(PATIENCE)) != "the new one":
                assert word == "old"
                assert time.monotonic() < deadline
                time.sleep(0.1)
        process.terminate()
        assert process.wait(PATIENCE) == 0


def stand_in() -> str:
    """Stands for the task that only the worker's app really has."""
    raise NotImplementedError


@pytest.mark.everyday
def test_enqueue_waits_for_the_result(tmp_path: Path) -> None:
    # case T16, from the shell
    desk = Desk(tmp_path)
    app = desk.write_app()

    def enqueue(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidemill", "enqueue", *words, "--app", app]
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)

    try:
        with worker(tmp_path, app, "-p", "1", "-c", "2"):
            good = enqueue("add", "20", "--kw", "b=22", "--wait", str(PATIENCE))
            bad = enqueue("add", "twenty", "--kw", "b=22", "--wait", str(PATIENCE))
    finally:
        desk.close()
    assert (good.returncode, good.stdout) == (0, "42\n"), good.stderr
    assert bad.returncode == 1
    assert "failed: TypeError: can only concatenate str" in bad.stderr
    assert bad.stderr.count("\n") == 1


@pytest.mark.everyday
def test_cancel_terminate_stops_a_running_job(tmp_path: Path) -> None:
    # case T14, from the shell
    app = 'import time\nfrom tidemill import Tidemill\nmill = Tidemill("lmdb://./store")\n'
    task = '@mill.task(name="spin")\ndef spin():\n    while True:\n        time.sleep(0.02)\n'
    (tmp_path / "spin_app.py").write_text(app + task)
    url = f"lmdb://{tmp_path}/store"
    with worker(tmp_path, "spin_app:mill", "-p", "1", "-c", "2"), Tidemill(url) as mill:
        job = mill.task(name="spin")(stand_in).enqueue()
        deadline = time.monotonic() + PATIENCE
        while job.state is not State.RUNNING:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        result = CliRunner().invoke(main, ["cancel", job.id, "--terminate", "--url", url])
        assert result.stdout == "cancelled 1 job\n"
        assert job.wait(PATIENCE) is State.CANCELLED


@pytest.mark.everyday
def test_the_environment_names_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_app.py").write_text(APP.format(word="named"))
    with worker(tmp_path, "--burst") as unnamed:
        assert unnamed.wait(PATIENCE) == 2
        assert "name the app, as in tidemill worker shop:mill; or set $TIDEMILL_APP" in (
            unnamed.stderr.read()
        )
    monkeypatch.setenv("TIDEMILL_APP", "named_app:mill")
    with worker(tmp_path, "--burst") as named:
        assert named.wait(PATIENCE) == 0
        assert "serves named_app:mill" in named.stderr.read()
