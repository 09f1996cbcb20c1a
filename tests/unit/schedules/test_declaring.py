"""A worker's supervisor stores the schedules that code declares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from declared_schedules import store_declared
from firing_desk import NOON, Desk

from tidemill import Schedule, When
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.schedules import Change
from tidemill.core.job import Owner
from tidemill.errors import StoreFull
from tidemill.worker.scheduling import Scheduling


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(monkeypatch)
    yield desk
    desk.mill.close()


# -- what code declares --------------------------------------------------------------------------


def test_a_worker_stores_the_schedules_of_code(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    desk.mill.schedule("s", desk.mill.call("tick"), every=60)
    desk.declare()
    (shown,) = desk.mill.schedules
    assert (shown.name, shown.code, shown.app) == ("s", True, "app")
    assert "schedule 's' is stored" in caplog.text
    desk.now += 60
    desk.fire()
    desk.declare()  # another worker starts
    assert "changed" not in caplog.text
    assert desk.mill.schedules.get("s").fired == 1
    assert desk.due() == []


def start(
    desk: Desk, owner: str, *names: str, app: str = "app:mill", every: float = 60
) -> Scheduling:
    """A worker starts whose code declares these."""
    desk.broker.attach(Owner(id=owner, name=owner))
    firing = Scheduling(app, owner)
    reload(desk, firing, *names, every=every)
    return firing


def reload(desk: Desk, firing: Scheduling, *names: str, every: float = 60) -> None:
    """A worker is told to load its code anew."""
    desk.again()
    for name in names:
        desk.mill.schedule(name, desk.mill.call("tick"), every=every)
    desk.declare(firing)


def fire(desk: Desk, firing: Scheduling) -> list[str]:
    """A minute later a worker sees to all that is due; whose jobs it put."""
    before = {job.id for job in desk.jobs()}
    desk.now += 60
    while due := desk.broker.exchange(Step("w1", fires=500)).schedules:
        firing.fire(desk.broker, due)
    fired = [job for job in desk.jobs() if job.id not in before]
    return sorted(job.planned.schedule for job in fired if job.planned)


def listed(desk: Desk) -> dict[str, bool | None]:
    return {schedule.name: schedule.declared for schedule in desk.mill.schedules}


def test_two_apps_of_one_name_leave_each_other_alone(desk: Desk) -> None:
    desk.mill.schedules.add("person", desk.mill.call("tick"), every=60)
    one, two = start(desk, "w1", "one"), start(desk, "w2", "two")
    renamed = start(desk, "w3", "one", app="renamed:mill")
    assert listed(desk) == {"one": True, "person": None, "two": True}
    for firing in (one, two, renamed):  # whoever is handed them
        assert fire(desk, firing) == ["one", "person", "two"]


def test_two_versions_of_an_app_keep_each_others_schedules(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = start(desk, "w1", "stays", "goes"), start(desk, "w2", "stays", "comes")
    assert fire(desk, old) == fire(desk, new) == ["comes", "goes", "stays"]
    start(desk, "w3", "stays", "goes")  # an old one more
    assert fire(desk, new) == ["comes", "goes", "stays"]
    for owner in ("w1", "w3"):  # the last of the old ones leave
        desk.broker.detach(owner)
    desk.broker.attach(Owner(id="w1", name="another"))
    assert listed(desk) == {"comes": True, "goes": True, "stays": True}
    desk.broker.detach("w1")
    desk.broker.attach(Owner(id="w1-", name="who asks what is due"))
    desk.now += 60
    while due := desk.broker.exchange(Step("w1-", fires=500)).schedules:
        new.fire(desk.broker, due)
    assert listed(desk) == {"comes": True, "goes": False, "stays": True}
    shown = desk.mill.schedules.get("goes")
    assert (shown.next, shown.undeclared and shown.undeclared.timestamp()) == (None, desk.now)
    assert "'goes' fires no more: no living worker declares it" in caplog.text


def test_a_schedule_declared_again_keeps_its_next_time(desk: Desk) -> None:  # case C8
    other, first = start(desk, "w1", "other"), start(desk, "w2", "s")
    assert fire(desk, other) == ["other", "s"]
    desk.broker.detach("w2")
    for _ in range(3):
        assert fire(desk, other) == ["other"]
    start(desk, "w2", "s")
    shown = desk.mill.schedules.get("s")
    assert (shown.declared, shown.undeclared, shown.fired) == (True, None, 1)
    desk.now -= 60
    assert fire(desk, other) == ["s"]  # one for all that were missed, as after any pause of work
    assert fire(desk, first) == ["other", "s"]


def test_an_undeclared_schedule_is_deleted_after_a_month(desk: Desk) -> None:  # law 15
    firing = start(desk, "w1", "s", "other")
    reload(desk, firing, "other")
    fire(desk, firing)
    assert listed(desk) == {"other": True, "s": False}
    desk.now += 30 * 86_400 - 120
    fire(desk, firing)
    assert listed(desk) == {"other": True, "s": False}
    fire(desk, firing)
    assert listed(desk) == {"other": True}


def test_a_worker_with_new_code_withdraws_old_schedules(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    firing, other = start(desk, "w1", "s", "both"), start(desk, "w2", "both")
    reload(desk, firing, "new")
    assert "schedule 's' is no longer declared by this worker" in caplog.text
    assert listed(desk) == {"both": True, "new": True, "s": False}
    assert fire(desk, other) == ["both", "new"]


def test_a_declaration_made_meanwhile_is_not_overlooked(desk: Desk) -> None:
    # The look at who lives and the change are two steps; a worker may start between them.
    start(desk, "w2", "s")
    desk.broker.detach("w2")
    other = start(desk, "w1", "other")
    desk.now += 60
    owners = desk.broker.owners

    def late() -> list[Owner]:
        found = owners()
        desk.broker.owners = owners  # type: ignore[method-assign]  # once
        start(desk, "w2", "s")
        return found

    due = desk.broker.exchange(Step("w1", fires=500)).schedules
    desk.broker.owners = late  # type: ignore[method-assign]  # between the two steps
    other.fire(desk.broker, due)
    assert desk.mill.schedules.get("s").undeclared is None
    desk.now -= 60
    assert fire(desk, other) == ["s"]


def test_two_different_declarations_of_one_name_are_reported(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    start(desk, "w1", "s", every=60)
    start(desk, "w2", "s", every=60)
    assert caplog.text == ""
    start(desk, "w3", "s", every=90)
    assert "schedule 's' is declared otherwise by worker w1, and is changed" in caplog.text
    assert desk.mill.schedules.get("s").when == "every 90 s"


# -- moments that code says anew each time it is loaded ------------------------------------------


def load(desk: Desk, **when: Any) -> Schedule:
    """A process loads code that declares ``s`` so, and stores it."""
    desk.again().schedule("s", desk.mill.call("tick"), **when)
    store_declared(desk.mill)
    return desk.mill.schedules.get("s")


@pytest.mark.parametrize(
    "rule",
    [
        lambda now: {"every": 3600, "start": now},
        lambda now: {"every": 3600, "start": now + 600},
        lambda now: {"every": "day", "start": now},
        lambda now: {"cron": "0 * * * *", "start": now, "end": now + 86_400},
        lambda now: {"at": now + 7200},
        lambda now: {"every": 3600, "start": now - now % 86_400},  # midnight
    ],
)
def test_a_start_that_moves_with_the_clock_is_the_same_rule(
    desk: Desk, rule: Callable[[float], dict[str, Any]]
) -> None:  # case C8
    first = load(desk, **rule(desk.now))
    for later in (1.5, 1000, 90_000):
        desk.now += later
        again = load(desk, **rule(desk.now + 0.25))  # it is not said in the very same moment
        assert again.next == first.next
    desk.fire()
    assert desk.mill.schedules.get("s").fired == 1
    assert load(desk, **rule(desk.now)).fired == 1


def test_another_start_is_another_rule(desk: Desk) -> None:  # case C8
    for start in (NOON + 600, NOON + 700, NOON - 1800, NOON - 1000):
        shown = load(desk, every=3600, start=start)
        assert (shown.next.timestamp() - start) % 3600 == 0
        desk.now += 5
    assert load(desk, every=3600).next.timestamp() == desk.now + 3600  # type: ignore[union-attr]  # it fires


@pytest.mark.parametrize("anchored", [False, True])
def test_an_interval_goes_on_when_the_clock_was_set_back(desk: Desk, anchored: bool) -> None:
    # law 19: it goes by the wall clock, and would be silent until that has come so far again
    when: dict[str, Any] = {"every": 600, **({"start": NOON - 100_000} if anchored else {})}
    first = load(desk, **when)
    desk.now += 30
    assert load(desk, **when).next == first.next  # nothing was set
    desk.now -= 7200
    again = load(desk, **when)  # a worker starts
    assert 0 < again.next.timestamp() - desk.now <= 600
    desk.now -= 7200
    desk.mill.schedules.pause("s")
    resumed = desk.mill.schedules.resume("s")
    assert 0 < resumed.next.timestamp() - desk.now <= 600
    desk.now += 600
    desk.fire()
    assert desk.mill.schedules.get("s").fired == 1


def test_without_a_start_intervals_count_from_the_first_storing(desk: Desk) -> None:
    for later in (0, 10, 25):  # a restart, a second worker
        desk.now += later
        start(desk, f"w{later}", "s")
    assert [t.timestamp() - NOON for t in desk.mill.schedules.next_times("s", 2)] == [60, 120]


def test_an_ended_schedule_of_code_does_not_begin_again(desk: Desk) -> None:  # case C7
    for name, when in (("once", When(at=NOON + 60)), ("few", When(every=60, repeats=2))):
        desk.mill.schedule(name, desk.mill.call("tick"), when)
    desk.declare()
    for _ in range(5):
        desk.now += 60
        desk.fire()
        desk.declare()
    assert desk.times() == [60, 60, 120]
    assert [s.ended for s in desk.mill.schedules] == [True, True]
    desk.again().schedule("few", desk.mill.call("tick"), every=60, repeats=3)
    desk.declare()
    assert not desk.mill.schedules.get("few").ended


def test_a_schedule_refused_for_room_is_stored_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.mill.schedule("s", desk.mill.call("tick"), every=60)
    change, firing = desk.broker.change_schedules, Scheduling("app:mill")

    def full(changes: list[Change]) -> None:
        raise StoreFull("the disk is full")

    monkeypatch.setattr(desk.broker, "change_schedules", full)
    for _ in range(3):  # turns of the worker
        desk.declare(firing)
    assert caplog.text.count("are not stored: the disk is full") == 1
    monkeypatch.setattr(desk.broker, "change_schedules", change)
    desk.now += 31
    desk.declare(firing)
    assert [s.name for s in desk.mill.schedules] == ["s"]
