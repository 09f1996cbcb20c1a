"""Schedules fire on time and once (case C7)."""

from __future__ import annotations

import itertools
import signal

import pytest
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


def test_two_workers_fire_each_time_once(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0)
    for _ in range(3):
        sim.worker()
    sim.run_for(600.0)
    assert len(sim.runs()) == 10


def test_a_killed_worker_loses_no_time(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("often", task.call(), every=10.0, catch_up=True)
    for number in range(5):
        worker = sim.worker()
        sim.run_for(15.0 + number)
        worker.kill()
    sim.worker()
    sim.run_for(10.0)
    planned = [run.planned for run in sim.runs()]
    steps = {round(later - earlier, 3) for earlier, later in itertools.pairwise(planned)}
    assert steps == {10.0}


def test_a_schedule_that_catches_up_fires_each_missed_time(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0, catch_up=True)
    sim.worker()
    sim.until(sim.runs)
    sim.store.be_away(300.0)
    sim.run_for(400.0)
    planned = sorted(run.planned for run in sim.runs())
    assert {round(b - a, 3) for a, b in itertools.pairwise(planned)} == {60.0}
    assert len(planned) >= 6


def test_a_store_that_stalls_delays_a_schedule(sim: Simulation) -> None:
    # case C7
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("each minute", task.call(), every=60.0)
    sim.worker()
    sim.until(sim.runs)
    sim.run_for(50.0)
    sim.store.stall(100.0)
    sim.run_for(300.0)
    times = [run.planned for run in sim.runs()]
    assert len(times) == len(set(times))
    assert 4 <= len(times) <= 7


def test_a_schedule_added_while_the_worker_sleeps_fires(sim: Simulation) -> None:
    task = sim.task("tick", seconds=0.1)
    sim.worker()
    sim.run_for(100.0)
    sim.mill.schedules.add("once", task.call(), at=sim.wall + 5.0)
    sim.run_for(6.0)
    assert len(sim.runs()) == 1
    assert [*sim.mill.schedules] == []


def test_a_worker_that_stops_fires_no_more(sim: Simulation) -> None:
    # case T11
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedules.add("often", task.call(), every=1.0)
    sim.task("long", seconds=20.0).enqueue()
    worker = sim.worker(shutdown_timeout=30.0)
    sim.run_for(5.0)
    worker.signal(signal.SIGTERM)
    sim.run_for(0.5)
    jobs = len(sim.mill.jobs().page(limit=1000).records)
    worker.until_ended()
    assert len(sim.mill.jobs().page(limit=1000).records) == jobs


def test_a_schedule_in_code_changes_with_a_reload(sim: Simulation) -> None:
    # case C8
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedule("often", task.call(), every=60.0)
    sim.task("long", seconds=100.0).enqueue()  # the old process stays for a while
    worker = sim.worker()
    assert [schedule.name for schedule in sim.mill.schedules] == ["often"]
    sim.mill.schedule("seldom", task.call(), every=3600.0)
    worker.signal(signal.SIGHUP)
    sim.run_for(5.0)
    assert sorted(schedule.name for schedule in sim.mill.schedules) == ["often", "seldom"]


def test_schedules_go_on_when_a_clock_that_was_days_ahead_is_set_back(sim: Simulation) -> None:
    # case M13, law 19
    # given schedules that fired while the clock was three days ahead
    task = sim.task("tick", seconds=0.1)
    for name, when in (("cron", "* * * * *"), ("every", 60.0)):
        sim.mill.schedules.add(name, task.call(), when)
    sim.mill.schedules.add("caught up", task.call(), "* * * * *", catch_up=True)
    sim.worker()
    sim.set_wall(3 * 86_400.0)
    sim.until(lambda: len(sim.runs()) > 1000)
    # when the clock is set back
    sim.set_wall(-3 * 86_400.0)
    sim.run_for(60.0)
    before = len(sim.runs())
    sim.run_for(600.0)
    # then all three fire each minute
    assert 28 <= len(sim.runs()) - before <= 32


def test_a_worker_tells_how_far_its_clock_is_ahead(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case M5
    broker = sim.mill.broker
    monkeypatch.setattr(broker, "wall", lambda: sim.wall - 120.0)
    sim.worker().until_serving()
    assert [owner.ahead for owner in broker.owners()] == [120.0]


def test_a_full_store_delays_the_schedules_of_the_code(sim: Simulation) -> None:
    # law 16
    task = sim.task("tick", seconds=0.1)
    sim.mill.schedule("often", task.call(), every=1.0)
    sim.worker()
    sim.store.be_full(20.0)
    sim.run_for(120.0)
    assert len(sim.runs()) >= 60
