"""Which job starts when, and where."""

from __future__ import annotations

from simulator import Simulation

from tidemill import State


def test_short_jobs_do_not_wait_for_long_jobs(sim: Simulation) -> None:
    # case T18
    long, short = sim.task("long", seconds=600.0), sim.task("short", seconds=0.01)
    worker = sim.worker(processes=2, concurrency=4)
    for _ in range(7):
        long.enqueue()
    jobs = [short.enqueue() for _ in range(500)]
    at = worker.until(lambda: all(job.state is State.SUCCEEDED for job in jobs))
    assert at - min(sim.starts(jobs[0])) <= 30.0


def test_a_worker_sleeps_until_the_next_job_is_due(sim: Simulation) -> None:
    # law 9
    task = sim.task("quick", seconds=0.0)
    worker = sim.worker()
    put = sim.now
    job = task.using(delay=1000.0).enqueue()
    worker.run_for(5.0)
    calls = sim.store.calls.count("exchange")
    worker.until(lambda: sim.starts(job))
    assert 0.0 <= sim.starts(job)[0] - put - 1000.0 <= 0.01
    assert sim.store.calls.count("exchange") - calls <= 20


def test_high_priority_first(sim: Simulation) -> None:
    # case T13
    task = sim.task("quick", seconds=1.0)
    low = [task.using(priority=-5).enqueue() for _ in range(10)]
    high = [task.using(priority=5).enqueue() for _ in range(10)]
    worker = sim.worker(concurrency=1)
    worker.until(lambda: all(job.state is State.SUCCEEDED for job in low + high))
    assert max(sim.starts(job)[0] for job in high) < min(sim.starts(job)[0] for job in low)


def test_a_cancelled_job_never_starts(sim: Simulation) -> None:
    # case T14
    long = sim.task("long", seconds=10.0).enqueue()
    worker = sim.worker(concurrency=1)
    job = sim.task("quick").enqueue()
    worker.run_for(0.01)
    assert job.cancel()
    worker.until(lambda: long.state is State.SUCCEEDED)
    worker.run_for(5.0)
    assert job.state is State.CANCELLED
    assert sim.starts(job) == []


def test_a_running_job_sees_its_cancellation(sim: Simulation) -> None:
    # case T14
    job = sim.task("long", seconds=100.0, heeds_cancel=True).enqueue()
    worker = sim.worker()
    asked = sim.now
    job.cancel()
    at = worker.until(lambda: job.state is State.CANCELLED)
    assert at - asked <= 1.0
