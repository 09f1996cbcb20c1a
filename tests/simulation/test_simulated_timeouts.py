"""A timeout ends the work; neighbours finish, or go back uncounted (law 8)."""

from __future__ import annotations

import pytest
from simulator import FOREVER, Simulation

from tidemill import Retries, State

HELD_UP = {"blocked": {"ignores": True}, "holds the lock": {"holds_lock": True}}
"""Two ways in which a task cannot be interrupted."""


def test_a_job_that_can_be_interrupted_costs_nobody_anything(sim: Simulation) -> None:
    # case T6
    loops = sim.task("loops", seconds=FOREVER, timeout=1.0, retries=0)
    other = sim.task("other", seconds=5.0).enqueue()
    worker = sim.worker(concurrency=2)
    job = loops.enqueue()
    at = sim.until(lambda: job.state is State.FAILED)
    assert at - sim.starts(job)[0] == pytest.approx(1.0, abs=0.1)
    sim.until_succeeded(other)
    assert worker.started == 1
    assert other.refresh().attempt == 1


@pytest.mark.parametrize("how", HELD_UP.values(), ids=HELD_UP)
def test_the_verdict_on_a_stuck_job_falls_within_a_second(sim: Simulation, how: dict) -> None:
    # case T6
    task = sim.task("stuck", seconds=FOREVER, timeout=1.0, retries=0, **how)
    worker = sim.worker(concurrency=2)
    job = task.enqueue()
    at = sim.until(lambda: job.state is State.FAILED)
    assert 1.0 <= at - sim.starts(job)[0] <= 2.0
    (attempt,) = job.attempts
    assert "JobTimeout" in attempt.error
    assert "stack of" in attempt.traceback
    # then its process is dead, and one other serves
    sim.run_for(6.0)
    assert worker.started == 2
    assert len(worker.processes) == 1
    again = sim.task("again").enqueue()
    sim.until_succeeded(again)


def test_neighbours_of_a_stuck_job_may_run_on_for_the_grace(sim: Simulation) -> None:
    # case T6
    brief = sim.task("brief", seconds=20.0).enqueue()
    long = sim.task("long", seconds=100.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=3, stuck_grace=30.0)
    job = stuck.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    sim.until(lambda: len(sim.starts(long)) == 2)
    # then the short neighbour ended in time, and the long one went back uncounted
    assert brief.refresh().attempt == 1
    assert brief.state is State.SUCCEEDED
    assert 30.0 <= sim.starts(long)[1] - sim.starts(job)[0] - 1.4 <= 32.0
    sim.until_succeeded(long)
    assert long.refresh().attempt == 1
    assert any("interrupted after" in str(event) for event in long.trail)


def test_a_process_whose_lock_is_held_is_killed_before_the_grace(sim: Simulation) -> None:
    # case T6
    long = sim.task("long", seconds=100.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, holds_lock=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2, stuck_grace=60.0)
    job = stuck.enqueue()
    sim.until(lambda: len(sim.starts(long)) == 2)
    assert sim.starts(long)[1] - sim.starts(job)[0] <= 8.0
    sim.until_succeeded(long)
    assert long.refresh().attempt == 1


def test_a_neighbour_without_another_attempt_outlives_the_grace(sim: Simulation) -> None:
    # case T6
    last = sim.task("last", seconds=200.0, retries=0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2, stuck_grace=30.0)
    stuck.enqueue()
    sim.until(lambda: last.state.finished)
    assert last.state is State.SUCCEEDED
    assert len(sim.starts(last)) == 1


def test_a_retry_starts_only_when_the_old_run_is_dead(sim: Simulation) -> None:
    # case T6
    neighbour = sim.task("neighbour", seconds=100.0).enqueue()
    policy = Retries(1, delay=0)
    task = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    worker = sim.worker(concurrency=2, stuck_grace=20.0)
    job = task.enqueue()
    sim.until(lambda: job.attempts)
    (first,) = [process for process in worker.processes if process.runs]
    # given a verdict that has fallen while the old run goes on
    assert job.refresh().state is State.RUNNING
    sim.until(lambda: len(sim.starts(job)) == 2)
    assert first.returncode is not None
    sim.until(lambda: job.state is State.FAILED)
    assert job.refresh().attempt == 2
    sim.until_succeeded(neighbour)
    assert neighbour.refresh().attempt == 1


def test_a_job_that_ends_in_time_leaves_no_timer_behind(sim: Simulation) -> None:
    # case T7
    task = sim.task("quick", seconds=0.9, timeout=1.0)
    worker = sim.worker(concurrency=1)
    jobs = [task.enqueue() for _ in range(5)]
    sim.until_succeeded(*jobs)
    assert all(job.refresh().attempt == 1 for job in jobs)
    assert worker.started == 1


def test_only_some_stuck_processes_run_on_for_their_neighbours(sim: Simulation) -> None:
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    long = sim.task("long", seconds=1000.0)
    worker = sim.worker(concurrency=2, stuck_grace=100.0)
    for _ in range(6):
        long.enqueue()
        sim.run_for(1.0)
        job = stuck.enqueue()
        sim.until(lambda job=job: job.state is State.FAILED)
    assert len(worker.processes) <= 5


@pytest.mark.parametrize("how", HELD_UP.values(), ids=HELD_UP)
def test_a_terminated_job_has_its_verdict_within_a_second(sim: Simulation, how: dict) -> None:
    # case T14
    job = sim.task("stuck", seconds=FOREVER, **how).enqueue()
    worker = sim.worker(concurrency=1)
    assert sim.starts(job)
    asked = sim.now
    assert job.cancel(terminate=True)
    at = sim.until(lambda: job.state is State.CANCELLED)
    assert at - asked <= 1.1
    sim.run_for(6.0)
    assert worker.started == 2
    assert len(worker.processes) == 1
