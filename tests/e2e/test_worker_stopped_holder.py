"""A worker while a stopped process holds the write lock of an LMDB store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Place, eventually, open_place

from tidemill.core.job import State

APP = """
@mill.task(retries=0)
def waits():
    begin()
    while not this_job().stopping:
        time.sleep(0.01)
    end()

@mill.task(retries=0)
def short():
    begin()
    end()
"""

HOLDER = """
import sys
from tidemill.brokers.registry import open_broker
broker = open_broker(sys.argv[1])
def stay(moves):
    print("inside", flush=True)
    sys.stdin.readline()
broker._store.commits.run(broker._transitions, stay)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place whose workers and tools wait a second for the store, and the test as usual."""
    with open_place(tmp_path, f"lmdb://{tmp_path}/store") as place:
        place.write(APP)
        place.url += "?patience=1"
        place.write(APP, load=False)
        yield place


@pytest.fixture
def holder(place: Place) -> Iterator[subprocess.Popen[str]]:
    """A process that can be told to hold the write lock, and is stopped there."""
    command = [sys.executable, "-c", HOLDER, place.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def hold(holder: subprocess.Popen[str]) -> None:
    """Wait until the process is inside its transaction, and stop the process."""
    assert holder.stdout is not None
    assert holder.stdout.readline() == "inside\n"
    os.kill(holder.pid, signal.SIGSTOP)
    status = Path(f"/proc/{holder.pid}/status")
    eventually(lambda: "State:\tT" in status.read_text(), "the holder is stopped", 30)


def test_a_worker_ends_within_its_time_while_a_stopped_process_holds_the_lock(
    place: Place, request: pytest.FixtureRequest
) -> None:
    # Given a worker that runs a job, and a stopped process that holds the write lock.
    worker = place.worker("--shutdown-timeout", "2").wait_ready()
    job = place.enqueue("waits")
    place.wait_notes("begin")
    holder = request.getfixturevalue("holder")
    hold(holder)
    # When the worker is told to end.
    worker.send(signal.SIGTERM)
    # Then it ends, though the store takes no verdict.
    worker.wait(60)
    place.wait_notes("end")
    # And once the holder is gone, another worker finds nothing left running.
    holder.kill()
    place.worker().wait_ready()
    (record, other) = place.finish([job, place.enqueue("short")])
    assert record.state in (State.SUCCEEDED, State.FAILED), record
    assert other.state is State.SUCCEEDED
