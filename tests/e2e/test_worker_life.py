"""The life of a worker: recycling, deaths, shutdown, signals, cancelling, order, waiting slots."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
from harness import PATIENT, SLACK, Place, alive, check_no_overlap, eventually, runs_of

from tidemill.core.job import State

S = State

APP = """
@mill.task
def short(n=0): begin(); end(); return n

@mill.task(retries=Retries(3, delay=0))
def long(seconds=30.0):
    begin()
    until = time.time() + seconds
    while time.time() < until and not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task(retries=Retries(3, delay=0))
def is_held():
    begin()
    if this_job().attempt == 1:
        hold_gil_until("gate")
    end()

@mill.task
async def along(seconds=30.0):
    begin()
    await asyncio.sleep(seconds)
    end()
"""


@pytest.mark.everyday
def test_recycling_by_jobs(place: Place) -> None:  # case T8
    place.write(APP)
    worker = place.worker("--max-jobs", "2", slots=2)
    jobs = place.enqueue_many("short", [(n,) for n in range(5)])
    assert [job.result(60) for job in jobs] == [0, 1, 2, 3, 4]
    by_pid = Counter(line.pid for line in place.ledger() if line.what == "begin")
    assert len(by_pid) == 3
    assert max(by_pid.values()) == 2
    again = place.enqueue("short", 7)  # it goes on, also after it was idle with its number full
    assert again.result(60) == 7
    assert "right after its start" not in worker.output
    assert worker.stop() == 0


def test_recycling_by_memory(place: Place) -> None:  # case T8
    place.write(
        "@mill.task\ndef eats():\n    sys.kept = b'x' * 200_000_000\n    return os.getpid()\n"
    )
    worker = place.worker("--max-memory", "150", slots=1)
    first = place.enqueue("eats").result(60)
    eventually(lambda: not alive(first), "it is recycled")
    eventually(lambda: len(worker.children()) == 1, "its replacement")
    assert place.enqueue("eats").result(60) != first
    assert worker.stop() == 0


def test_kill_of_a_process_that_a_task_has_forked(place: Place) -> None:  # case T9
    # law 5: the fork has all that was open in the process, and lives on
    place.write(
        """
        @mill.task(retries=Retries(1, delay=0))
        def forks():
            begin()
            if this_job().attempt == 1:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                note("forked")
                time.sleep(60)
        """
    )
    place.worker().wait_ready()
    job = place.enqueue("forks")
    place.wait_notes("forked")
    begun = place.ledger()
    killed = time.time()
    os.kill(begun[0].pid, signal.SIGKILL)
    job.wait(60)
    again = place.ledger()[-1]
    assert (again.attempt, job.state) == (2, S.SUCCEEDED)
    assert again.time - killed < 30  # the fork lives for 60 s


@pytest.mark.everyday
def test_a_second_signal_stops_at_once(place: Place) -> None:  # case T11
    place.write(APP)
    worker = place.worker("--shutdown-timeout", "60", slots=3).wait_ready()
    jobs = [place.enqueue("long"), place.enqueue("along")]
    place.wait_notes("begin", 2)
    place.gate("gate")
    jobs.append(place.enqueue("is_held"))
    place.wait_notes("held")
    worker.send(signal.SIGTERM)
    worker.wait_line("stopping")
    time.sleep(0.3)  # closer together they would count as one
    worker.send(signal.SIGTERM)
    assert worker.wait() == 1
    for job in jobs:
        record = job.refresh()
        assert (record.state, record.attempt) == (S.READY, 0)  # it went back, uncounted
        (said,) = [event.detail for event in job.trail if event.what == "interrupted"]
        assert said.endswith(" s: its worker was stopped")
    assert not [line for line in place.ledger() if alive(line.pid)]


def test_a_task_that_stops_when_asked_is_cancelled(place: Place) -> None:  # case T14
    place.write(
        """
        from tidemill import JobCancelled

        @mill.task
        def stops():
            begin()
            while not this_job().cancelled:
                time.sleep(0.01)
            raise JobCancelled("at page 7")

        @mill.task
        async def astops():
            begin()
            while not this_job().cancelled:
                await asyncio.sleep(0.01)
            raise JobCancelled

        @mill.task(retries=0)
        def unasked():
            raise JobCancelled("of another job")
        """
    )
    place.worker(slots=4).wait_ready()
    jobs = [place.enqueue(name) for name in ("stops", "astops")]
    unasked = place.enqueue("unasked")
    place.wait_notes("begin", 2)
    assert all(job.cancel() for job in jobs)
    stops, astops, failed = place.finish([*jobs, unasked])
    assert (stops.state, stops.error) == (S.CANCELLED, "at page 7")
    assert (astops.state, astops.error) == (S.CANCELLED, "it stopped on request")
    assert (failed.state, failed.error) == (S.FAILED, "JobCancelled: of another job")
    events = [(event.what, event.detail) for event in jobs[0].trail]
    assert ("log", "cancel was asked for") in events


def test_exit_codes_of_a_bad_start(place: Place) -> None:  # case T11
    place.write("raise RuntimeError('not today')", load=False)
    worker = place.worker()
    assert worker.wait() == 2
    assert "RuntimeError: not today" in worker.output
    assert worker.output.count("the worker ends: ") == 1
    place.write("os._exit(5)", load=False)
    worker = place.worker()
    assert worker.wait() == 2
    assert "could not be loaded: worker process" in worker.output
    assert "exited with code 5" in worker.output
    place.write("sys.exit(5)", load=False)
    assert place.worker().wait() == 2
    place.app = "no_such_app"
    worker = place.worker()
    assert worker.wait() == 2
    assert "no module 'no_such_app'" in worker.output
    (place.path / "file").write_text("")
    place.url, place.app = f"lmdb://{place.path}/newer", "app_newer"
    place.write("", load=False)
    os.makedirs(f"{place.path}/newer")
    (place.path / "newer" / "data.mdb").write_bytes(b"nothing of lmdb" * 1000)
    worker = place.worker()
    assert worker.wait() == 3, worker.output
    assert "the worker ends: " in worker.output


def test_a_prefetched_job_is_cancelled_before_it_starts(place: Place) -> None:  # case T14
    place.write(
        """
        @mill.task
        def quick(): pass

        @mill.task
        def blocks():
            begin()
            while not os.path.exists(os.path.join(HERE, "let go")):
                time.sleep(0.01)
        """
    )
    place.worker(slots=1).wait_ready()
    place.finish(place.enqueue_many("quick", [()] * 300))  # it holds some in advance now
    blocks = place.enqueue("blocks")
    later = place.enqueue("quick")
    place.wait_notes("begin")
    assert later.cancel()
    (record,) = place.finish([later])
    assert (record.state, record.error) == (S.CANCELLED, "cancelled before it started")
    assert record.attempts == []
    (place.path / "let go").touch()
    place.finish([blocks])


FETCHES_AHEAD = """
if "TIDEMILL_SUPERVISOR" in os.environ:
    from tidemill.worker.slots import Prefetch, Slots

    def add(self, jobs, add=Slots.add):
        jobs = list(jobs)
        added = add(self, jobs)
        for job in jobs:
            note("waits", job.envelope.id)
        return added

    Prefetch.ahead = property(lambda self: 50, lambda self, value: None)
    Slots.add, Slots.tick = add, lambda self: []
"""
"""A process gets fifty jobs in advance, notes these jobs, and gives none back while it is busy."""


@pytest.mark.everyday
def test_high_priority_first(place: Place) -> None:  # case T13, law 10
    # given jobs that the process of a running job has got in advance, those of low priority first
    place.write(FETCHES_AHEAD + APP)
    worker = place.worker(slots=1).wait_ready()
    blocker = place.enqueue("long", 300.0)
    place.wait_notes(f"begin {blocker.id}")
    low = place.enqueue_many("short", [(n,) for n in range(10)], priority=-5)
    high = place.enqueue_many("short", [(n,) for n in range(10)], priority=5)
    place.wait_notes("waits", 1 + len(low) + len(high))
    # when
    (place.path / "go").touch()
    place.finish([*low, *high])
    order = [line.id for line in place.ledger() if line.what == "begin"][-20:]
    assert order == [job.id for job in (*high, *low)]
    assert worker.stop() == 0


@pytest.mark.everyday
@pytest.mark.parametrize("name", ["long", "along"])
@pytest.mark.parametrize("slots", [1, 3], ids=["main", "threads"])
def test_cancel_and_terminate_while_running(place: Place, name: str, slots: int) -> None:
    # case T14
    place.write(
        APP
        + """
@mill.task
def watches():
    begin()
    while not this_job().cancelled:
        time.sleep(0.01)
    return "seen"
@mill.task
async def awatches():
    begin()
    while not this_job().cancelled:
        await asyncio.sleep(0.01)
    return "seen"
"""
    )
    worker = place.worker(slots=slots, env=PATIENT).wait_ready()
    seen = place.enqueue("watches" if name == "long" else "awatches")
    place.wait_notes(f"begin {seen.id}")
    assert seen.cancel()
    assert seen.result(30) == "seen"
    job = place.enqueue(name)
    place.wait_notes(f"begin {job.id}")
    asked = time.time()
    assert job.cancel(terminate=True)
    record = place.wait_state(job, S.CANCELLED)
    assert record.finished - asked < 1.0 + SLACK
    (attempt,) = record.attempts
    assert f"in {name}" in attempt.traceback
    assert not job.cancel()
    assert len(worker.children()) == 1
    assert worker.stop() == 0


@pytest.mark.everyday
def test_reload(place: Place) -> None:
    place.write("@mill.task\ndef version(): return 1\n")
    worker = place.worker(processes=2, slots=2).wait_ready()
    assert place.enqueue("version").result(60) == 1
    old = {process.pid for process in worker.children()}
    file = place.path / f"{place.app}.py"
    text = file.read_text()
    file.write_text(text.replace("return 1", "return 2  # other"))
    worker.send(signal.SIGHUP)
    eventually(lambda: not any(map(alive, old)), "the old processes go")
    assert place.enqueue("version").result(60) == 2
    eventually(lambda: len(worker.children()) == 2, "as many as before")
    new = {process.pid for process in worker.children()}
    file.write_text(text + "\nthis is broken")
    worker.send(signal.SIGHUP)
    worker.wait_line("the processes with the old code keep running", 2)
    assert place.enqueue("version").result(60) == 2
    assert {process.pid for process in worker.children()} >= new
    assert worker.stop() == 0


@pytest.mark.everyday
def test_stacks_on_demand(place: Place) -> None:
    place.write(APP)
    worker = place.worker(slots=2).wait_ready()
    let_go = place.gate("gate")
    place.enqueue("is_held")
    place.wait_notes("held")
    worker.send(signal.SIGUSR1)
    worker.wait_line("in hold_gil_until")
    let_go()
    assert worker.stop() == 0


@pytest.mark.everyday
def test_sigterm_to_a_process_recycles_it(place: Place) -> None:
    place.write(APP)
    worker = place.worker(slots=1).wait_ready()
    jobs = place.enqueue_many("short", [(n,) for n in range(2000)])
    for _ in range(3):
        pid = eventually(worker.children)[0].pid
        os.kill(pid, signal.SIGTERM)
        eventually(lambda pid=pid: not alive(pid), "it goes")
    assert all(record.attempt == 1 for record in place.finish(jobs))
    assert all(len(runs) == 1 for runs in runs_of(place.ledger()).values())
    assert worker.stop() == 0


def test_large_bodies_do_not_block_the_supervisor(place: Place) -> None:
    """A process that holds the interpreter lock reads nothing; it is still found out."""
    place.write(
        """
        @mill.task
        def takes(text): return len(text)
        @mill.task(timeout=1.5, retries=0)  # time enough to accept and lease the large ones
        def holds(): begin(); hold_gil(60)
        """
    )
    place.worker("--stuck-grace", "0.3", slots=12).wait_ready()
    stuck = place.enqueue("holds")
    place.wait_notes("begin")
    jobs = place.enqueue_many("takes", [("x" * 1_000_000,) for _ in range(24)])
    (record,) = place.finish([stuck])
    assert "JobTimeout" in record.error
    assert all(record.attempt == 1 for record in place.finish(jobs))
    check_no_overlap(place.ledger())


def test_short_jobs_do_not_wait_for_long_ones(place: Place) -> None:  # case T18
    place.write(APP)
    place.worker(processes=2, slots=30).wait_ready()
    short = place.enqueue_many("short", [(n,) for n in range(2500)])
    long = place.enqueue_many("long", [(300.0,) for _ in range(50)])
    short += place.enqueue_many("short", [(n,) for n in range(2500)])
    records = place.finish(short, 120)
    assert all(record.attempt == 1 for record in records)
    for job in long:  # a process may give a job that waits for a slot back to the store
        place.wait_state(job, S.RUNNING)
    (place.path / "go").touch()
    place.finish(long)


def test_waiting_that_would_starve_the_worker(place: Place) -> None:
    place.write(
        """
        @mill.task(retries=0)
        def child(): return 1
        @mill.task(retries=0)
        def parent(): return child.enqueue().result(60)
        """
    )
    worker = place.worker(slots=1).wait_ready()
    (record,) = place.finish([place.enqueue("parent")])
    assert record.state is S.FAILED
    assert "would wait for job" in record.error
    assert worker.stop() == 0
    place.worker(processes=2, slots=1).wait_ready()
    assert place.enqueue("parent").result(60) == 1
