"""A process dies: what had started used an attempt, the rest goes back (laws 5 and 6)."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
from simulator import Simulation, Worker

from tidemill import Retries, State

SOON = Retries(3, delay=0)


def test_only_jobs_that_had_started_use_an_attempt(sim: Simulation) -> None:
    # case T9
    started = sim.task("started", seconds=50.0, retries=SOON).enqueue()
    worker = sim.worker(concurrency=1, processes=1)
    sim.run_for(1.0)
    died = sim.now
    worker.processes[0].die(9)
    sim.until(lambda: len(sim.starts(started)) == 2)
    assert sim.starts(started)[1] - died <= 1.0
    assert [attempt.error for attempt in started.attempts] == [
        f"worker process {sim.processes[0].pid} was killed by SIGKILL"
    ]
    sim.until_succeeded(started)
    assert started.refresh().attempt == 2


def jobs_in_advance(sim: Simulation, worker: Worker) -> tuple[Any, list[Any]]:
    """A job that keeps the lock of the only process, and jobs that this process has in advance."""
    short = sim.task("short", seconds=0.01, retries=SOON)
    sim.until_succeeded(*[short.enqueue() for _ in range(100)])
    holds = {"seconds": 50.0, "holds_lock": True, "again": {"seconds": 1.0}}
    running = sim.task("holds", retries=SOON, **holds).enqueue()
    jobs = [short.enqueue() for _ in range(4)]
    sim.run_for(0.1)
    assert all(job.refresh().state is State.RUNNING for job in jobs)
    assert not any(sim.runs(job) for job in jobs)
    return running, jobs


def test_jobs_that_a_dead_process_had_in_advance_are_uncounted(sim: Simulation) -> None:
    # case T9
    worker = sim.worker(concurrency=1)
    running, jobs = jobs_in_advance(sim, worker)
    worker.processes[0].die(9)
    sim.until_succeeded(running, *jobs)
    assert running.refresh().attempt == 2
    assert [(job.refresh().attempt, len(job.attempts)) for job in jobs] == [(1, 1)] * len(jobs)


def test_jobs_that_a_dead_worker_had_in_advance_are_uncounted(sim: Simulation) -> None:
    # case T10, law 6
    worker = sim.worker(concurrency=1)
    running, jobs = jobs_in_advance(sim, worker)
    worker.kill()
    sim.worker(concurrency=1)
    sim.until_succeeded(running, *jobs)
    assert running.refresh().attempt == 2
    assert all(job.refresh().attempt == 1 for job in jobs)


def test_jobs_of_the_other_process_run_on(sim: Simulation) -> None:
    # case T9
    task = sim.task("long", seconds=20.0, retries=SOON)
    worker = sim.worker(processes=2, concurrency=1)
    jobs = [task.enqueue() for _ in range(2)]
    sim.run_for(1.0)
    worker.processes[0].die(9)
    sim.until_succeeded(*jobs)
    assert sorted(job.refresh().attempt for job in jobs) == [1, 2]
    assert worker.started == 3


@pytest.mark.parametrize(("kills", "name", "retries"), [(11, "SIGSEGV", 2), (6, "SIGABRT", 0)])
def test_a_job_that_kills_each_worker_ends_as_failed_and_names_the_signal(
    sim: Simulation, kills: int, name: str, retries: int
) -> None:
    # case T9, law 6
    policy = Retries(retries, delay=0)
    job = sim.task("killer", seconds=1.0, kills=kills, retries=policy).enqueue()
    sim.worker(concurrency=1)
    sim.until(lambda: job.state is State.FAILED)
    assert len(sim.starts(job)) == retries + 1
    assert name in job.refresh().error


def test_a_process_that_dies_at_each_start_backs_off(sim: Simulation) -> None:
    worker = sim.worker()
    sim.app.boot = 0.0
    sim.app.error = "ImportError: no such module"
    worker.processes[0].die(9)
    sim.run_for(120.0)
    assert worker.started <= 10
    sim.app.error = ""
    job = sim.task("quick").enqueue()
    sim.until_succeeded(job)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_machine_that_starts_no_process_is_asked_again(sim: Simulation, processes: int) -> None:
    worker = sim.worker(processes=processes)
    worker.cannot_start_processes(10.0)
    for process in worker.processes:
        process.die(9)
    job = sim.task("quick").enqueue()
    sim.run_for(9.0)
    assert job.state is State.READY
    sim.until_succeeded(job)
    sim.run_for(60.0)
    assert len(worker.processes) == processes


def test_jobs_of_a_dead_process_go_on_in_the_others_at_once(sim: Simulation) -> None:
    # case T9
    quick, long = sim.task("quick", seconds=0.5), sim.task("long", seconds=3.0, retries=SOON)
    worker = sim.worker(processes=2, concurrency=1)
    sim.app.boot = 60.0  # the next process takes its time
    jobs = [long.enqueue(), *[quick.enqueue() for _ in range(6)]]
    sim.run_for(0.2)
    sim.runs(jobs[0])[0].process.die(9)
    died = sim.now
    assert sim.until_succeeded(*jobs) - died <= 10.0
    assert len(worker.processes) == 2
    assert all(job.refresh().attempt == 1 for job in jobs[1:])


def test_the_last_verdicts_of_a_dead_process_count(sim: Simulation) -> None:
    # case T9
    task = sim.task("quick", seconds=1.0)
    worker = sim.worker(concurrency=2)
    first, second = task.enqueue(), sim.task("long", seconds=30.0, retries=SOON).enqueue()
    # when the process dies in the instant in which it has sent a verdict
    sim.until(lambda: sim.runs(first) and sim.runs(first)[0].over)
    worker.processes[0].die(11)
    sim.until_succeeded(first, second)
    assert (first.refresh().attempt, second.refresh().attempt) == (1, 2)
    assert len(sim.runs(first)) == 1


def test_a_process_that_dies_while_the_store_stalls_costs_one_attempt(sim: Simulation) -> None:
    # case T9
    started = sim.task("started", seconds=50.0, retries=SOON).enqueue()
    worker = sim.worker(concurrency=1)
    sim.store.stall(20.0)
    waiting = sim.task("waiting").enqueue()
    sim.run_for(1.0)
    worker.processes[0].die(9)
    sim.run_for(18.0)
    assert worker.started == 2  # the watchdog has not waited for the store
    sim.until_succeeded(started, waiting)
    assert (started.refresh().attempt, waiting.refresh().attempt) == (2, 1)


def test_a_process_dies_while_its_leases_are_on_the_way(sim: Simulation) -> None:
    # case T9
    worker = sim.worker(concurrency=2)
    sim.store.answer_late(5.0)
    jobs = [sim.task("quick").enqueue() for _ in range(2)]
    sim.run_for(1.0)
    worker.processes[0].die(9)
    sim.until_succeeded(*jobs)
    assert [job.refresh().attempt for job in jobs] == [1, 1]
    assert [len(job.attempts) for job in jobs] == [1, 1]


def test_a_forked_child_that_keeps_the_socket_open_hides_no_death(sim: Simulation) -> None:
    # case T9, law 5
    job = sim.task("long", seconds=20.0, retries=SOON).enqueue()
    worker = sim.worker(concurrency=1)
    worker.processes[0].die(9, forked=True)
    died = sim.now
    sim.until(lambda: len(sim.starts(job)) == 2)
    assert sim.starts(job)[1] - died <= 1.0


def test_a_death_in_a_reload_delays_no_job(sim: Simulation) -> None:
    worker = sim.worker(concurrency=1)
    sim.app.boot = 5.0
    worker.signal(signal.SIGHUP)
    sim.run_for(1.0)
    old, new = worker.processes
    new.die(9)
    job = sim.task("quick").enqueue()
    assert sim.until_succeeded(job) - sim.now <= 1.0
    assert sim.runs(job)[0].process is old


def test_the_death_of_the_old_process_in_a_reload_leaves_one_new_process(sim: Simulation) -> None:
    worker = sim.worker(concurrency=1)
    sim.app.boot = 5.0
    worker.signal(signal.SIGHUP)
    sim.run_for(1.0)
    worker.processes[0].die(9)
    sim.run_for(20.0)
    assert len(worker.processes) == 1
    job = sim.task("quick").enqueue()
    sim.until_succeeded(job)


def test_a_crash_without_a_job_is_followed_by_a_longer_and_longer_pause(sim: Simulation) -> None:
    worker = sim.worker(concurrency=1)
    sim.app.dies = 9
    worker.processes[0].die(9)
    starts, seen = [], worker.started
    while len(starts) < 7:
        sim.until(lambda seen=seen: worker.started > seen)
        starts.append(sim.now)
        seen = worker.started
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 10 * gaps[0]
    sim.run_for(200.0)
    assert sim.said("ended right after its start") <= 20


def test_the_backoff_ends_with_a_good_start(sim: Simulation) -> None:
    worker = sim.worker(concurrency=1)
    sim.app.dies = 9
    worker.processes[0].die(9)
    sim.run_for(60.0)
    sim.app.dies = 0
    sim.until(lambda: worker.processes)
    sim.run_for(100.0)
    # when the process dies once more, the next one starts soon
    worker.processes[0].die(9)
    died = sim.now
    job = sim.task("quick").enqueue()
    assert sim.until_succeeded(job) - died <= 2.0


def test_a_death_by_a_job_is_followed_by_no_pause(sim: Simulation) -> None:
    # case T9
    kills = sim.task("kills", seconds=0.1, kills=9, retries=0)
    worker = sim.worker(concurrency=1)
    began = sim.now
    jobs = [kills.enqueue() for _ in range(10)]
    sim.until(lambda: all(job.state is State.FAILED for job in jobs))
    assert sim.now - began <= 10.0
    assert worker.started >= 10


def test_everything_dies_and_another_worker_goes_on(sim: Simulation) -> None:
    # law 6, case T10
    long = sim.task("long", seconds=20.0, retries=SOON).enqueue()
    first = sim.worker(concurrency=1)
    waiting = [sim.task("waiting").enqueue() for _ in range(2)]
    sim.run_for(0.01)
    second = sim.worker(concurrency=1)
    died = sim.now
    first.kill()
    sim.until_succeeded(long, *waiting)
    assert sim.starts(long)[1] - died <= 1.0
    assert long.refresh().attempt == 2
    assert all(job.refresh().attempt == 1 for job in waiting)
    assert second.started == 1


@pytest.mark.parametrize("max_jobs", [0, 1])
def test_a_job_that_ended_is_counted_until_its_verdict_is_stored(
    sim: Simulation, max_jobs: int
) -> None:
    # law 6: also when its process has ended, too
    job = sim.task("quick", seconds=5.0, retries=SOON).enqueue()
    first = sim.worker(concurrency=1, max_jobs=max_jobs)
    sim.store.stall(60.0)
    sim.task("other").enqueue()
    sim.run_for(20.0)
    assert sim.runs(job)[0].over
    assert sim.runs(job)[0].process.returncode == (0 if max_jobs else None)
    first.kill()
    sim.run_for(60.0)
    sim.worker(concurrency=1)
    sim.until_succeeded(job)
    assert job.refresh().attempt == 2
