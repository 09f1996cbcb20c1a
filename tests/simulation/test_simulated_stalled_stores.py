"""A store that stalls, is away or is full delays no timeout and loses no verdict."""

from __future__ import annotations

from simulator import FOREVER, Simulation

from tidemill import State


def test_a_timeout_ends_its_process_while_the_store_stalls(sim: Simulation) -> None:
    # law 8
    task = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=1)
    job = task.enqueue()
    sim.until(lambda: sim.starts(job))
    began, process = sim.now, worker.processes[0]
    sim.store.stall(60.0)
    sim.task("other").enqueue()  # wakes the worker, whose next step stalls
    sim.until(lambda: process.returncode is not None)
    assert sim.now - began <= 3.0
    sim.until(lambda: job.state is State.FAILED)
    assert job.refresh().finished - job.attempts[0].started >= 1.0


def test_verdicts_wait_for_a_store_that_is_away(sim: Simulation) -> None:
    # law 3
    job = sim.task("quick", seconds=5.0).enqueue()
    sim.worker()
    sim.store.be_away(60.0)
    sim.run_for(59.0)
    assert job.refresh().state is State.RUNNING
    sim.until_succeeded(job)
    assert len(sim.starts(job)) == 1
    assert sim.said("the broker is back") == 1


def test_verdicts_wait_for_a_store_that_is_full(sim: Simulation) -> None:
    # law 16
    job = sim.task("quick", seconds=5.0).enqueue()
    sim.worker()
    sim.store.be_full(60.0)
    sim.run_for(59.0)
    assert job.refresh().state is State.RUNNING
    sim.until_succeeded(job)
    assert len(sim.starts(job)) == 1


def test_a_worker_that_was_given_up_begins_anew(sim: Simulation) -> None:
    # law 4
    job = sim.task("long", seconds=30.0, heeds_cancel=True).enqueue()
    worker = sim.worker()
    worker.give_up()
    sim.until(lambda: len(sim.starts(job)) == 2)
    sim.until_succeeded(job)
    assert job.refresh().attempt == 1
