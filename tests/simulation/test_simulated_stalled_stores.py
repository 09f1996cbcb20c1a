"""A store that stalls, is away or is full delays no timeout and loses no verdict."""

from __future__ import annotations

import signal

import pytest
from simulator import FOREVER, Simulation

from tidemill import Retries, State


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


@pytest.mark.parametrize(
    ("trouble", "end"), [("be_away", "the broker is back"), ("be_full", "the store has room again")]
)
def test_verdicts_wait_for_a_store_in_trouble(sim: Simulation, trouble: str, end: str) -> None:
    # laws 3, 16
    job = sim.task("quick", seconds=5.0).enqueue()
    sim.worker()
    getattr(sim.store, trouble)(60.0)
    sim.run_for(59.0)
    assert job.refresh().state is State.RUNNING
    sim.until_succeeded(job)
    assert len(sim.starts(job)) == 1
    assert sim.said(end) == 1


def test_a_held_lock_is_found_while_the_store_stalls(sim: Simulation) -> None:
    # law 8
    task = sim.task("holds", seconds=FOREVER, holds_lock=True, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2)
    job, process = task.enqueue(), worker.processes[0]
    sim.until(lambda: sim.runs(job))
    sim.store.stall(60.0)
    sim.task("other").enqueue()
    sim.until(lambda: process.returncode is not None)
    assert sim.now - sim.starts(job)[0] <= 3.0
    assert worker.started == 2
    sim.until(lambda: job.state is State.FAILED)
    (attempt,) = job.attempts
    assert attempt.ended - attempt.started <= 2.0


def test_a_held_retry_is_given_free_when_the_store_answers(sim: Simulation) -> None:
    # law 8
    task = sim.task(
        "stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=Retries(1, delay=0)
    )
    sim.worker(concurrency=2)
    job = task.enqueue()
    sim.until(lambda: sim.runs(job))
    sim.store.stall(30.0)
    sim.task("other").enqueue()
    sim.until(lambda: job.state is State.FAILED)
    assert job.refresh().attempt == 2
    assert sim.overlaps() == []


def test_jobs_that_end_while_the_store_stalls_are_settled_once(sim: Simulation) -> None:
    # law 3
    brief = [sim.task("brief", seconds=2.0 + n, timeout=7.0).enqueue() for n in range(4)]
    worker = sim.worker(concurrency=4)
    sim.store.stall(30.0)
    sim.task("other").enqueue()
    sim.until_succeeded(*brief)
    assert all(len(sim.runs(job)) == 1 for job in brief)
    assert worker.started == 1


@pytest.mark.parametrize("trouble", ["be_away", "be_full", "stall"])
def test_many_verdicts_of_a_time_of_trouble_are_all_stored(sim: Simulation, trouble: str) -> None:
    # laws 3, 16
    task = sim.task("quick", seconds=0.5)
    jobs = [task.enqueue() for _ in range(60)]
    sim.worker(concurrency=8)
    for _ in range(5):
        getattr(sim.store, trouble)(4.0)
        sim.run_for(5.0)
    sim.until_succeeded(*jobs)
    assert all(len(sim.runs(job)) == 1 for job in jobs)
    (row,) = sim.mill.queues()
    assert (row.succeeded, row.size) == (60, 0)


def test_a_full_store_takes_verdicts_in_parts(sim: Simulation) -> None:
    # law 16
    jobs = [sim.task("quick", seconds=5.0).enqueue() for _ in range(16)]
    sim.worker(concurrency=17)
    sim.store.stall(10.0)
    sim.task("wakes the worker").enqueue()
    sim.store.be_full(1000.0, room=3)
    steps = sim.store.steps
    sim.until_succeeded(*jobs)
    assert sim.now <= 1020.0
    assert sim.store.steps - steps <= 30


def test_a_full_store_gets_few_steps_a_second(sim: Simulation) -> None:
    # law 16
    jobs = [sim.task("quick", seconds=5.0).enqueue() for _ in range(50)]
    sim.worker(concurrency=50)
    sim.store.be_full(60.0)
    sim.run_for(10.0)
    steps = sim.store.steps
    sim.run_for(40.0)
    assert sim.store.steps - steps <= 400
    assert sim.said("the store has no room") <= 2
    sim.until_succeeded(*jobs)
    assert sim.said("the store has room again") == 1


def test_a_worker_leases_nothing_in_advance_after_a_full_store(sim: Simulation) -> None:
    # law 16
    job = sim.task("quick", seconds=5.0).enqueue()
    sim.worker(concurrency=2)
    sim.store.be_full(20.0)
    sim.run_for(25.0)
    sim.until_succeeded(job)
    task = sim.task("long", seconds=10.0)
    for _ in range(10):
        task.enqueue()
    sim.run_for(0.02)
    assert sim.states()["running"] == 2


def test_a_verdict_that_cannot_be_stored_in_a_full_store_holds_up_nobody(sim: Simulation) -> None:
    # law 16
    bad = sim.task("bad", seconds=2.0).enqueue()
    good = [sim.task("good", seconds=2.0).enqueue() for _ in range(5)]
    sim.store.poison(bad)
    sim.store.be_full(1000.0, room=2)
    sim.cold_worker(concurrency=6)
    sim.store.be_full(0.0)
    sim.until(lambda: len(sim.runs()) == 6)
    sim.store.be_full(1000.0, room=2)
    sim.until_succeeded(*good)
    sim.until(lambda: bad.state is State.FAILED)


def test_lines_of_a_job_are_kept_while_the_store_is_away(sim: Simulation) -> None:
    # law 3
    task = sim.task("says", seconds=5.0, says="at page 7")
    sim.worker()
    sim.store.answer_late(1.0)
    job = task.enqueue()
    sim.until(lambda: sim.runs(job))
    sim.store.be_away(20.0)
    sim.until_succeeded(job)
    assert [line for _, line in job.record.log] == ["at page 7"]


def test_lines_of_a_job_are_stored_beside_a_verdict_that_cannot_be(sim: Simulation) -> None:
    # law 16
    bad = sim.task("bad", seconds=2.0)
    says = sim.task("says", seconds=2.0, says="at page 7")
    sim.worker(concurrency=2)
    job = bad.enqueue()
    sim.store.poison(job)
    sim.run_for(2.0)
    other = says.enqueue()
    sim.until_succeeded(other)
    assert [line for _, line in other.record.log] == ["at page 7"]
    # and that job fails alone, soon
    sim.until(lambda: job.state is State.FAILED)
    assert "the outcome of the job could not be stored" in job.refresh().error
    assert sim.now <= 1010.0


def test_a_store_that_is_away_gets_one_step_a_second(sim: Simulation) -> None:
    sim.task("quick", seconds=5.0).enqueue()
    sim.worker()
    steps = sim.store.steps
    sim.store.be_away(100.0)
    sim.run_for(100.0)
    assert sim.store.steps == steps
    assert sim.said("the store does not answer; trying again") == 1


def test_a_cancellation_that_comes_in_a_time_of_trouble_is_carried_out(sim: Simulation) -> None:
    # law 14
    long = sim.task("long", seconds=100.0, heeds_cancel=True).enqueue()
    sim.worker(concurrency=2)
    sim.store.be_away(20.0)
    asked = sim.now
    long.cancel()
    sim.until(lambda: long.state is State.CANCELLED)
    assert sim.now - asked <= 22.0


def test_a_cancellation_in_the_answer_to_a_part_of_a_step_counts(sim: Simulation) -> None:
    # law 14
    quick = [sim.task("quick", seconds=5.0).enqueue() for _ in range(4)]
    long = sim.task("long", seconds=100.0, heeds_cancel=True).enqueue()
    sim.worker(concurrency=5)
    sim.store.be_full(60.0, room=1)
    sim.until(lambda: all(sim.runs(job)[0].over for job in quick))
    long.cancel()
    asked = sim.now
    sim.until(lambda: sim.runs(long)[0].over)
    assert sim.now - asked <= 3.0
    sim.until_succeeded(*quick)


def test_jobs_of_a_worker_that_was_given_up_run_elsewhere(sim: Simulation) -> None:
    # laws 4, 5
    job = sim.task("long", seconds=30.0, heeds_cancel=True, again={"seconds": 1.0}).enqueue()
    first = sim.worker(concurrency=1)
    second = sim.worker(concurrency=1)
    first.give_up()
    sim.until_succeeded(job)
    assert sim.said("begins anew") == 1
    sim.until(lambda: sim.runs(job)[0].over)
    assert job.refresh().attempt == 1
    assert {first.started, second.started} <= {1, 2}


def test_a_waiting_job_of_a_worker_that_was_given_up_runs_once(sim: Simulation) -> None:
    # law 4
    long = sim.task("long", seconds=20.0, heeds_cancel=True)
    worker = sim.worker(concurrency=1)
    long.enqueue()
    waiting = [sim.task("waiting").enqueue() for _ in range(3)]
    sim.run_for(0.01)
    worker.give_up()
    sim.until_succeeded(*waiting)
    assert all(len(sim.runs(job)) == 1 for job in waiting)


def test_verdicts_of_lost_leases_change_nothing(sim: Simulation) -> None:
    # law 4
    job = sim.task("long", seconds=10.0, result="late", again={"seconds": 30.0, "result": "new"})
    job = job.enqueue()
    worker = sim.worker(concurrency=2)
    sim.run_for(1.0)
    worker.give_up()
    sim.run_for(15.0)
    assert sim.runs(job)[0].over
    assert job.refresh().state is State.RUNNING
    sim.until_succeeded(job)
    assert job.result(timeout=0) == "new"


def test_a_stuck_run_ends_although_its_lease_is_lost(sim: Simulation) -> None:
    # laws 4, 8
    task = sim.task("stuck", seconds=FOREVER, holds_lock=True, timeout=8.0, again={"seconds": 1.0})
    job = task.enqueue()
    worker = sim.worker(concurrency=2)
    first = worker.processes[0]
    worker.give_up()
    sim.until_succeeded(job)
    sim.run_for(10.0)
    assert first.killed
    assert job.refresh().attempt == 1
    assert job.refresh().losses == 1


def test_a_worker_that_was_given_up_while_a_job_is_stuck_begins_anew(sim: Simulation) -> None:
    # laws 4, 8
    sim.task("long", seconds=20.0, heeds_cancel=True, again={"seconds": 0.1}).enqueue()
    task = sim.task(
        "stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=1, again={"seconds": 0.1}
    )
    worker = sim.worker(concurrency=2, stuck_grace=60.0)
    job = task.enqueue()
    sim.until(lambda: job.attempts)
    worker.give_up()
    sim.until_succeeded(job)
    sim.run_for(10.0)
    assert len(worker.processes) == 1


def test_a_worker_that_is_given_up_again_and_again_goes_on(sim: Simulation) -> None:
    # law 4
    worker = sim.worker(concurrency=2)
    for _ in range(5):
        job = sim.task("quick", seconds=2.0).enqueue()
        sim.run_for(0.5)
        worker.give_up()
    sim.until_succeeded(job)
    assert sim.said("begins anew") == 5


def test_a_worker_that_is_given_up_while_its_store_is_away_begins_anew(sim: Simulation) -> None:
    # law 4
    job = sim.task("quick", seconds=2.0).enqueue()
    worker = sim.worker()
    sim.store.be_away(30.0)
    worker.give_up()
    sim.until_succeeded(job)
    assert sim.said("begins anew") >= 1


def test_many_troubles_at_once(sim: Simulation) -> None:
    # laws 3, 8; case T11
    policy = Retries(1, delay=0)
    stuck = sim.task("stuck", seconds=FOREVER, ignores=True, timeout=1.0, retries=policy)
    quick = sim.task("quick", seconds=3.0)
    worker = sim.worker(concurrency=3, shutdown_timeout=30.0, stuck_grace=60.0)
    jobs = [quick.enqueue(), quick.enqueue()]
    held = stuck.enqueue()
    sim.until(lambda: sim.runs(held))
    sim.store.stall(10.0)
    worker.signal(signal.SIGHUP)
    sim.run_for(2.0)
    worker.processes[-1].die(9)
    sim.run_for(1.0)
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    sim.until(lambda: all(job.state.finished for job in jobs))
    assert [job.refresh().attempt for job in jobs] == [1, 1]
    assert held.refresh().attempt == 1
    assert sim.overlaps() == []
