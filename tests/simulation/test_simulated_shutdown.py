"""Signals end a worker; its jobs finish, or go back uncounted (law 6, case T11)."""

from __future__ import annotations

import io
import signal
import sys

import pytest
from simulator import FOREVER, Simulation, simulation

from tidemill import Retries, State


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


def test_quit_stops_at_once_and_gives_jobs_back(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=50.0).enqueue()
    worker = sim.worker()
    told = sim.now
    worker.signal(signal.SIGQUIT)
    assert worker.until_ended() == 1
    assert sim.now - told <= 1.0
    assert (job.state, job.refresh().attempt) == (State.READY, 0)


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
    assert worker.until_ended() == 1
    assert sim.now - told <= 20.0
    assert not job.state.finished


def test_a_second_signal_while_the_store_stalls_stops_now(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=FOREVER, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=300.0)
    process = worker.processes[0]
    sim.store.stall(12.0)
    sim.task("another").enqueue()
    worker.signal(signal.SIGTERM)
    sim.run_for(5.0)
    told = sim.now
    worker.signal(signal.SIGINT)
    sim.until(lambda: process.returncode is not None)
    assert sim.now - told <= 1.0
    worker.until_ended()
    sim.run_for(20.0)
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 0)


def test_an_order_to_stop_is_one_however_slowly_it_is_taken(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    worker.pause(5.0)
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGINT)
    assert worker.until_ended() == 0
    sim.until_succeeded(job)


def test_signals_at_once_are_one_order_and_a_later_one_stops_now(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=20.0, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    worker.signal(signal.SIGTERM)
    sim.run_for(0.1)
    worker.signal(signal.SIGINT)
    sim.run_for(5.0)
    assert not worker.ended
    worker.signal(signal.SIGINT)
    assert worker.until_ended() == 1
    assert job.refresh().attempt == 0


def test_the_trail_of_an_interrupted_job_says_why(sim: Simulation) -> None:
    # case T11
    job = sim.task("blocked", seconds=FOREVER, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=3.0)
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    (said,) = [event.detail for event in job.trail if event.what == "interrupted"]
    assert said.endswith(" s: its worker was stopped")


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_stops_while_its_app_loads(sim: Simulation, order: int) -> None:
    # case T11
    sim.app.boot = 1000.0
    worker = sim.cold_worker()
    sim.run_for(5.0)
    told = sim.now
    worker.signal(order)
    assert worker.until_ended() == 0
    assert sim.now - told <= 1.0
    assert worker.processes == []


def test_a_process_that_dies_while_the_first_app_loads_ends_the_worker(sim: Simulation) -> None:
    # case T11
    sim.app.dies = 11
    assert sim.cold_worker().until_ended() == 2
    assert sim.said("could not be loaded: worker process 900000000 was killed by SIGSEGV") == 1


def test_a_first_process_that_is_killed_while_the_app_loads_is_replaced(sim: Simulation) -> None:
    # case T11
    sim.app.boot = 5.0
    worker = sim.cold_worker(processes=2)
    sim.run_for(1.0)
    worker.processes[0].die(9)
    sim.until(lambda: sim.said("while it loaded the app; another starts"))
    sim.until_succeeded(sim.task("quick").enqueue())
    sim.run_for(10.0)
    assert worker.started == 3
    assert len(worker.processes) == 2


def test_a_worker_ends_whose_first_processes_are_all_killed(sim: Simulation) -> None:
    # case T11
    sim.app.dies = 9
    worker = sim.cold_worker()
    assert worker.until_ended() == 2
    assert worker.started == 3
    assert sim.said("could not be loaded: worker process") == 1


def test_a_worker_can_be_stopped_before_its_next_first_process(sim: Simulation) -> None:
    # case T11
    sim.app.dies = 9
    worker = sim.cold_worker()
    sim.until(lambda: sim.said("another starts"))
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 0
    assert worker.started == 1


def test_a_store_that_is_away_at_the_start_has_an_exit_code_of_its_own(sim: Simulation) -> None:
    # case T11
    sim.store.be_away(60.0)
    assert sim.cold_worker().until_ended() == 3


def test_a_worker_whose_app_declares_no_task_says_so(sim: Simulation) -> None:
    sim.cold_worker().until_serving()
    assert sim.said("declares no task") == 1


def test_a_replacement_that_still_loads_ends_with_the_worker(sim: Simulation) -> None:
    # case T11
    worker = sim.worker(shutdown_timeout=30.0)
    sim.app.boot = 1000.0
    worker.processes[0].die(9)
    sim.run_for(5.0)
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 0
    assert sim.now - told <= 32.0


def test_term_overrides_the_grace_of_a_stuck_process(sim: Simulation) -> None:
    # case T11
    neighbour = sim.task("last", seconds=FOREVER, ignores=True, retries=0).enqueue()
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2, shutdown_timeout=5.0, stuck_grace=1000.0)
    job = stuck.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert sim.now - told <= 7.0
    assert (neighbour.refresh().state, neighbour.refresh().attempt) == (State.READY, 0)


def test_a_stuck_job_whose_retry_is_held_goes_back_at_the_end(sim: Simulation) -> None:
    # case T11
    neighbour = sim.task("long", seconds=20.0).enqueue()
    policy = Retries(1, delay=0)
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    worker = sim.worker(concurrency=2, shutdown_timeout=30.0, stuck_grace=1000.0)
    job = stuck.enqueue()
    sim.until(lambda: job.attempts)
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 1)
    sim.until_succeeded(neighbour)


def test_a_stuck_process_a_stalled_store_and_an_end_at_once(sim: Simulation) -> None:
    # law 8, case T11
    policy = Retries(1, delay=0)
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    worker = sim.worker(concurrency=2, shutdown_timeout=5.0)
    process, job = worker.processes[0], stuck.enqueue()
    sim.until(lambda: sim.runs(job))
    sim.store.stall(8.0)
    sim.task("another").enqueue()
    sim.until(lambda: process.returncode is not None)
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 1)
    assert sim.overlaps() == []


def test_a_job_that_cleans_up_in_its_time_keeps_its_worker_alive(sim: Simulation) -> None:
    # case T11
    job = sim.task("cleans", seconds=FOREVER, cleans_up=4.0).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert not any(process.killed for process in sim.processes)
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 0)


def test_a_timeout_holds_while_a_task_cleans_up(sim: Simulation) -> None:
    # law 8
    job = sim.task("cleans", seconds=FOREVER, cleans_up=60.0, timeout=28.0, retries=0).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    assert job.refresh().state is State.FAILED
    assert "JobTimeout" in job.refresh().error


@pytest.mark.parametrize("trouble", ["stall", "be_away", "be_full"])
def test_outcomes_of_a_store_that_stays_in_trouble_are_lost_and_said(
    sim: Simulation, trouble: str
) -> None:
    # laws 2, 6, 16
    job = sim.task("quick", seconds=2.0, retries=Retries(3, delay=0)).enqueue()
    worker = sim.worker(shutdown_timeout=5.0)
    getattr(sim.store, trouble)(100.0)
    sim.task("other").enqueue()
    sim.run_for(3.0)
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert sim.now - told <= 20.0
    assert sim.said("may run again") == 1
    sim.run_for(100.0)
    sim.worker()
    sim.until_succeeded(job)
    assert job.refresh().attempt == 2  # it was on the scoreboard


def test_a_store_that_is_away_has_ten_seconds_for_the_last_step(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=3.0).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    sim.store.be_away(10.0)
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 0
    assert job.refresh().state is State.SUCCEEDED


def test_the_last_verdicts_are_offered_until_a_full_store_takes_them(sim: Simulation) -> None:
    # law 16
    jobs = [sim.task("quick", seconds=2.0).enqueue() for _ in range(4)]
    worker = sim.worker()
    sim.store.be_full(8.0)
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 0
    assert all(job.refresh().state is State.SUCCEEDED for job in jobs)


def test_an_error_of_the_main_thread_leaves_the_last_step_to_the_loop(sim: Simulation) -> None:
    # laws 2, 6
    ended = sim.task("quick", seconds=5.0).enqueue()
    job = sim.task("long", seconds=50.0).enqueue()
    worker = sim.worker(concurrency=2)
    sim.until(lambda: sim.runs(ended) and sim.runs(job))
    sim.store.be_away(8.0)
    sim.run_for(6.0)
    worker.break_main_thread()
    with pytest.raises(RuntimeError, match="the main thread is broken"):
        worker.until_ended()
    assert ended.refresh().state is State.SUCCEEDED
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 0)
    assert worker.processes == []


@pytest.mark.parametrize("store", ["is away", "stalls"])
def test_an_error_of_the_main_thread_leaves_the_scoreboard_if_no_last_step_is_taken(
    sim: Simulation, store: str
) -> None:
    # laws 2, 6
    job = sim.task("quick", seconds=5.0, retries=Retries(3, delay=0)).enqueue()
    worker = sim.worker()
    sim.until(lambda: sim.runs(job))
    if store == "stalls":
        sim.store.stall(100.0)
    else:
        sim.store.be_away(100.0)
    sim.run_for(6.0)
    worker.break_main_thread()
    assert worker.until_ended() == 1
    assert sim.said("the worker ends by an error of its own") == 1
    sim.run_for(100.0)
    sim.worker()
    sim.until_succeeded(job)
    assert job.refresh().attempt == 2  # it was on the scoreboard


def test_stacks_that_cannot_be_printed_cost_a_log_line(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case T11
    job = sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    worker.signal(signal.SIGUSR1)
    sim.until_succeeded(job)
    assert sim.said("the stacks of this worker cannot be printed") == 1


def test_processes_that_end_slowly_have_the_shutdown_timeout(sim: Simulation) -> None:
    # case T11
    sim.task("quick").enqueue()
    sim.app.stops = 4.0
    worker = sim.worker(shutdown_timeout=30.0)
    sim.run_for(5.0)
    worker.signal(signal.SIGTERM)
    told = sim.now
    assert worker.until_ended() == 0
    assert 4.0 <= sim.now - told <= 6.0
    assert not any(process.killed for process in sim.processes)


def test_processes_that_never_end_are_killed_at_the_shutdown_timeout(sim: Simulation) -> None:
    # case T11
    sim.app.stops = FOREVER
    worker = sim.worker(shutdown_timeout=3.0)
    worker.signal(signal.SIGTERM)
    told = sim.now
    assert worker.until_ended() == 0
    assert sim.now - told <= 5.0
    assert sim.processes[0].killed


@pytest.mark.parametrize(
    ("jobs", "said"), [(0, "no job is running"), (3, "waiting up to 30 s for 3 running jobs")]
)
def test_a_stop_tells_how_many_jobs_it_waits_for(sim: Simulation, jobs: int, said: str) -> None:
    # case T11
    for _ in range(jobs):
        sim.task("long", seconds=5.0).enqueue()
    worker = sim.worker()
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    assert sim.said(f"stopping: {said}") == 1


def test_a_reload_after_the_order_to_stop_starts_nothing(sim: Simulation) -> None:
    # case T11
    sim.task("long", seconds=10.0).enqueue()
    worker = sim.worker()
    worker.signal(signal.SIGTERM)
    sim.run_for(1.0)
    worker.signal(signal.SIGHUP)
    assert worker.until_ended() == 0
    assert worker.started == 1


def test_ctrl_c_is_named_in_the_log(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=FOREVER, ignores=True).enqueue()
    worker = sim.worker(shutdown_timeout=300.0)
    worker.signal(signal.SIGINT)
    sim.run_for(1.0)
    worker.signal(signal.SIGINT)
    worker.until_ended()
    assert sim.said("for 1 running job; Ctrl-C again stops now") == 1
    assert sim.said("stopping now: 1 running job goes back to its queue") == 1
    assert job.refresh().state is State.READY


def test_an_idle_worker_ends_soon_in_whatever_order_its_threads_run() -> None:
    # case T11
    for seed in range(50):
        with simulation() as sim:
            sim.be_random(seed)
            worker = sim.worker(processes=2, shutdown_timeout=30.0)
            told = sim.now
            worker.signal(signal.SIGTERM)
            assert worker.until_ended() == 0, seed
            assert sim.now - told <= 10.0, seed
