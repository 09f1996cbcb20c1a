"""A process dies: what had started used an attempt, the rest goes back (laws 5 and 6)."""

from __future__ import annotations

import pytest
from simulator import FOREVER, Simulation

from tidemill import Retries, State

SOON = Retries(3, delay=0)


def test_only_jobs_that_had_started_use_an_attempt(sim: Simulation) -> None:
    # case T9
    started = sim.task("started", seconds=50.0, retries=SOON).enqueue()
    worker = sim.worker(concurrency=1, processes=1)
    waiting = [sim.task(f"waiting-{n}").enqueue() for n in range(3)]
    sim.run_for(0.01)
    died = sim.now
    worker.processes[0].die(9)
    sim.until(lambda: len(sim.starts(started)) == 2)
    assert sim.starts(started)[1] - died <= 1.0
    assert [attempt.error for attempt in started.attempts] == [
        f"worker process {sim.processes[0].pid} was killed by SIGKILL"
    ]
    sim.until(lambda: all(job.state is State.SUCCEEDED for job in (started, *waiting)))
    assert started.refresh().attempt == 2
    assert all(job.refresh().attempt == 1 for job in waiting)


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


def test_a_job_that_kills_each_worker_ends_as_failed_and_names_the_signal(sim: Simulation) -> None:
    # case T9
    job = sim.task("killer", seconds=1.0, kills=11, retries=Retries(2, delay=0)).enqueue()
    worker = sim.worker(concurrency=1)
    sim.until(lambda: job.state is State.FAILED)
    assert len(sim.starts(job)) == 3
    assert "SIGSEGV" in job.refresh().error


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


def test_the_suspects_of_a_broken_process_run_alone(sim: Simulation) -> None:
    # law 6
    guilty = sim.task("guilty", seconds=2.0, breaks=True, retries=SOON).enqueue()
    innocent = sim.task("innocent", seconds=10.0).enqueue()
    worker = sim.worker(concurrency=2)
    sim.until_succeeded(innocent)
    sim.until(lambda: guilty.state is State.FAILED)
    assert innocent.refresh().attempt == 1
    assert len(sim.starts(innocent)) <= 2


def test_a_process_that_outlives_its_kill_keeps_its_jobs(sim: Simulation) -> None:
    # law 8
    policy = Retries(1, delay=0)
    task = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    worker = sim.worker(concurrency=1)
    worker.processes[0].outlives_kill = True
    undead, job = worker.processes[0], task.enqueue()
    sim.run_for(60.0)
    assert undead.killed
    assert len(sim.starts(job)) == 1
    other = sim.task("other").enqueue()
    sim.until_succeeded(other)
    undead.die_at_last()
    sim.until(lambda: len(sim.starts(job)) == 2)


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
