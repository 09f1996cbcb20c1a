"""``django://``: Ctrl-C in a program that waits for a lock of its database."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import SLACK, Place, eventually
from stalls import Lock, open_stalling

TASKS = """
@mill.task
def work(n):
    pass

@mill.task(key="work {n}")
def keyed(n):
    pass
"""

CALLS = ["put", "keyed put", "many puts", "result", "cancel", "get"]

PROGRAM = """
import importlib, sys
app = importlib.import_module(sys.argv[1])
keyed, mill, work = app.keyed, app.mill, app.work

job = work.enqueue(0)
CALLS = {
    "put": lambda: work.enqueue(1),
    "keyed put": lambda: keyed.enqueue(1),
    "many puts": lambda: mill.enqueue_many([work.call(n) for n in range(3)]),
    "result": lambda: job.result(timeout=300),
    "cancel": lambda: job.cancel(),
    "get": lambda: mill.queue("messages").get(timeout=300),
}
print(job.id, flush=True)
for line in sys.stdin:
    try:
        CALLS[line.strip()]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.readline()
        print(work.enqueue(2).id, flush=True)
"""

PATIENCE = 60
"""Far more than the test waits: so the signal has ended the call."""


@pytest.fixture(params=["django-sqlite", "django-postgresql"])
def stalling(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Place, Lock]]:
    with open_stalling(request.param, tmp_path, f"?patience={PATIENCE}") as (place, lock):
        place.write(TASKS)
        yield place, lock


@contextlib.contextmanager
def program(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A program that makes the calls that the test names."""
    command = [sys.executable, "-c", PROGRAM, place.app]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=place.path, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the program."""
    process.stdin.write(line + "\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of the program."""
    return process.stdout.readline().strip()


def await_sleep(pid: int) -> None:
    """Wait until a process sleeps, and not only for a moment."""
    process, looks = psutil.Process(pid), 0

    def sleeps() -> bool:
        nonlocal looks
        looks = looks + 1 if process.status() == psutil.STATUS_SLEEPING else 0
        return looks >= 30

    eventually(sleeps, "the sleep of the program", pause=0.02)


def test_ctrl_c_ends_each_call_that_waits_for_a_lock(stalling: tuple[Place, Lock]) -> None:
    # case D4: given a program, and a lock that another session holds
    place, stalled = stalling
    with program(place) as process:
        accepted = [said(process)]
        for call in CALLS:
            with stalled(place):
                tell(process, call)
                await_sleep(process.pid)
                # when
                signalled = time.monotonic()
                process.send_signal(signal.SIGINT)
                # then the call ends at once, although the lock is still held
                assert said(process) == "interrupted", call
                assert time.monotonic() - signalled < 2 + SLACK, call
            # and the next put is stored
            tell(process, "go on")
            accepted.append(said(process))
        # and the interrupted calls have stored nothing
        assert sorted(record.envelope.id for record in place.records()) == sorted(accepted)
