"""Schedules fire on time and once (case C7)."""

from __future__ import annotations

import itertools

from simulator import Simulation

from tidemill import State


def test_a_schedule_fires_each_time_once(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0)
    sim.worker()
    sim.run_for(600.0)
    times = [run.began for run in sim.runs()]
    assert len(times) == 10
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(59.9 <= gap <= 60.1 for gap in gaps)


def test_a_schedule_whose_store_is_away_fires_later(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0)
    sim.worker()
    sim.until(sim.runs)
    sim.store.be_away(300.0)
    sim.run_for(400.0)
    assert 2 <= len(sim.runs()) <= 4
    jobs = [sim.mill.job(run.job_id) for run in sim.runs()]
    assert all(job.state is State.SUCCEEDED for job in jobs)
