"""A process that outlives its SIGKILL holds up nobody else, and not the end of its worker."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import pytest
from harness import Place, eventually

from tidemill.core.job import State

APP = """
@mill.task(timeout=1.0, retries=Retries(1, delay=0))
def sleeps():
    begin()
    if this_job().attempt == 1:
        time.sleep(60)

@mill.task
def short(): begin()
"""

PTRACE_SEIZE = 0x4206


@pytest.fixture
def undying() -> Iterator[Callable[[int], None]]:
    """Make a process look alive to its parent after its death, as a dead mount does.

    A traced process that is killed stays with its tracer until the tracer waits for it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    traced: list[int] = []

    def hold(pid: int) -> None:
        assert libc.ptrace(PTRACE_SEIZE, pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
        traced.append(pid)

    yield hold
    for pid in traced:
        reap(pid)


def reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # the test did


def test_the_others_go_on_and_the_retry_stays_held(
    place: Place, undying: Callable[[int], None]
) -> None:
    # given: a process that will not die
    place.write(APP)
    worker = place.worker(slots=2).wait_ready()
    (old,) = [child.pid for child in eventually(worker.children, "the process")]
    undying(old)
    # when: it is killed for a stuck job
    job = place.enqueue("sleeps")
    worker.wait_line("is killed")
    # then: another process works
    place.finish([place.enqueue("short") for _ in range(3)])
    worker.wait_line("does not die of SIGKILL")
    place.finish([place.enqueue("short")])
    record = job.refresh()
    assert (record.state, record.attempt) == (State.RUNNING, 1)
    # when: it is gone at last
    reap(old)
    # then
    (record,) = place.finish([job])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
    assert worker.stop() == 0
