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


@pytest.mark.parametrize("how", HELD_UP.values(), ids=HELD_UP)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_only_process_has_a_stuck_job_and_the_next_jobs_start_within_a_second(
    sim: Simulation, concurrency: int, how: dict
) -> None:
    # case T6
    stuck = sim.task("stuck", seconds=FOREVER, timeout=1.0, retries=0, **how)
    quick, long = sim.task("quick", seconds=0.01), sim.task("long", seconds=30.0)
    sim.worker(processes=1, concurrency=concurrency)
    sim.until_succeeded(*[quick.enqueue() for _ in range(50)])  # from now on it fetches ahead
    # given a neighbour in each other slot, and jobs that wait
    job, neighbours = stuck.enqueue(), [long.enqueue() for _ in range(concurrency - 1)]
    waiting = [quick.enqueue() for _ in range(3)]
    sim.until(lambda: all(sim.starts(each) for each in neighbours))
    sim.until_succeeded(*waiting)
    # then they start within a second of the timeout, and the time in which the app loads
    timeout = sim.starts(job)[0] + 1.0
    assert max(sim.starts(each)[-1] for each in waiting) <= timeout + 1.0 + sim.app.boot
    assert job.state is State.FAILED


def test_neighbours_of_a_stuck_job_may_run_on_for_the_grace(sim: Simulation) -> None:
    # case T6
    brief = sim.task("brief", seconds=20.0).enqueue()
    long = sim.task("long", seconds=100.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    sim.worker(concurrency=3, stuck_grace=30.0)
    job = stuck.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    sim.until(lambda: len(sim.starts(long)) == 2)
    # then the short neighbour ended in time, and the long one went back uncounted
    assert brief.refresh().attempt == 1
    assert brief.state is State.SUCCEEDED
    assert 30.0 <= sim.starts(long)[1] - sim.starts(job)[0] - 1.4 <= 32.0
    sim.until_succeeded(long)
    assert long.refresh().attempt == 1
    assert any(event.what == "interrupted" for event in long.trail)


def test_a_process_whose_lock_is_held_is_killed_before_the_grace(sim: Simulation) -> None:
    # case T6
    long = sim.task("long", seconds=100.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, holds_lock=True, timeout=1.0, retries=0)
    sim.worker(concurrency=2, stuck_grace=60.0)
    job = stuck.enqueue()
    sim.until(lambda: len(sim.starts(long)) == 2)
    assert sim.starts(long)[1] - sim.starts(job)[0] <= 8.0
    sim.until_succeeded(long)
    assert long.refresh().attempt == 1


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
    long = sim.task("long", seconds=1000.0, again={"seconds": 0.1})
    worker = sim.worker(concurrency=2, stuck_grace=100.0)
    for _ in range(6):
        long.enqueue()
        sim.run_for(1.0)
        job = stuck.enqueue()
        sim.until(lambda job=job: job.state is State.FAILED)
        sim.run_for(0.5)
    assert len(worker.processes) <= 4
    assert sim.processes[0].killed
    assert not sim.processes[-2].killed


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


def test_a_job_that_cleans_up_too_long_is_stuck(sim: Simulation) -> None:
    # case T6
    job = sim.task("cleans", seconds=FOREVER, cleans_up=20.0, timeout=1.0, retries=0).enqueue()
    worker = sim.worker(concurrency=1)
    at = sim.until(lambda: job.state is State.FAILED)
    assert at - sim.starts(job)[0] <= 2.0
    sim.run_for(6.0)
    assert worker.started == 2


def test_a_job_that_ends_between_its_timeout_and_its_report_has_one_verdict(
    sim: Simulation,
) -> None:
    # case T6
    task = sim.task("late", seconds=1.2, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2)
    jobs = [task.enqueue() for _ in range(2)]
    sim.until(lambda: all(job.state is State.FAILED for job in jobs))
    sim.run_for(10.0)
    assert [len(job.attempts) for job in jobs] == [1, 1]
    assert worker.started == 1


@pytest.mark.parametrize("seconds", [2.4, 2.401, 2.45, 2.5])
def test_a_neighbour_that_ends_as_its_process_is_killed_runs_once(
    sim: Simulation, seconds: float
) -> None:
    # case T6
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    brief = sim.task("brief", seconds=seconds)
    sim.worker(concurrency=3, stuck_grace=1.0)
    jobs = [brief.enqueue() for _ in range(2)]
    stuck.enqueue()
    sim.until_succeeded(*jobs)
    for job in jobs:
        assert (len(sim.runs(job)) == 1) or not sim.runs(job)[0].over
        assert job.refresh().attempt == 1


def test_two_stuck_jobs_of_one_process_each_have_their_verdict(sim: Simulation) -> None:
    # case T6
    task = sim.task("stuck", seconds=FOREVER, ignores=True, retries=Retries(1, delay=0))
    worker = sim.worker(concurrency=2)
    jobs = [task.using(timeout=timeout).enqueue() for timeout in (1.0, 1.2)]
    sim.until(lambda: all(job.state is State.FAILED for job in jobs))
    assert [job.refresh().attempt for job in jobs] == [2, 2]
    assert sim.overlaps() == []
    sim.run_for(10.0)
    assert len(worker.processes) == 1


def test_the_trail_says_for_whom_a_neighbour_was_interrupted(sim: Simulation) -> None:
    # case M6
    long = sim.task("long", seconds=100.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    sim.worker(concurrency=2, stuck_grace=5.0)
    job = stuck.enqueue()
    sim.until_succeeded(long)
    # then the interrupted run is in the trail, with its reason
    why = f"stuck[{job.id}] ran past its timeout and cannot be interrupted"
    events = [event.what for event in long.trail]
    assert events == ["created", "started", "interrupted", "leased", "started", "succeeded"]
    assert why in long.trail[2].detail
    assert sim.said(f"long[{long.id}] was interrupted and goes back: stuck[{job.id}]") == 1


def test_the_neighbours_of_a_last_attempt_may_end_too(sim: Simulation) -> None:
    # case T6
    last = sim.task("last", seconds=60.0, retries=0).enqueue()
    other = sim.task("other", seconds=30.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    sim.worker(concurrency=3, stuck_grace=5.0)
    stuck.enqueue()
    sim.until_succeeded(last, other)
    assert len(sim.runs(other)) == 1


def test_a_stuck_process_takes_no_job(sim: Simulation) -> None:
    # case T6
    sim.task("long", seconds=20.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=4)
    process = worker.processes[0]
    job = stuck.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    others = [sim.task("other").enqueue() for _ in range(8)]
    sim.until_succeeded(*others)
    assert process.returncode is None
    assert all(sim.runs(other)[0].process is not process for other in others)


def test_the_waiting_jobs_of_a_stuck_process_run_elsewhere_at_once(sim: Simulation) -> None:
    # case T6
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    long = sim.task("long", seconds=300.0).enqueue()
    sim.worker(concurrency=2, stuck_grace=200.0)
    job = stuck.enqueue()
    waiting = [sim.task("waiting").enqueue() for _ in range(3)]
    sim.until(lambda: job.state is State.FAILED)
    failed = sim.now
    assert sim.until_succeeded(*waiting) - failed <= 2.0
    assert len(sim.runs(long)) == 1


def test_another_process_serves_at_once_beside_a_held_lock(sim: Simulation) -> None:
    # case T6
    holds = sim.task("holds", seconds=FOREVER, holds_lock=True, timeout=1.0, retries=0)
    sim.task("long", seconds=3.0).enqueue()
    sim.worker(concurrency=2)
    job = holds.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    other = sim.task("other").enqueue()
    assert sim.until_succeeded(other) - sim.starts(job)[0] <= 3.0


def test_each_overdue_job_beside_a_held_lock_has_its_verdict_at_once(sim: Simulation) -> None:
    # law 8
    holds = sim.task("holds", seconds=FOREVER, holds_lock=True, timeout=1.0, retries=0)
    loops = sim.task("loops", seconds=FOREVER, timeout=3.0, retries=0)
    sim.worker(concurrency=2)
    jobs = [loops.enqueue(), holds.enqueue()]
    sim.until(lambda: all(job.state is State.FAILED for job in jobs))
    assert sim.now - sim.starts(jobs[0])[0] <= 4.0


def test_a_verdict_on_a_held_lock_is_stored_at_once_while_the_worker_ends(sim: Simulation) -> None:
    # law 8, case T11
    holds = sim.task("holds", seconds=FOREVER, holds_lock=True, timeout=2.0, retries=0)
    sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker(concurrency=2)
    job = holds.enqueue()
    sim.until(lambda: sim.runs(job))
    worker.command("quiet")
    sim.until(lambda: job.state is State.FAILED)
    assert sim.now - sim.starts(job)[0] <= 3.0


def test_a_held_lock_is_found_although_nobody_rings(sim: Simulation) -> None:
    # law 8
    idle = sim.task("holds", seconds=FOREVER, holds_lock=True, timeout=50.0, retries=0)
    sim.worker(concurrency=1)
    job = idle.enqueue()
    at = sim.until(lambda: job.state is State.FAILED)
    assert at - sim.starts(job)[0] <= 51.0


def test_a_job_that_holds_the_lock_beyond_its_timeout_has_one_verdict(sim: Simulation) -> None:
    # law 8
    job = sim.task("holds", seconds=1.58, holds_lock=True, timeout=1.0, retries=0).enqueue()
    sim.worker(concurrency=1)
    sim.until(lambda: job.state.finished)
    sim.run_for(5.0)
    assert job.refresh().state is State.FAILED
    assert len(job.attempts) == 1


def test_a_neighbour_that_holds_the_lock_delays_a_timeout_at_most(sim: Simulation) -> None:
    # law 8
    holds = sim.task("holds", seconds=1.0, holds_lock=True)
    loops = sim.task("loops", seconds=FOREVER, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2)
    job = loops.enqueue()
    sim.run_for(0.5)
    other = holds.enqueue()
    at = sim.until(lambda: job.state is State.FAILED)
    assert at - sim.starts(job)[0] <= 2.0
    sim.until_succeeded(other)
    assert worker.started == 1


def test_the_verdict_on_a_stuck_job_is_stored_before_its_process_dies(sim: Simulation) -> None:
    # case T6
    sim.task("long", seconds=500.0).enqueue()
    policy = Retries(1, delay=50.0)
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    worker = sim.worker(concurrency=2, stuck_grace=20.0)
    process, job = worker.processes[0], stuck.enqueue()
    sim.until(lambda: job.attempts)
    assert process.returncode is None
    # then its retry comes when its delay is over, or when the process is dead
    sim.until(lambda: len(sim.starts(job)) == 2)
    first, second = sim.starts(job)
    assert second >= process.died_at
    assert second - first >= 1.4
    assert sim.overlaps() == []


def test_a_retry_has_its_delay_although_the_old_run_dies_at_once(sim: Simulation) -> None:
    # case T6
    policy = Retries(1, delay=50.0, jitter=False)
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    sim.worker(concurrency=1)
    job = stuck.enqueue()
    sim.until(lambda: len(sim.starts(job)) == 2)
    first, second = sim.starts(job)
    assert second - first >= 50.0


def test_a_stuck_job_that_ends_after_all_gives_its_retry_free(sim: Simulation) -> None:
    # case T6
    policy = Retries(1, delay=0)
    stuck = sim.task("stuck", seconds=9.0, ignores=True, timeout=1.0, retries=policy)
    sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker(concurrency=2, stuck_grace=60.0)
    process, job = worker.processes[0], stuck.enqueue()
    sim.until(lambda: len(sim.starts(job)) == 2)
    # then its process has ended by itself, and was not killed
    assert process.returncode == 0
    assert not process.killed
    assert sim.overlaps() == []


def test_a_cancelled_job_that_is_stuck_is_not_retried(sim: Simulation) -> None:
    # case T14
    sim.task("long", seconds=20.0).enqueue()
    policy = Retries(3, delay=0)
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    sim.worker(concurrency=2, stuck_grace=60.0)
    job = stuck.enqueue()
    sim.until(lambda: job.attempts)
    job.cancel()
    sim.run_for(60.0)
    assert job.refresh().state is State.CANCELLED
    assert len(sim.runs(job)) == 1


def test_terminate_of_an_ordinary_job_costs_nobody_anything(sim: Simulation) -> None:
    # case T14
    job, other = sim.task("loops", seconds=FOREVER).enqueue(), sim.task("o", seconds=9.0).enqueue()
    worker = sim.worker(concurrency=2)
    asked = sim.now
    job.cancel(terminate=True)
    assert sim.until(lambda: job.state is State.CANCELLED) - asked <= 0.5
    sim.until_succeeded(other)
    assert worker.started == 1
    assert not job.cancel()


def test_terminate_of_a_job_that_ends_at_the_same_moment_changes_nothing(sim: Simulation) -> None:
    # case T14
    job = sim.task("quick", seconds=2.0).enqueue()
    worker = sim.worker(concurrency=1)
    sim.until(lambda: sim.now >= sim.starts(job)[0] + 2.0 - 1e-6 or job.state.finished)
    job.cancel(terminate=True)
    sim.run_for(10.0)
    assert job.refresh().state in (State.SUCCEEDED, State.CANCELLED)
    assert worker.started == 1


def test_a_terminated_neighbour_ends_in_a_process_that_is_stuck(sim: Simulation) -> None:
    # case T14
    long = sim.task("long", seconds=500.0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2, stuck_grace=100.0)
    process, job = worker.processes[0], stuck.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    long.cancel(terminate=True)
    sim.until(lambda: long.state is State.CANCELLED)
    sim.run_for(1.0)
    assert process.returncode is not None  # no neighbour was left


def test_a_retry_waits_although_the_supervisor_is_held_up(sim: Simulation) -> None:
    # law 8
    stuck = sim.task(
        "stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=Retries(1, delay=0)
    )
    sim.task("long", seconds=500.0).enqueue()
    first = sim.worker(concurrency=2, stuck_grace=10.0)
    job = stuck.enqueue()
    sim.until(lambda: job.attempts)
    sim.worker(concurrency=2)
    first.pause(60.0)
    sim.run_for(59.0)
    assert job.refresh().state is State.RUNNING
    sim.until(lambda: job.state is State.FAILED)
    assert sim.overlaps() == []


def test_a_stuck_job_is_counted_once_when_its_worker_dies_too(sim: Simulation) -> None:
    # law 6
    stuck = sim.task(
        "stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=Retries(1, delay=0)
    )
    neighbour = sim.task("long", seconds=500.0).enqueue()
    first = sim.worker(concurrency=2, stuck_grace=100.0)
    job = stuck.enqueue()
    sim.until(lambda: job.attempts)
    sim.run_for(1.0)
    first.kill()
    sim.worker(concurrency=2)
    sim.until(lambda: job.state is State.FAILED)
    assert [attempt.error[:10] for attempt in job.attempts] == ["JobTimeout"] * 2
    assert [attempt.error for attempt in neighbour.refresh().attempts] == ["its worker died"]
