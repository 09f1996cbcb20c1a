"""Which job starts when, and where."""

from __future__ import annotations

from simulator import Simulation

from tidemill import State


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
    job = task.using(delay=1000.0).enqueue()
    sim.run_for(5.0)
    calls = sim.store.steps
    sim.until(lambda: sim.starts(job))
    assert 0.0 <= sim.starts(job)[0] - put - 1000.0 <= 0.01
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
