"""Jobs that may have broken their process or their worker run alone (law 6)."""

from __future__ import annotations

import itertools

import pytest
from simulator import Simulation

from tidemill import Retries, State

SOON = Retries(3, delay=0)


def test_the_suspects_of_a_broken_process_run_alone(sim: Simulation) -> None:
    # law 6
    guilty = sim.task("guilty", seconds=2.0, breaks=True, retries=SOON).enqueue()
    innocent = sim.task("innocent", seconds=10.0).enqueue()
    sim.worker(concurrency=2)
    sim.until_succeeded(innocent)
    sim.until(lambda: guilty.state is State.FAILED)
    assert innocent.refresh().attempt == 1
    assert len(sim.starts(innocent)) <= 2
    # and the trail has the run that the other job broke (case M6)
    said = [event.detail for event in innocent.trail if event.what == "interrupted"]
    assert said[0].endswith("the job runs alone next")


def test_a_suspect_has_a_process_of_its_own_beside_the_others(sim: Simulation) -> None:
    # law 6
    sim.task("guilty", seconds=2.0, breaks=True, again={"seconds": 30.0}).enqueue()
    innocent = sim.task("innocent", seconds=30.0).enqueue()
    worker = sim.worker(concurrency=2)
    sim.until(lambda: len(sim.runs(innocent)) == 2 or len(worker.processes) == 2)
    sim.run_for(5.0)
    others = [sim.task("other", seconds=0.1).enqueue() for _ in range(10)]
    began = sim.now
    # then other jobs go on meanwhile, and two suspects never run at one time
    assert sim.until_succeeded(*others) - began <= 5.0
    alone = [run for run in sim.runs() if run.began > 1003.0 and run.how.seconds == 30.0]
    sim.until_succeeded(innocent)
    alone = [run for run in sim.runs() if run.how.seconds == 30.0][-2:]
    assert alone[0].ended <= alone[1].began
    # and the extra process goes when it is no longer needed
    sim.run_for(10.0)
    assert len(worker.processes) == 1


def test_a_single_slot_runs_a_suspect_when_it_is_empty(sim: Simulation) -> None:
    # law 6
    job = sim.task("long", seconds=5.0).enqueue()
    others = [sim.task("other", seconds=1.0).enqueue() for _ in range(3)]
    first = sim.worker(concurrency=1)
    first.kill(witness=False)
    second = sim.worker(concurrency=1)
    sim.until_succeeded(job, *others)
    assert second.started == 1
    assert sim.overlaps() == []
    runs = sorted(sim.runs(), key=lambda run: run.began)[1:]
    assert all(one.ended <= other.began for one, other in itertools.pairwise(runs))
    assert job.refresh().losses == 1


@pytest.mark.parametrize(("processes", "slots"), [(1, 1), (1, 3), (2, 2)])
def test_the_culprit_alone_fails(sim: Simulation, processes: int, slots: int) -> None:
    # law 6: the culprit takes everything with it, and leaves no witness
    innocent = sim.task("innocent", seconds=1.0, retries=2)
    before = [innocent.enqueue() for _ in range(3)]
    culprit = sim.task("culprit", seconds=1000.0, retries=2).enqueue()
    after = [innocent.enqueue() for _ in range(6)]
    downs = 0
    while not culprit.state.finished:
        worker = sim.worker(processes=processes, concurrency=slots)
        seen = len(sim.runs(culprit))
        if sim.runs(culprit) and sim.runs(culprit)[-1].process not in worker.processes:
            sim.until(lambda seen=seen: len(sim.runs(culprit)) > seen)
        else:
            sim.until(lambda: sim.runs(culprit))
        worker.kill(witness=False)
        downs += 1
        sim.run_for(1.0)
    assert downs == 3
    assert (culprit.refresh().state, culprit.refresh().losses) == (State.FAILED, 3)
    sim.worker(processes=processes, concurrency=slots)
    sim.until_succeeded(*before, *after)
    assert all(job.refresh().losses <= 1 for job in (*before, *after))


def test_a_lost_job_holds_up_nobody(sim: Simulation) -> None:
    # law 6
    lost = [sim.task("lost", seconds=60.0).enqueue() for _ in range(2)]
    sim.worker(concurrency=4).kill(witness=False)
    worker = sim.worker(concurrency=2)
    sim.until(lambda: len(sim.runs()) == 3)
    others = [sim.task("other").enqueue() for _ in range(6)]
    began = sim.now
    assert sim.until_succeeded(*others) - began <= 3.0
    assert [job.refresh().state for job in lost] == [State.RUNNING, State.READY]
    sim.until_succeeded(*lost)
    one, two = (sim.runs(job)[-1] for job in lost)
    assert one.process is two.process
    assert all(sim.runs(other)[0].process is not one.process for other in others)
    sim.run_for(10.0)
    assert len(worker.processes) == 1


def test_a_suspect_that_breaks_its_process_again_has_used_an_attempt(sim: Simulation) -> None:
    # law 6
    guilty = sim.task("guilty", seconds=1.0, breaks=True, retries=Retries(1, delay=0)).enqueue()
    sim.task("innocent", seconds=10.0).enqueue()
    sim.worker(concurrency=2)
    sim.until(lambda: guilty.state is State.FAILED)
    assert len(sim.runs(guilty)) == 3  # the first one, with a neighbour, counts no attempt
    assert guilty.refresh().attempt == 2


def test_a_job_that_breaks_its_process_alone_has_used_an_attempt_at_once(sim: Simulation) -> None:
    # law 6
    guilty = sim.task("guilty", seconds=1.0, breaks=True, retries=Retries(1, delay=0)).enqueue()
    sim.worker(concurrency=2)
    sim.until(lambda: guilty.state is State.FAILED)
    assert len(sim.runs(guilty)) == 2


def test_a_cancelled_suspect_does_not_run_again(sim: Simulation) -> None:
    # law 14
    sim.task("guilty", seconds=1.0, breaks=True, again={"seconds": 100.0}).enqueue()
    innocent = sim.task("innocent", seconds=10.0).enqueue()
    sim.worker(concurrency=2)
    sim.until(lambda: sim.said("runs alone next"))
    sim.run_for(5.0)
    waiting = [job for job in sim.mill.jobs() if len(sim.runs(job)) == 1]
    for job in waiting:
        job.cancel()
    sim.run_for(30.0)
    assert [job.state for job in waiting] == [State.CANCELLED]
    assert [len(sim.runs(job)) for job in waiting] == [1]
    assert innocent.refresh().attempt <= 1


def test_suspects_go_back_uncounted_when_the_worker_stops(sim: Simulation) -> None:
    # case T11
    guilty = sim.task("guilty", seconds=1.0, breaks=True, again={"seconds": 100.0}).enqueue()
    innocent = sim.task("innocent", seconds=10.0, again={"seconds": 100.0}).enqueue()
    worker = sim.worker(concurrency=2, shutdown_timeout=3.0)
    sim.until(lambda: sim.said("runs alone next"))
    sim.run_for(2.0)
    worker.signal(15)
    assert worker.until_ended() == 1
    assert [job.refresh().attempt for job in (guilty, innocent)] == [0, 0]
    assert [job.state for job in (guilty, innocent)] == [State.READY, State.READY]


def test_a_suspect_runs_soon_after_its_process_could_not_start(sim: Simulation) -> None:
    # law 6
    job = sim.task("long", seconds=5.0).enqueue()
    first, second = sim.worker(concurrency=2), sim.worker(concurrency=2)
    lost = sim.now
    second.cannot_start_processes(10.0)
    first.kill(witness=False)
    sim.run_for(9.0)
    assert second.started == 1
    assert sim.until_succeeded(job) - lost <= 18.0


def test_a_suspect_that_comes_after_the_order_to_stop_starts_no_process(sim: Simulation) -> None:
    # case T11
    job = sim.task("long", seconds=5.0).enqueue()
    first, second = sim.worker(concurrency=2), sim.worker(concurrency=2)
    first.kill(witness=False)
    sim.run_for(0.4)
    sim.store.answer_late(3.0)
    sim.run_for(1.0)
    second.signal(15)
    assert second.until_ended() == 0
    assert second.started == 1
    assert (job.refresh().state, job.refresh().losses) == (State.READY, 1)
