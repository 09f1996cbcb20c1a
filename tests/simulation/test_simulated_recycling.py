"""Processes are replaced: after some jobs, for new code, and for too much memory."""

from __future__ import annotations

import signal

from simulator import FOREVER, Simulation


def test_a_process_is_replaced_after_its_number_of_jobs(sim: Simulation) -> None:
    # case T8
    jobs = [sim.task(f"job-{n}", result=n).enqueue() for n in range(5)]
    worker = sim.worker(concurrency=1, max_jobs=2)
    sim.until_succeeded(*jobs)
    assert [job.result(timeout=0) for job in jobs] == list(range(5))
    sim.run_for(5.0)
    assert worker.started == 3
    assert len({run.process.pid for run in sim.runs()}) == 3


def test_a_process_with_too_much_memory_is_replaced_after_its_job(sim: Simulation) -> None:
    # case T8
    job = sim.task("grows", result="kept", grows=True).enqueue()
    worker = sim.worker(concurrency=1, max_memory=1 << 20)
    sim.until(lambda: worker.started == 2)
    assert job.result(timeout=0) == "kept"


def test_a_reload_starts_the_new_code_before_the_old_one_ends(sim: Simulation) -> None:
    long = sim.task("long", seconds=100.0).enqueue()
    worker = sim.worker(concurrency=2)
    old = worker.processes[0]
    worker.signal(signal.SIGHUP)
    sim.until(lambda: worker.started == 2)
    assert not old.quiet
    job = sim.task("quick").enqueue()
    sim.until_succeeded(job)
    sim.until(lambda: old.quiet)
    sim.until_succeeded(long)
    sim.run_for(5.0)
    assert old.returncode == 0
    assert worker.started == 2


def test_a_reload_of_broken_code_keeps_the_old_processes(sim: Simulation) -> None:
    worker = sim.worker(processes=2)
    sim.app.error = "SyntaxError: invalid syntax"
    worker.signal(signal.SIGHUP)
    sim.run_for(60.0)
    job = sim.task("quick").enqueue()
    sim.until_succeeded(job)
    assert sim.said("the processes with the old code keep running")


def test_a_process_that_does_not_end_by_itself_is_killed(sim: Simulation) -> None:
    sim.task("hangs", keeps_process=True).enqueue()
    worker = sim.worker(concurrency=1, max_jobs=1, shutdown_timeout=30.0)
    first = sim.processes[0]
    sim.until(lambda: first.returncode is not None)
    assert first.killed
    assert len(worker.processes) == 1


def test_replaced_processes_never_run_more_than_twice_the_slots(sim: Simulation) -> None:
    task = sim.task("long", seconds=FOREVER)
    worker = sim.worker(processes=1, concurrency=2)
    for _ in range(6):
        task.enqueue()
        worker.signal(signal.SIGHUP)
        sim.run_for(10.0)
    assert sum(len(process.runs) for process in worker.processes) <= 4
