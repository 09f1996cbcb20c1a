"""A process that outlives its SIGKILL holds up nobody else, and not the end of its worker."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from harness import Place, check_no_overlap, eventually
from servers.dead_mount import dead_mount

from tidemill.core.job import State
from tidemill.core.scoreboard import read_unkillable

APP = """
@mill.task(timeout=1.0, retries=Retries(1, delay=0))
def sleeps():
    begin()
    if current_job().attempt == 1:
        time.sleep(60)

@mill.task(retries=Retries(1, delay=0))
def dies():
    begin()
    if current_job().attempt == 1:
        os.kill(os.getpid(), 9)

@mill.task
def short(): begin()

@mill.task(timeout=1.0, retries=Retries(1, delay=0))
def stats():
    begin()
    if current_job().attempt == 1:
        os.stat(HERE + "/dead/file")

@mill.task(retries=Retries(1, delay=0))
def hangs():
    begin()
    if current_job().attempt == 1:
        os.stat(HERE + "/dead/file")

@mill.task
def waits():
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task
async def awaits():
    begin()
    while not os.path.exists(HERE + "/go"):
        await asyncio.sleep(0.01)
    end()

@mill.task
def helped():
    begin()
    if not os.path.exists(HERE + "/go"):
        threading.Thread(target=os.stat, args=(HERE + "/dead/other",)).start()
        time.sleep(60)
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
    (owner,) = [owner for owner in place.mill.broker.owners() if owner.pid == worker.pid]
    assert [pid for pid, _ in read_unkillable(owner.board, owner.id)] == [old]
    place.finish([place.enqueue("short")])
    record = job.refresh()
    assert (record.state, record.attempt) == (State.RUNNING, 1)
    # when: it is gone at last
    reap(old)
    # then
    (record,) = place.finish([job])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
    assert worker.stop() == 0


def test_a_process_that_went_by_itself_and_does_not_die_is_reported(
    place: Place, undying: Callable[[int], None]
) -> None:
    # given: a process whose line ends, and that does not die
    place.write(APP)
    worker = place.worker().wait_ready()
    (old,) = [child.pid for child in eventually(worker.children, "the process")]
    undying(old)
    # when
    job = place.enqueue("dies")
    # then: the log and the board name the process, and its job stays held
    worker.wait_line(f"worker process {old} does not die of SIGKILL")
    (owner,) = [owner for owner in place.mill.broker.owners() if owner.pid == worker.pid]
    assert [pid for pid, _ in read_unkillable(owner.board, owner.id)] == [old]
    place.finish([place.enqueue("short")])
    assert job.refresh().state is State.RUNNING
    command = [sys.executable, "-m", "tidemill", "doctor", "--url", place.url]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    words = " ".join(doctor.stdout.split())
    assert re.search(rf"process {old} of {owner.name} still runs [\d.]+ m?s after SIGKILL", words)
    assert "look for a dead mount or disk" in words
    # when: the process is gone at last
    reap(old)
    # then: the job has used an attempt
    (record,) = place.finish([job])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
    assert worker.stop() == 0


def test_neighbours_go_back_once_the_kernel_has_ended_their_threads(place: Place) -> None:
    # given: a job in a system call that ends for no signal, and its neighbours
    place.write(APP)
    with dead_mount(place.path / "dead"):
        worker = place.worker("--stuck-grace", "0.5", slots=3).wait_ready()
        (old,) = [child.pid for child in eventually(worker.children, "the process")]
        neighbours = [place.enqueue("waits"), place.enqueue("awaits")]
        place.wait_notes("begin", 2)
        stuck = place.enqueue("stats")
        # when
        worker.wait_line(f"worker process {old} does not die of SIGKILL (state D): 1 job(s)")
        # then: the neighbours run again, uncounted
        for neighbour in neighbours:
            place.wait_notes(f"begin {neighbour.id}", 2)
        (place.path / "go").touch()
        for record in place.finish(neighbours):
            assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
        said = [event.detail for event in neighbours[0].trail if event.what == "interrupted"]
        assert f"{place.task('stats')}[{stuck.id}] ran past its timeout" in said[0]
        # and the stuck job stays held
        record = stuck.refresh()
        assert (record.state, record.attempt) == (State.RUNNING, 1)
    (record,) = place.finish([stuck])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
    assert worker.stop() == 0
    check_no_overlap(place.ledger())


def test_a_process_that_somebody_else_kills_is_noticed_though_it_does_not_die(
    place: Place,
) -> None:
    # given: a job in a system call that ends for no signal, and its neighbour
    place.write(APP)
    with dead_mount(place.path / "dead"):
        worker = place.worker(slots=2).wait_ready()
        (old,) = [child.pid for child in eventually(worker.children, "the process")]
        hanging, neighbour = place.enqueue("hangs"), place.enqueue("waits")
        place.wait_notes("begin", 2)
        # when: as by the kernel, short of memory
        os.kill(old, signal.SIGKILL)
        # then
        worker.wait_line(f"worker process {old} does not die of SIGKILL (state D)")
        place.finish([place.enqueue("short")])
        assert hanging.refresh().state is State.RUNNING
        (place.path / "go").touch()
    # when: the process is gone at last, then both jobs have used an attempt
    (record,) = place.finish([hanging])
    assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
    place.finish([neighbour])
    assert worker.stop() == 0
    check_no_overlap(place.ledger())


def test_neighbours_stay_held_while_a_thread_is_left_that_may_be_theirs(place: Place) -> None:
    # given: a neighbour whose own helper is in such a system call
    place.write(APP)
    with dead_mount(place.path / "dead"):
        worker = place.worker("--stuck-grace", "0.5", slots=3).wait_ready()
        jobs = [place.enqueue("helped"), place.enqueue("waits")]
        place.wait_notes("begin", 2)
        # when
        place.enqueue("stats")
        worker.wait_line("does not die of SIGKILL (state D): 3 job(s) are held")
        # then
        place.finish([place.enqueue("short")])
        assert [job.refresh().state for job in jobs] == [State.RUNNING] * 2
        (place.path / "go").touch()
    for record in place.finish(jobs):
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
    assert worker.stop() == 0
