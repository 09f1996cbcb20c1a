"""A timeout ends the work, in every pool, whatever the task is stuck in (law 8)."""

from __future__ import annotations

import signal
import time

import pytest
from harness import PATIENT, SLACK, Place, alive, eventually, runs_of
from servers.base import await_stop

from tidemill.core.job import Record, State

TIMEOUT = 1.0
MARGIN = 1.0 + SLACK
"""A second by the law, the rest for a machine that is busy with other tests."""

APP = """
@mill.task(timeout=1.0, retries=0)
def sleeps(): begin(); time.sleep(30)

@mill.task(timeout=1.0, retries=0)
def receives():
    begin()
    ours, theirs = socket.socketpair()
    ours.recv(1)

@mill.task(timeout=1.0, retries=0)
def loops():
    begin()
    while True: pass

@mill.task(timeout=1.0, retries=0)
def holds(): begin(); hold_gil(60)

@mill.task(timeout=1.0, retries=0)
def swallows():
    begin()
    while True:
        try:
            while True:
                time.sleep(0.01)
        except:
            note("swallowed")

@mill.task(timeout=1.0, retries=0)
def swallows_once():
    begin()
    try:
        while True:
            time.sleep(0.01)
    except:
        return "not stopped at all"

@mill.task(timeout=1.0, retries=0)
async def aswallows_once():
    begin()
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        return "not stopped at all"

@mill.task(timeout=1.0, retries=0)
async def asleeps(): begin(); await asyncio.sleep(30)

@mill.task(timeout=1.0, retries=0)
async def ablocks(): begin(); time.sleep(30)

@mill.task(timeout=1.0, retries=0)
async def aholds(): begin(); hold_gil(60)

async def stubborn():
    while True:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            note("swallowed")

@mill.task(timeout=1.0, retries=0)
async def aswallows(): begin(); await stubborn()

@mill.task(timeout=1.0, retries=0)
async def acleans():
    begin()
    try:
        await asyncio.sleep(30)
    finally:
        await asyncio.sleep(0.05)
        note("cleaned")

@mill.task
def neighbour(seconds=1.2):
    begin()
    until = time.time() + seconds
    while time.time() < until and not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task
def short(): begin(); end()
"""

# task → a piece of the source line it hangs in, whether its process can go on, per pool
INTERRUPTED, KILLED = True, False
CASES = {
    "sleeps": ("time.sleep(30)", INTERRUPTED, KILLED),
    "receives": ("ours.recv(1)", INTERRUPTED, KILLED),
    "loops": ("while True: pass", INTERRUPTED, INTERRUPTED),
    "holds": ("hold_gil", KILLED, KILLED),
    "swallows": ("time.sleep(0.01)", KILLED, KILLED),
    "swallows_once": ("", INTERRUPTED, INTERRUPTED),
    "aswallows_once": ("", INTERRUPTED, INTERRUPTED),
    "asleeps": ("await asyncio.sleep(30)", INTERRUPTED, INTERRUPTED),
    "ablocks": ("time.sleep(30)", KILLED, KILLED),
    "aholds": ("hold_gil", KILLED, KILLED),
    "aswallows": ("await asyncio.sleep(30)", KILLED, KILLED),
    "acleans": ("await asyncio.sleep(30)", INTERRUPTED, INTERRUPTED),
}


def check_timed_out(record: Record, line: str) -> None:
    assert record.state is State.FAILED
    (attempt,) = record.attempts
    assert "JobTimeout" in attempt.error
    took = attempt.ended - attempt.started
    assert took >= TIMEOUT - 0.01
    assert took <= TIMEOUT + MARGIN, f"verdict after {took:.2f} s"
    assert line in attempt.traceback, attempt.traceback


@pytest.mark.everyday("sleeps", "holds", "ablocks")
@pytest.mark.parametrize("slots", [1, 3], ids=["main", "threads"])
@pytest.mark.parametrize("name", CASES)
def test_timeout_in_every_pool(place: Place, name: str, slots: int) -> None:  # case T6, law 8
    line, in_main, in_threads = CASES[name]
    goes_on = in_main if slots == 1 else in_threads
    place.write(APP)
    env = PATIENT if goes_on else None
    worker = place.worker("--stuck-grace", "0.5", slots=slots, env=env).wait_ready()
    eventually(worker.children, "the process")
    (before,) = [child.pid for child in worker.children()]
    job = place.enqueue(name)
    (record,) = place.finish([job])
    # When a C handler writes the stack there is no source text in it: the function's name is. That
    # also happens to a process that was too busy to report by itself.
    (attempt,) = record.attempts
    by_handler = "(most recent call first)" in attempt.traceback
    check_timed_out(
        record, ("hold_gil" if "holds" in name else f"in {name}") if by_handler else line
    )
    caught = attempt.error.endswith("; the task caught the timeout and returned")
    assert caught == name.endswith("swallows_once"), attempt.error
    # The worker goes on: with the same process, or with one replacement.
    after = place.enqueue("short")
    place.finish([after])
    if goes_on:
        assert [child.pid for child in worker.children()] == [before]
    else:
        eventually(lambda: not alive(before), "the stuck process is dead")
        assert worker.output.count("is stuck and is replaced") == 1
        assert len(worker.children()) == 1
    if name == "acleans":
        assert "cleaned" in place.notes()
    assert worker.stop() == 0


def test_a_retry_never_overlaps_and_subprocesses_die(place: Place) -> None:  # case T6
    place.write(
        APP
        + """
@mill.task(timeout=1.0, retries=Retries(1, delay=0))
def leaves_a_child():
    child = subprocess.Popen(["sleep", "300"])
    note("child", child.pid)
    begin()
    try:
        while True:
            time.sleep(30)
    finally:
        end()
"""
    )
    place.worker("--stuck-grace", "0.6", slots=3).wait_ready()
    place.enqueue("neighbour", 300.0)
    place.wait_notes("begin")
    job = place.enqueue("leaves_a_child")
    (record,) = place.finish([job])
    assert (record.state, record.attempt) == (State.FAILED, 2)
    begins = [line for line in place.ledger() if line.what == "begin" and line.id == job.id]
    assert len({line.pid for line in begins}) == 2
    first, second = begins
    died = record.attempts[0].ended + 0.6  # the neighbour's drain, then the kill
    assert second.time >= died - 0.05
    assert not alive(first.pid)
    children = [int(line.split()[1]) for line in place.wait_notes("child", 2)]
    eventually(lambda: not any(map(alive, children)), "the subprocesses die with it")


def test_a_retry_waits_for_a_supervisor_that_is_held_up(place: Place) -> None:
    # law 8: however late the supervisor kills, no retry runs before the old run is dead
    place.write(
        APP
        + """
@mill.task(timeout=1.0, retries=Retries(1, delay=0))
def hangs():
    for line in open(os.path.join(HERE, "ledger")):
        words = line.split()
        if words[:2] == ["begin", this_job().id]:
            note("alive" if os.path.exists(f"/proc/{words[3]}") else "dead", words[3])
    begin()
    while True:
        time.sleep(30)
"""
    )
    drain = 3.0  # time enough to stop the supervisor in
    first = place.worker("--stuck-grace", str(drain), slots=2).wait_ready()
    place.enqueue("neighbour", 300.0)
    place.wait_notes("begin")
    job = place.enqueue("hangs")
    place.wait_notes("begin", 2)
    eventually(lambda: job.refresh().attempts, "the verdict")
    # given: the verdict has fallen, and the supervisor stops before it has killed the process
    first.send(signal.SIGSTOP)
    await_stop(first.pid)
    record = job.refresh()
    try:
        assert (record.state, record.attempt) == (State.RUNNING, 1)
        (attempt,) = record.attempts
        assert attempt.ended - attempt.started <= TIMEOUT + MARGIN
        assert "time.sleep(30)" in attempt.traceback
        # when: another worker could run it, and the drain has long been over
        second = place.worker(slots=2).wait_ready()
        short = place.enqueue("short")
        place.finish([short])
        eventually(lambda: time.time() > attempt.ended + drain + 2.0)
        # then
        assert job.refresh().state is State.RUNNING
    finally:
        first.send(signal.SIGCONT)
    (record,) = place.finish([job])
    assert (record.state, record.attempt) == (State.FAILED, 2)
    assert [line.split()[0] for line in place.wait_notes("dead")] == ["dead"]
    assert not any(line.startswith("alive") for line in place.notes())
    assert second.stop() == 0


def test_a_neighbour_that_ended_with_the_last_one_does_not_run_again(place: Place) -> None:
    # case T6: its verdict is read before the process is killed
    place.write(APP)
    place.worker(slots=4).wait_ready()
    for _ in range(4):
        # when: three neighbours end at one instant, after the fourth job is stuck
        jobs = [place.enqueue("neighbour", 1.2) for _ in range(3)]
        place.finish([place.enqueue("sleeps", timeout=0.4), *jobs])
    # then
    for job_id, runs in runs_of(place.ledger()).items():
        assert len(runs) == 1, (job_id, runs)


def test_timeouts_of_call_task_and_app(place: Place) -> None:  # case T7
    place.write(
        """
        @mill.task(retries=0)
        def by_app(): time.sleep(30)
        @mill.task(retries=0, timeout=0.3)
        def by_task(): time.sleep(30)
        @mill.task(timeout=1.0)
        def quick(): return 1
        @mill.task(timeout=0.3)
        def slow_enough():
            time.sleep(0.8)
            return 1
        """,
        timeout=0.6,
    )
    worker = place.worker(slots=1, env=PATIENT).wait_ready()
    quick = [place.enqueue("quick") for _ in range(20)]
    jobs = [
        place.enqueue("by_app"),
        place.enqueue("by_task"),
        place.enqueue("by_task", timeout=0.15),
        place.enqueue("slow_enough", timeout=None),
    ]
    app, task, call, none = place.finish([*jobs])
    for record, timeout in ((app, 0.6), (task, 0.3), (call, 0.15)):
        (attempt,) = record.attempts
        assert f"timeout of {timeout:g} s" in attempt.error
        assert timeout <= attempt.ended - attempt.started + 0.01 <= timeout + MARGIN
    assert none.state is State.SUCCEEDED
    # Jobs that ended in time left no timer behind: nothing was hit later.
    assert all(record.attempt == 1 for record in place.finish(quick))
    assert len(worker.children()) == 1
    assert "stuck" not in worker.output


@pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])
def test_a_storm_of_timeouts_hits_nothing_else(place: Place, slots: int) -> None:
    """Jobs that end just as their time is over get one verdict; nothing else is hit."""
    place.write(
        """
        @mill.task(timeout=0.05, retries=0)
        def close(seconds):
            until = time.time() + seconds
            while time.time() < until: pass
            return 1
        @mill.task(timeout=0.05, retries=0)
        async def aclose(seconds):
            await asyncio.sleep(seconds)
            return 1
        """
    )
    worker = place.worker(slots=slots, env=PATIENT).wait_ready()
    jobs = place.enqueue_many("close", [(0.035 + 0.03 * i / 40,) for i in range(40)])
    jobs += place.enqueue_many("aclose", [(0.045 + 0.01 * i / 30,) for i in range(30)])
    records = place.finish(jobs)
    assert all(record.attempt == 1 for record in records)
    for record in records:
        assert record.state is State.SUCCEEDED or "JobTimeout" in record.error
    assert any(record.state is State.FAILED for record in records)
    assert "cannot go on" not in worker.output, worker.output
    assert "Exception in" not in worker.output, worker.output
    assert len(worker.children()) == 1
    assert worker.stop() == 0
