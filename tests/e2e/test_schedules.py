"""Schedules with real workers: fired once by any number of them, also when they are killed."""

from __future__ import annotations

import itertools
import signal
from collections import Counter

import pytest
from harness import Place, eventually

APP = """
@mill.task
def tick(name="tick"):
    job = this_job()
    note("tick", job.schedule, job.planned.timestamp(), time.time(), os.getpid())
"""


STORES = ["lmdb", "redis", "postgresql"]
ON_STORES = pytest.mark.parametrize("place", STORES, indirect=True)


def fired(place: Place) -> list[tuple[str, float]]:
    """Which schedule put each job there is, and for which of its times."""
    planned = [record.envelope.planned for record in place.records()]
    return sorted((p.schedule, p.time) for p in planned if p)


def check_each_once(place: Place, every: float, least: int) -> None:
    """No time was fired twice, and with ``catch_up`` none was left out."""
    times = fired(place)
    assert max(Counter(times).values()) == 1
    for name in {name for name, _ in times}:
        mine = [time for other, time in times if other == name]
        assert len(mine) >= least
        steps = {round((b - a) / every) for a, b in itertools.pairwise(mine)}
        assert steps == {1}, f"{name}: {steps}"


@pytest.mark.everyday
@ON_STORES
def test_a_schedule_in_code_fires_on_time(place: Place) -> None:  # law 9
    place.write(APP + 'mill.schedule("second", tick.call("x"), "* * * * * *")\n')
    place.worker()
    lines = place.wait_notes("tick second", 3)
    for line in lines[:3]:
        planned, began = map(float, line.split()[2:4])
        assert planned % 1 == 0
        assert 0 <= began - planned < 10  # the figure is a benchmark's
    assert max(Counter(fired(place)).values()) == 1  # who is held up for a second leaves one out


@pytest.mark.everyday("lmdb", "redis")
@ON_STORES
def test_many_workers_fire_each_time_once(place: Place) -> None:  # case C7
    place.write(
        APP
        + """
for n in range(10):
    mill.schedule(f"s{n}", tick.call(), every=0.25, catch_up=True)
"""
    )
    for _ in range(3):
        place.worker(slots=2)
    schedules = place.mill.schedules
    eventually(lambda: sum(s.fired >= 10 for s in schedules) == 10, "ten of each schedule", 60)
    for worker in place.workers:
        worker.stop()
    check_each_once(place, 0.25, 10)


@pytest.mark.everyday("lmdb")
@pytest.mark.parametrize(
    ("place", "point"),
    [*itertools.product(STORES, ["worker.firing", "worker.fired"]), ("lmdb", "store.claimed")],
    indirect=["place"],
)
def test_killed_while_it_fires(place: Place, point: str) -> None:
    # cases C7, Q20: the second time it passes the point; another goes on, and every time is fired
    place.write(APP + 'mill.schedule("s", tick.call(), every=0.3, catch_up=True)\n')
    victim = place.worker(env={"TIDEMILL_CRASH": f"{point}:2"})
    assert victim.wait() == -9
    before = len(fired(place))
    other = place.worker().wait_ready()
    eventually(lambda: len(fired(place)) >= before + 5, "five more")
    other.stop()
    check_each_once(place, 0.3, 5)


def test_new_code_changes_adds_and_withdraws_what_it_declares(place: Place) -> None:
    # case C8: by SIGHUP, and no worker is restarted
    place.write(
        APP
        + """
mill.schedule("stays", tick.call(), every=3600)
mill.schedule("changes", tick.call(), every=3600)
mill.schedule("goes", tick.call(), every=0.5)
"""
    )
    worker = place.worker().wait_ready()
    eventually(lambda: len([*place.mill.schedules]) == 3, "three schedules")
    before = {schedule.name: schedule for schedule in place.mill.schedules}
    place.mill.schedules.add("person", place.mill.call(place.task("tick")), every=3600)
    place.write(
        APP
        + """
mill.schedule("stays", tick.call(), every=3600)
mill.schedule("changes", tick.call(), every=0.2)
mill.schedule("comes", tick.call(), every=3600)
""",
        load=False,
    )
    worker.send(signal.SIGHUP)
    worker.wait_line("'goes' is no longer declared by this worker")
    worker.wait_line("'goes' fires no more: no living worker declares it")
    place.wait_notes("tick changes", 2)
    after = {schedule.name: schedule for schedule in place.mill.schedules}
    assert sorted(after) == ["changes", "comes", "goes", "person", "stays"]
    assert after["stays"] == before["stays"]
    assert (after["goes"].declared, after["goes"].next) == (False, None)
    assert (after["stays"].declared, after["person"].declared) == (True, None)
