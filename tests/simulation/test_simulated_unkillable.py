"""A process that outlives SIGKILL holds up nobody else, and not the end of its worker (law 8)."""

from __future__ import annotations

import signal

from simulator import FOREVER, Simulation

from tidemill import Retries, State

SOON = Retries(1, delay=0)
IN_A_CALL = {"seconds": FOREVER, "ignores": True}


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


def test_jobs_that_had_not_started_go_back_from_a_process_that_does_not_die(
    sim: Simulation,
) -> None:
    # law 8
    stuck = sim.task("stuck", **IN_A_CALL, timeout=1.0, retries=SOON)
    worker = sim.worker(concurrency=1)
    worker.processes[0].outlives_kill = True
    job = stuck.enqueue()
    waiting = [sim.task("waiting").enqueue() for _ in range(3)]
    sim.until_succeeded(*waiting)
    assert job.refresh().state is State.RUNNING
    assert all(other.refresh().attempt == 1 for other in waiting)


def test_started_jobs_stay_held_until_the_process_is_gone(sim: Simulation) -> None:
    # law 8
    neighbour = sim.task("waits", seconds=FOREVER, again={"seconds": 1.0}).enqueue()
    stuck = sim.task("stuck", **IN_A_CALL, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2, stuck_grace=2.0)
    worker.processes[0].outlives_kill = True
    undead = worker.processes[0]
    stuck.enqueue()
    sim.run_for(200.0)
    # then the log says so once a minute
    assert 3 <= sim.said("does not die of SIGKILL: 2 job(s) are held") <= 4
    assert len(sim.runs(neighbour)) == 1
    undead.die_at_last()
    sim.until_succeeded(neighbour)
    assert neighbour.refresh().attempt == 1
    assert sim.overlaps() == []


def test_a_worker_ends_without_a_process_that_does_not_die(sim: Simulation) -> None:
    # case T11
    stuck = sim.task("stuck", **IN_A_CALL, timeout=1.0, retries=SOON)
    worker = sim.worker(concurrency=2, shutdown_timeout=5.0)
    worker.processes[0].outlives_kill = True
    job = stuck.enqueue()
    sim.until(lambda: sim.said("does not die"))
    told = sim.now
    worker.signal(signal.SIGTERM)
    worker.until_ended()
    assert sim.now - told <= 12.0
    assert job.refresh().state is State.READY


def test_the_end_waits_five_seconds_for_a_process_that_does_not_die(sim: Simulation) -> None:
    # case T11
    job = sim.task("hangs", **IN_A_CALL).enqueue()
    worker = sim.worker(concurrency=2, shutdown_timeout=5.0)
    worker.processes[0].outlives_kill = True
    told = sim.now
    worker.signal(signal.SIGTERM)
    assert worker.until_ended() == 1
    assert sim.now - told <= 20.0
    assert sim.said("it is left behind") == 1
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 0)


def test_another_process_serves_beside_one_that_does_not_die(sim: Simulation) -> None:
    # law 8
    stuck = sim.task("stuck", **IN_A_CALL, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=1)
    worker.processes[0].outlives_kill = True
    stuck.enqueue()
    sim.run_for(300.0)
    assert worker.started == 2
    steps = sim.store.steps
    sim.run_for(100.0)
    assert sim.store.steps - steps <= 10


def test_a_worker_sleeps_beside_an_undying_process_with_an_overdue_job(sim: Simulation) -> None:
    # law 8
    neighbour = sim.task("hangs", **IN_A_CALL, again={"seconds": 1.0}, timeout=30.0).enqueue()
    stuck = sim.task("stuck", **IN_A_CALL, timeout=1.0, retries=0)
    worker = sim.worker(concurrency=2, stuck_grace=2.0)
    worker.processes[0].outlives_kill = True
    undead = worker.processes[0]
    stuck.enqueue()
    sim.run_for(100.0)
    assert undead.returncode is None
    assert len(sim.runs(neighbour)) == 1
    undead.die_at_last()
    sim.until_succeeded(neighbour)
