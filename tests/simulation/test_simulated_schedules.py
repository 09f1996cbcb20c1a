"""Schedules fire on time and once (case C7)."""

from __future__ import annotations

from simulator import Simulation

from tidemill import State


def test_a_schedule_fires_each_time_once(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0)
    worker = sim.worker()
    worker.run_for(600.0)
    assert len(sim.app.starts) == 10
    gaps = [b - a for (_, a, _), (_, b, _) in zip(sim.app.starts, sim.app.starts[1:], strict=False)]
    assert all(59.9 <= gap <= 60.1 for gap in gaps)


def test_a_schedule_whose_store_is_away_fires_later(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0)
    worker = sim.worker()
    worker.until(lambda: sim.app.starts)
    sim.store.away_until = sim.now + 300.0
    worker.run_for(400.0)
    assert 2 <= len(sim.app.starts) <= 4
    jobs = [sim.mill.job(job_id) for job_id, _, _ in sim.app.starts]
    assert all(job.state is State.SUCCEEDED for job in jobs)
