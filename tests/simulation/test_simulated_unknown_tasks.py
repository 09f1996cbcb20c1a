"""Jobs of tasks that a worker does not know: they are tried again until a worker knows the task."""

from __future__ import annotations

from itertools import pairwise

from simulator import Simulation

from tidemill import Limit, State


def test_a_job_of_an_unknown_task_is_tried_again_at_growing_intervals(sim: Simulation) -> None:
    # case T2; law 7
    sim.app.lacks = {"new"}
    sim.worker(processes=2)
    job = sim.task("new").enqueue()
    made = job.record.envelope.created
    # when it is given back for 5 min
    times: list[float] = []
    for _ in range(1200):
        sim.run_for(0.25)
        record = job.refresh()
        if record.state is State.SCHEDULED and record.due not in times:
            times.append(record.due)
    # then it is due again in 1 s, later after a quarter of its age, and at most after 30 s
    gaps = [then - now for now, then in pairwise([made, *times])]
    ages = [now - made for now in [made, *times]]
    want = [min(30.0, max(1.0, age / 4)) for age in ages[:-1]]
    for gap, most in zip(gaps, want, strict=True):
        assert 0.6 * most - 0.1 <= gap <= most + 1.0
    assert gaps[0] < 2.0 < 17.0 < gaps[-1]
    # and no attempt counts, and the worker has said so once
    assert (record.attempt, record.attempts, record.losses, record.log) == (0, [], 0, [])
    assert sim.said("no worker knows task 'new'") == 1


def test_a_job_of_an_unknown_task_takes_nothing_from_its_limit(sim: Simulation) -> None:
    # case T2; laws 7, 13
    sim.app.lacks = {"new"}
    limit = Limit(rate="1/h", concurrency=1, name="shared")
    unknown = sim.task("new", limit=limit).enqueue()
    sim.worker()
    sim.run_for(20.0)
    assert unknown.refresh().state is State.SCHEDULED
    job = sim.task("known", limit=limit).enqueue()
    started = sim.now
    assert sim.until_succeeded(job) - started <= 2.0


def test_a_worker_with_a_new_task_gets_its_waiting_jobs_at_once(sim: Simulation) -> None:
    # law 7
    sim.app.lacks = {"new"}
    jobs = [sim.task("new").enqueue() for _ in range(520)]
    first = sim.worker()
    sim.run_for(60.0)
    first.command("stop")
    first.until_ended()
    assert sum(job.refresh().state is State.SCHEDULED for job in jobs) > 400
    # when the next tries of most jobs are some seconds away
    sim.app.lacks = set()
    started = sim.now
    sim.worker(concurrency=100)
    assert sim.until_succeeded(*jobs) - started <= 5.0
