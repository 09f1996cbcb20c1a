"""Processes are replaced: after some jobs, for new code, and for too much memory."""

from __future__ import annotations

import signal
from collections import Counter

from simulator import FOREVER, Simulation

from tidemill import State


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


def test_no_process_runs_more_than_its_number_of_jobs(sim: Simulation) -> None:
    # case T8
    task = sim.task("quick", seconds=0.3)
    jobs = [task.enqueue() for _ in range(25)]
    worker = sim.worker(processes=2, concurrency=2, max_jobs=3)
    sim.until_succeeded(*jobs)
    count = Counter(run.process.pid for run in sim.runs())
    assert max(count.values()) == 3
    sim.run_for(5.0)
    assert len(worker.processes) == 2
    assert all(job.refresh().attempt == 1 for job in jobs)


def test_a_recycled_process_is_replaced_while_its_last_job_runs(sim: Simulation) -> None:
    # case T8
    long = sim.task("long", seconds=60.0).enqueue()
    worker = sim.worker(concurrency=4, max_jobs=1)
    job = sim.task("quick").enqueue()
    asked = sim.now
    assert sim.until_succeeded(job) - asked <= 2.0
    assert worker.started >= 2
    sim.until_succeeded(long)


def test_jobs_of_replaced_processes_hold_the_next_process_back(sim: Simulation) -> None:
    task = sim.task("long", seconds=30.0)
    worker = sim.worker(concurrency=2, max_jobs=1)
    jobs = [task.enqueue() for _ in range(2)]
    sim.run_for(5.0)
    late = sim.task("quick").enqueue()
    sim.run_for(5.0)
    assert len(worker.processes) == 2
    assert sim.said("take all slots") == 1
    sim.until_succeeded(*jobs, late)
    assert sim.starts(late)[0] >= min(run.ended for job in jobs for run in sim.runs(job))


def test_a_storm_of_reloads_ends_with_the_latest_code(sim: Simulation) -> None:
    worker = sim.worker(processes=2)
    for _ in range(20):
        worker.signal(signal.SIGHUP)
        sim.run_for(0.1)
    sim.app.lacks = {"new"}
    job = sim.task("quick").enqueue()
    sim.until_succeeded(job)
    sim.run_for(30.0)
    assert len(worker.processes) == 2
    assert worker.started <= 2 + 2 * 20


def test_several_reload_signals_at_once_are_one_reload(sim: Simulation) -> None:
    worker = sim.worker(processes=2)
    for _ in range(5):
        worker.signal(signal.SIGHUP)
    sim.run_for(30.0)
    assert worker.started == 4
    assert sim.said("reloading") == 1


def test_a_reload_while_jobs_of_old_processes_take_all_slots_comes_later(sim: Simulation) -> None:
    long = sim.task("long", seconds=20.0)
    jobs = [long.enqueue() for _ in range(2)]
    worker = sim.worker(concurrency=2)
    worker.signal(signal.SIGHUP)
    sim.run_for(2.0)
    worker.signal(signal.SIGHUP)
    sim.run_for(2.0)
    assert worker.started == 2
    assert sim.said("the app is reloaded later") == 1
    sim.until_succeeded(*jobs)
    sim.run_for(5.0)
    assert worker.started == 3
    assert len(worker.processes) == 1


def test_a_reload_that_could_not_start_a_process_is_tried_again(sim: Simulation) -> None:
    worker = sim.worker(processes=2)
    old = worker.processes
    worker.cannot_start_processes(10.0)
    worker.signal(signal.SIGHUP)
    sim.run_for(9.0)
    assert worker.processes == old
    sim.run_for(20.0)
    assert not set(worker.processes) & set(old)
    assert len(worker.processes) == 2


def test_a_reload_brings_tasks_that_the_old_code_lacks(sim: Simulation) -> None:
    # cases T2, C8; law 7
    sim.app.lacks = {"new"}
    job = sim.task("new").enqueue()
    worker = sim.worker(processes=2)
    sim.run_for(5.0)
    assert (job.refresh().state, job.refresh().attempt) == (State.SCHEDULED, 0)
    assert sim.said("no worker knows task 'new'") == 1
    sim.app.lacks = set()
    worker.signal(signal.SIGHUP)
    sim.until_succeeded(job)
    assert len(job.attempts) <= 1


def test_a_process_that_is_told_to_go_is_replaced(sim: Simulation) -> None:
    # case T8
    task = sim.task("quick", seconds=0.05)
    worker = sim.worker(concurrency=2)
    jobs = [task.enqueue() for _ in range(100)]
    for _ in range(3):
        sim.run_for(0.5)
        worker.processes[-1].told_to_go()
    sim.until_succeeded(*jobs)
    assert all(len(sim.runs(job)) == 1 for job in jobs)
    sim.run_for(5.0)
    assert len(worker.processes) == 1


def test_the_waiting_jobs_of_a_leaving_process_go_to_the_others(sim: Simulation) -> None:
    # case T8
    worker = sim.worker(processes=2, concurrency=1)
    first = sim.task("long", seconds=30.0).enqueue()
    sim.run_for(0.2)
    jobs = [sim.task("quick").enqueue() for _ in range(4)]
    sim.run_for(0.01)
    sim.runs(first)[0].process.told_to_go()
    asked = sim.now
    assert sim.until_succeeded(*jobs) - asked <= 2.0
    assert worker.started == 3


def test_processes_that_never_end_are_bounded(sim: Simulation) -> None:
    sim.app.stops = FOREVER
    worker = sim.worker(shutdown_timeout=3600.0)
    for _ in range(14):
        worker.signal(signal.SIGHUP)
        sim.run_for(5.0)
    assert len(worker.processes) <= 10
    killed = [process for process in sim.processes if process.killed]
    assert killed == sim.processes[: len(killed)]
    assert sim.said("is killed: it has not ended") == len(killed) > 0


def test_a_process_that_hangs_as_it_ends_is_killed_after_the_shutdown_timeout(
    sim: Simulation,
) -> None:
    sim.app.stops = FOREVER
    worker = sim.worker(shutdown_timeout=20.0)
    old = worker.processes[0]
    worker.signal(signal.SIGHUP)
    sim.until(lambda: old.killed)
    assert 20.0 <= sim.now - 1001.0 <= 25.0


def test_a_process_that_hangs_as_it_ends_is_killed_while_the_store_stalls(sim: Simulation) -> None:
    sim.app.stops = FOREVER
    sim.task("quick", seconds=5.0).enqueue()
    worker = sim.worker(concurrency=1, max_jobs=1, shutdown_timeout=20.0)
    old = worker.processes[0]
    sim.store.stall(100.0)
    sim.run_for(60.0)
    assert old.killed


def test_a_process_that_cannot_even_begin_to_end_is_killed(sim: Simulation) -> None:
    sim.task("thread", seconds=0.1)
    worker = sim.worker(shutdown_timeout=5.0)
    old = worker.processes[0]
    old.hold_lock()
    worker.signal(signal.SIGHUP)
    sim.until(lambda: old.returncode is not None)
    assert sim.said("is killed: it has not ended") == 1
    job = sim.task("quick").enqueue()
    sim.until_succeeded(job)


def test_a_stuck_process_is_no_obstacle_to_a_reload(sim: Simulation) -> None:
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=0)
    long = sim.task("long", seconds=100.0).enqueue()
    worker = sim.worker(concurrency=2, stuck_grace=200.0)
    job = stuck.enqueue()
    sim.until(lambda: job.state is State.FAILED)
    worker.signal(signal.SIGHUP)
    sim.run_for(10.0)
    other = sim.task("quick").enqueue()
    sim.until_succeeded(other, long)
    sim.run_for(60.0)
    assert len(worker.processes) == 1


def test_a_broken_reload_and_a_good_one_leave_the_new_code_alone(sim: Simulation) -> None:
    worker = sim.worker(processes=2)
    old = worker.processes
    sim.app.error = "SyntaxError: invalid syntax"
    worker.signal(signal.SIGHUP)
    sim.run_for(10.0)
    assert worker.processes == old
    assert sim.said("the processes with the old code keep running")
    sim.until_succeeded(sim.task("quick").enqueue())
    sim.app.error = ""
    worker.signal(signal.SIGHUP)
    sim.run_for(10.0)
    assert len(worker.processes) == 2
    assert not set(worker.processes) & set(old)


def test_a_worker_that_waits_for_itself_says_so(sim: Simulation) -> None:
    child = sim.task("child", retries=0)
    parent = sim.task("parent", awaits=child, retries=0)
    sim.worker(concurrency=2)
    jobs = [parent.enqueue() for _ in range(2)]
    sim.until(lambda: all(job.state.finished for job in jobs))
    assert sorted(str(job.state) for job in jobs) == ["failed", "succeeded"]
    (failed,) = [job for job in jobs if job.state is State.FAILED]
    assert "would wait for job" in failed.refresh().error


def test_waiting_for_a_job_is_no_trouble_beside_another_worker(sim: Simulation) -> None:
    child = sim.task("child", retries=0, queue="children")
    parent = sim.task("parent", awaits=child, retries=0)
    sim.worker(concurrency=1, queues=("default",))
    sim.worker(concurrency=1)
    sim.until_succeeded(parent.enqueue())


def test_waiting_jobs_of_all_processes_count(sim: Simulation) -> None:
    child = sim.task("child", retries=0)
    parent = sim.task("parent", awaits=child, retries=0)
    sim.worker(processes=2, concurrency=1)
    job = parent.enqueue()
    sim.until_succeeded(job)
