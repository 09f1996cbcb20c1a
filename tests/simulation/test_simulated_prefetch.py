"""Which job starts when, and where."""

from __future__ import annotations

import pytest
from simulator import FOREVER, Simulation

from tidemill import Limit, State


def test_short_jobs_do_not_wait_for_long_jobs(sim: Simulation) -> None:
    # case T18
    long, short = sim.task("long", seconds=600.0), sim.task("short", seconds=0.01)
    sim.worker(processes=2, concurrency=4)
    for _ in range(7):
        long.enqueue()
    jobs = [short.enqueue() for _ in range(500)]
    at = sim.until_succeeded(*jobs)
    assert at - min(sim.starts(jobs[0])) <= 30.0


def test_a_worker_sleeps_until_the_next_job_is_due(sim: Simulation) -> None:
    # law 9
    task = sim.task("quick", seconds=0.0)
    sim.worker()
    put = sim.now
    job = task.using(delay=300.0).enqueue()
    sim.run_for(5.0)
    calls = sim.store.steps
    sim.until(lambda: sim.starts(job))
    assert 0.0 <= sim.starts(job)[0] - put - 300.0 <= 0.01
    assert sim.store.steps - calls <= 20


def test_high_priority_first(sim: Simulation) -> None:
    # case T13
    task = sim.task("quick", seconds=1.0)
    low = [task.using(priority=-5).enqueue() for _ in range(10)]
    high = [task.using(priority=5).enqueue() for _ in range(10)]
    sim.worker(concurrency=1)
    sim.until_succeeded(*low, *high)
    assert max(sim.starts(job)[0] for job in high) < min(sim.starts(job)[0] for job in low)


def test_a_cancelled_job_never_starts(sim: Simulation) -> None:
    # case T14
    long = sim.task("long", seconds=10.0).enqueue()
    sim.worker(concurrency=1)
    job = sim.task("quick").enqueue()
    sim.run_for(0.01)
    assert job.cancel()
    sim.until_succeeded(long)
    sim.run_for(5.0)
    assert job.state is State.CANCELLED
    assert sim.starts(job) == []


def test_a_running_job_sees_its_cancellation(sim: Simulation) -> None:
    # case T14
    job = sim.task("long", seconds=100.0, heeds_cancel=True).enqueue()
    sim.worker()
    asked = sim.now
    job.cancel()
    at = sim.until(lambda: job.state is State.CANCELLED)
    assert at - asked <= 1.0


def test_waiting_jobs_move_to_a_process_with_a_free_slot(sim: Simulation) -> None:
    # case T18
    long, short = sim.task("long", seconds=100.0), sim.task("short", seconds=0.05)
    sim.worker(processes=2, concurrency=1)
    long.enqueue()
    sim.run_for(0.5)
    jobs = [short.enqueue() for _ in range(40)]
    asked = sim.now
    assert sim.until_succeeded(*jobs) - asked <= 5.0


def test_waiting_jobs_go_back_to_the_store_for_another_worker(sim: Simulation) -> None:
    # case T18
    long, short = sim.task("long", seconds=100.0), sim.task("short", seconds=0.05)
    sim.worker(concurrency=1)
    warm = [short.enqueue() for _ in range(30)]
    sim.until_succeeded(*warm)
    long.enqueue()
    jobs = [short.enqueue() for _ in range(10)]
    sim.run_for(1.0)
    assert sim.states()["running"] == 1
    second = sim.worker(concurrency=1)
    sim.until_succeeded(*jobs)
    assert all(sim.runs(job)[-1].process in second.processes for job in jobs)
    assert all(job.refresh().attempt == 1 for job in jobs)


def test_two_workers_share_the_jobs_of_one_store(sim: Simulation) -> None:
    # law 3
    task = sim.task("quick", seconds=0.5)
    workers = [sim.worker(concurrency=2) for _ in range(2)]
    jobs = [task.enqueue() for _ in range(40)]
    sim.until_succeeded(*jobs)
    assert all(len(sim.runs(job)) == 1 for job in jobs)
    for worker in workers:
        assert sum(run.process in worker.processes for run in sim.runs()) >= 10


def test_jobs_are_spread_over_the_processes(sim: Simulation) -> None:
    # case T18
    task = sim.task("long", seconds=10.0)
    worker = sim.worker(processes=2, concurrency=3)
    for _ in range(6):
        task.enqueue()
    sim.run_for(1.0)
    assert [len(process.runs) for process in worker.processes] == [3, 3]


def test_waiting_jobs_start_by_priority(sim: Simulation) -> None:
    # case T13
    task = sim.task("quick", seconds=0.02)
    sim.worker(concurrency=1)
    sim.until_succeeded(*[task.enqueue() for _ in range(100)])
    low = [task.using(priority=-5).enqueue() for _ in range(5)]
    high = [task.using(priority=5).enqueue() for _ in range(5)]
    sim.until_succeeded(*low, *high)
    firsts = [sim.starts(job)[0] for job in low + high]
    assert max(firsts[6:]) < max(firsts[:5])


def test_an_expired_job_never_starts(sim: Simulation) -> None:
    # case T14
    long = sim.task("long", seconds=10.0).enqueue()
    sim.worker(concurrency=1)
    job = sim.task("quick").using(expires=5.0).enqueue()
    sim.until_succeeded(long)
    sim.until(lambda: job.state is State.EXPIRED)
    assert sim.runs(job) == []


@pytest.mark.parametrize("terminate", [False, True])
def test_a_cancelled_job_of_a_blocked_process_never_starts(
    sim: Simulation, terminate: bool
) -> None:
    # case T14: the process that holds the job hears nothing
    quick = sim.task("quick", seconds=0.02)
    worker = sim.worker(concurrency=1)
    sim.until_succeeded(*[quick.enqueue() for _ in range(50)])
    holds = sim.task("holds", seconds=5.0, holds_lock=True).enqueue()
    jobs = [quick.enqueue() for _ in range(5)]
    sim.run_for(0.01)
    assert worker.processes[0].runs
    for job in jobs:
        job.cancel(terminate=terminate)
    sim.until_succeeded(holds)
    sim.until(lambda: all(job.state.finished for job in jobs))
    assert all(job.state is State.CANCELLED for job in jobs)
    assert all(sim.runs(job) == [] for job in jobs)


def test_a_job_that_is_cancelled_as_its_process_dies_does_not_run_again(sim: Simulation) -> None:
    # case T14
    job = sim.task("long", seconds=50.0, retries=3).enqueue()
    worker = sim.worker(concurrency=1)
    job.cancel()
    worker.processes[0].die(9)
    sim.run_for(60.0)
    assert job.refresh().state is State.CANCELLED
    assert len(sim.runs(job)) == 1


def test_a_cancelled_job_that_comes_back_from_a_quiet_process_never_starts(sim: Simulation) -> None:
    # case T14
    quick = sim.task("quick", seconds=0.02)
    worker = sim.worker(concurrency=1)
    sim.until_succeeded(*[quick.enqueue() for _ in range(50)])
    sim.task("long", seconds=5.0).enqueue()
    jobs = [quick.enqueue() for _ in range(5)]
    sim.run_for(0.01)
    worker.processes[0].told_to_go()
    for job in jobs:
        job.cancel()
    sim.run_for(20.0)
    assert all(job.refresh().state is State.CANCELLED for job in jobs)
    assert all(sim.runs(job) == [] for job in jobs)


def test_an_idle_worker_sleeps(sim: Simulation) -> None:
    # law 9
    sim.worker(processes=2)
    sim.run_for(100.0)
    steps = sim.store.steps
    sim.run_for(1000.0)
    assert sim.store.steps - steps <= 2


def test_a_worker_with_a_long_job_sleeps(sim: Simulation) -> None:
    # law 9
    sim.task("long", seconds=FOREVER).enqueue()
    sim.worker(concurrency=2)
    sim.run_for(100.0)
    steps = sim.store.steps
    sim.run_for(300.0)
    assert sim.store.steps - steps <= 10


def test_a_long_job_that_holds_the_lock_runs_once(sim: Simulation) -> None:
    # case T12
    job = sim.task("holds", seconds=120.0, holds_lock=True).enqueue()
    sim.worker(concurrency=2)
    sim.worker(concurrency=2)
    sim.until_succeeded(job)
    assert (job.refresh().attempt, job.refresh().losses) == (1, 0)
    assert len(sim.runs(job)) == 1


def test_a_job_with_a_limit_waits_for_its_turn(sim: Simulation) -> None:
    # law 13
    task = sim.task("limited", seconds=1.0, limit=Limit(concurrency=3))
    worker = sim.worker(processes=2, concurrency=4)
    jobs = [task.enqueue() for _ in range(15)]
    sim.run_for(2.5)
    worker.processes[0].die(9)
    sim.until(lambda: all(job.state.finished for job in jobs))
    moments = sorted(run.began for run in sim.runs())
    for moment in moments:
        assert sum(run.began <= moment < run.ended for run in sim.runs()) <= 3
    (row,) = sim.mill.limits.list()
    assert row.running == 0
