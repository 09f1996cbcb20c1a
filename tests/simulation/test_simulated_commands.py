"""Orders through the store, bursts, and the end of a worker by itself."""

from __future__ import annotations

import signal

import pytest
from simulator import FOREVER, Simulation

from tidemill import State


def test_a_burst_ends_when_no_job_is_left(sim: Simulation) -> None:
    jobs = [sim.task(f"quick-{n}", seconds=1.0).enqueue() for n in range(20)]
    worker = sim.cold_worker(burst=True, concurrency=4)
    assert worker.until_ended() == 0
    assert all(job.state is State.SUCCEEDED for job in jobs)


def test_a_burst_leaves_jobs_that_are_due_later(sim: Simulation) -> None:
    later = sim.task("later").using(delay=600.0).enqueue()
    worker = sim.cold_worker(burst=True)
    assert worker.until_ended() == 0
    assert later.refresh().state is State.SCHEDULED


def test_a_burst_says_which_jobs_are_left_and_why(sim: Simulation) -> None:
    sim.app.lacks = {"new"}
    sim.task("later").using(delay=600.0).enqueue()
    for _ in range(2):
        sim.task("new").enqueue()
    sim.task("held").using(queue="shut").enqueue()
    sim.mill.broker.set_queue("shut", paused=True)
    assert sim.cold_worker(burst=True).until_ended() == 0
    left = "3 scheduled jobs (2 of tasks that this app does not know: new)"
    assert sim.said(f"the store keeps {left}, 1 ready job in paused queues (shut)") == 1


def test_a_burst_that_leaves_nothing_says_nothing(sim: Simulation) -> None:
    sim.task("quick").enqueue()
    assert sim.cold_worker(burst=True).until_ended() == 0
    assert sim.said("the store keeps") == 0


def test_a_burst_runs_the_retries_that_come_at_once(sim: Simulation) -> None:
    job = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, again={"seconds": 0.1})
    job = job.using(retries=1).enqueue()
    other = sim.task("killer", kills=9, again={"seconds": 0.1}, retries=5).enqueue()
    worker = sim.cold_worker(burst=True)
    assert worker.until_ended() == 0
    assert job.state in (State.SUCCEEDED, State.SCHEDULED)
    assert other.state in (State.SUCCEEDED, State.SCHEDULED)


def test_a_burst_waits_for_a_stuck_process(sim: Simulation) -> None:
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    long = sim.task("long", seconds=20.0).enqueue()
    stuck.enqueue()
    worker = sim.cold_worker(burst=True, concurrency=2)
    assert worker.until_ended() == 0
    assert long.state is State.SUCCEEDED
    assert len(sim.runs(long)) == 1


@pytest.mark.parametrize("trouble", ["be_away", "be_full"])
def test_a_burst_does_not_take_a_store_in_trouble_for_an_empty_one(
    sim: Simulation, trouble: str
) -> None:
    worker = sim.cold_worker(burst=True)
    job = sim.task("quick", seconds=5.0).enqueue()
    sim.until(lambda: sim.runs(job))
    jobs = [sim.task("more").enqueue() for _ in range(20)]
    getattr(sim.store, trouble)(60.0)
    assert worker.until_ended() == 0
    assert all(each.state is State.SUCCEEDED for each in (job, *jobs))


def test_a_burst_waits_for_jobs_on_their_way_and_looks_less_and_less_often(sim: Simulation) -> None:
    sim.task("quick")
    worker = sim.cold_worker(burst=True)
    sim.store.has_more(60.0)
    sim.run_for(59.0)
    assert not worker.ended
    assert sim.store.steps <= 90
    assert worker.until_ended() == 0


def test_a_burst_whose_app_breaks_later_still_ends(sim: Simulation) -> None:
    jobs = [sim.task("quick").enqueue() for _ in range(6)]
    worker = sim.cold_worker(burst=True, max_jobs=2, concurrency=1)
    sim.until(lambda: sim.runs(jobs[0]))
    sim.app.error = "SyntaxError: invalid syntax"
    sim.run_for(100.0)
    sim.app.error = ""
    assert worker.until_ended() == 0
    assert all(job.state is State.SUCCEEDED for job in jobs)


def test_stop_from_the_store_is_a_graceful_stop(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=10.0).enqueue()
    worker = sim.worker()
    later = sim.task("later")
    worker.command("stop")
    sim.run_for(1.0)
    waiting = later.enqueue()
    assert worker.until_ended() == 0
    assert (job.state, waiting.state) == (State.SUCCEEDED, State.READY)


def test_quiet_from_the_store_has_no_limit(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=500.0).enqueue()
    worker = sim.worker(shutdown_timeout=5.0)
    worker.command("quiet")
    sim.run_for(1.0)
    waiting = sim.task("later").enqueue()
    assert worker.until_ended() == 0
    assert (job.state, waiting.state) == (State.SUCCEEDED, State.READY)
    assert not any(process.killed for process in sim.processes)
    assert sim.said("the worker takes no more jobs, and ends after its running jobs") == 1


def test_a_worker_that_its_store_has_outgrown_ends_its_jobs_and_exits_with_3(
    sim: Simulation,
) -> None:
    # case M13
    job = sim.task("long", seconds=50.0).enqueue()
    worker = sim.worker()
    worker.command("quiet")
    worker.command("outgrown the store has version 9")
    assert worker.until_ended() == 3
    assert job.state is State.SUCCEEDED
    assert sim.said("the store has version 9; this worker stops; ") == 1


def test_term_after_quiet_has_the_shutdown_timeout(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=FOREVER, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=5.0)
    worker.command("quiet")
    sim.run_for(60.0)
    told = sim.now
    worker.signal(15)
    assert worker.until_ended() == 1
    assert sim.now - told <= 7.0
    assert job.refresh().state is State.READY


def test_a_move_ends_no_running_job_of_a_busy_worker(sim: Simulation) -> None:
    job = sim.task("long", seconds=50.0).enqueue()
    worker = sim.worker(concurrency=1)
    sim.until(lambda: sim.runs(job))
    sim.mill.broker.depart("memory://elsewhere")
    sim.task("new")
    worker.signal(signal.SIGHUP)  # the new code declares a task, which the store refuses
    assert worker.until_ended() == 3
    assert job.refresh().state is State.SUCCEEDED
    assert sim.said("the worker ends: this store moves to memory://elsewhere; use that url") == 1
