"""Signals end a worker; its jobs finish, or go back uncounted (law 6, case T11)."""

from __future__ import annotations

import signal

from simulator import FOREVER, Simulation

from tidemill import State


def test_running_jobs_finish_before_the_worker_ends(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker(concurrency=2, shutdown_timeout=30.0)
    worker.signal(signal.SIGTERM)
    later = sim.task("later").enqueue()
    assert worker.until_ended() == 0
    assert job.state is State.SUCCEEDED
    assert later.state is State.READY


def test_jobs_that_do_not_finish_in_time_go_back_uncounted(sim: Simulation) -> None:
    # case T11
    job = sim.task("blocked", seconds=FOREVER, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert sim.now - told <= 31.0
    assert job.state is State.READY
    assert job.refresh().attempt == 0
    assert worker.processes == []


def test_tasks_are_told_before_the_worker_kills_them(sim: Simulation) -> None:
    job = sim.task("endless", seconds=FOREVER).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert job.state is State.READY
    assert not any(process.killed for process in sim.processes)


def test_a_second_signal_stops_now(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=FOREVER, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=300.0)
    worker.signal(signal.SIGTERM)
    sim.run_for(5.0)
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert sim.now - told <= 1.0
    assert job.state is State.READY


def test_two_signals_at_once_are_one_order(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGINT)
    assert worker.until_ended() == 0
    assert job.state is State.SUCCEEDED


def test_quit_stops_at_once_and_gives_jobs_back(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=50.0).enqueue()
    worker = sim.worker()
    told = sim.now
    worker.signal(signal.SIGQUIT)
    assert worker.until_ended() == 1
    assert sim.now - told <= 1.0
    assert (job.state, job.refresh().attempt) == (State.READY, 0)


def test_a_burst_ends_when_no_job_is_left(sim: Simulation) -> None:
    jobs = [sim.task(f"quick-{n}", seconds=1.0).enqueue() for n in range(20)]
    worker = sim.cold_worker(burst=True, concurrency=4)
    assert worker.until_ended() == 0
    assert all(job.state is State.SUCCEEDED for job in jobs)


def test_an_app_that_cannot_be_loaded_ends_the_worker(sim: Simulation) -> None:
    # case T11
    sim.app.error = "ImportError: no such module"
    assert sim.cold_worker().until_ended() == 2


def test_a_worker_ends_although_its_store_stalls(sim: Simulation) -> None:
    # case T11
    sim.task("quick").enqueue()
    worker = sim.worker(shutdown_timeout=5.0)
    sim.store.stall(1000.0)
    job = sim.task("another", seconds=1.0).enqueue()
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 0
    assert sim.now - told <= 20.0
    assert not job.state.finished
