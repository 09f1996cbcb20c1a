"""A worker's supervisor fires schedules: the jobs that it puts, and the next times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from declared_schedules import store_declared
from firing_desk import NOON, Desk, tick

from tidemill import Key, Tidemill, When
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.schedules import Change
from tidemill.core.clock import id_time
from tidemill.core.envelope import Planned
from tidemill.core.job import State
from tidemill.errors import BadSignature, BrokerUnavailable, StoreFull
from tidemill.schedules import record
from tidemill.schedules.rules import next_time
from tidemill.worker.scheduling import Scheduling


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(monkeypatch)
    yield desk
    desk.mill.close()


# -- firing --------------------------------------------------------------------------------------


def test_each_time_puts_one_job(desk: Desk) -> None:
    desk.mill.schedules.add("s", desk.mill.call("tick").using(tags=["t"]), every=60)
    for _ in range(5):
        desk.now += 30
        desk.fire()
    assert desk.times() == [60, 120]
    job = desk.jobs()[0]
    assert job.planned == Planned("s", NOON + 60)
    assert job.tags == ("t",)
    assert job.created == NOON + 60
    assert id_time(job.id) is not None
    shown = desk.mill.schedules.get("s")
    assert shown.next is not None
    assert (shown.fired, shown.last.timestamp() - NOON) == (2, 120)
    assert shown.next.timestamp() - NOON == 180


def test_missed_times_are_made_up_for_once(desk: Desk) -> None:  # case C7
    desk.mill.schedules.add("all", desk.mill.call("tick"), every=60, catch_up=True)
    desk.mill.schedules.add("one", desk.mill.call("tick"), every=60)
    desk.now += 330
    assert desk.fire() == 1
    by_name: dict[str, list[float]] = {"all": [], "one": []}
    for job in desk.jobs():
        assert job.planned
        by_name[job.planned.schedule].append(job.planned.time - NOON)
    assert by_name == {"all": [60, 120, 180, 240, 300], "one": [60]}
    desk.now += 30
    desk.fire()
    assert desk.times()[-2:] == [360, 360]


@pytest.mark.parametrize("options", [{}, {"catch_up": True}, {"repeats": 3}, {"jitter": 45.0}])
def test_the_next_times_after_an_outage_are_those_that_get_a_job(
    desk: Desk, options: dict[str, Any]
) -> None:  # case C7
    desk.mill.schedules.add("s", desk.mill.call("tick"), every=60, **options)
    desk.now += 330
    shown = [t.timestamp() - NOON for t in desk.mill.schedules.next_times("s", 4)]
    desk.fire()
    while len(desk.times()) < len(shown):
        desk.now += 60
        desk.fire()
    assert desk.times()[: len(shown)] == shown


def test_a_schedule_that_no_worker_declares_has_no_next_times(desk: Desk) -> None:
    desk.mill.schedule("s", desk.mill.call("tick"), every=60)
    desk.declare(Scheduling("app:mill", "a dead worker"))
    desk.now += 60
    assert len(desk.mill.schedules.next_times("s")) == 5
    desk.fire()
    assert desk.mill.schedules.get("s").undeclared
    assert desk.mill.schedules.next_times("s") == []


def test_very_much_that_was_missed_is_made_up_for_in_steps(desk: Desk) -> None:  # case C7
    desk.mill.schedules.add("s", desk.mill.call("tick"), every=1, catch_up=True)
    desk.now += 1000
    assert desk.fire() == 10
    assert desk.times() == [float(n) for n in range(1, 1001)]


def test_repeats_count_down_and_it_ends(desk: Desk) -> None:  # case C7
    desk.mill.schedules.add("few", desk.mill.call("tick"), every=60, repeats=3)
    desk.mill.schedules.add("caught", desk.mill.call("tick"), every=60, repeats=3, catch_up=True)
    desk.now += 200
    desk.fire()
    assert [s.name for s in desk.mill.schedules] == ["few"]
    desk.now += 300
    desk.fire()
    desk.now += 300
    desk.fire()
    assert [s.name for s in desk.mill.schedules] == []
    assert len(desk.jobs()) == 6
    assert desk.due() == []


@pytest.mark.parametrize("conflict", ["keep", "reject"])
@pytest.mark.parametrize("catch_up", [False, True])
def test_a_job_that_is_left_out_uses_up_no_repeat(
    desk: Desk, conflict: str, catch_up: bool
) -> None:  # case C7
    options: dict[str, Any] = {"every": 60, "repeats": 2, "catch_up": catch_up}
    keyed = desk.mill.call("tick").using(key=Key("k", on_conflict=conflict))
    desk.mill.schedules.add("keyed", keyed, **options)
    desk.mill.schedules.add("full", desk.mill.call("tick").using(queue="full"), **options)
    desk.broker.set_queue("full", max_size=1)
    for _ in range(4):
        desk.now += 60
        desk.fire()
    assert desk.times() == [60, 60]
    assert {s.name: s.fired for s in desk.mill.schedules} == {"keyed": 1, "full": 1}
    assert [t.timestamp() - NOON for t in desk.mill.schedules.next_times("keyed")] == [300]
    desk.broker.delete([job.id for job in desk.jobs()])
    desk.now += 60
    desk.fire()
    assert desk.times() == [300, 300]
    assert [*desk.mill.schedules] == []


def test_a_job_that_is_left_out_is_not_the_last_job_of_its_schedule(desk: Desk) -> None:
    keyed = desk.mill.call("tick").using(key="k")
    desk.mill.schedules.add("keyed", keyed, every=60)
    for _ in range(3):
        desk.now += 60
        desk.fire()
    (job,) = desk.jobs()
    found = desk.mill.schedules.get("keyed")
    assert (found.last_job, found.fired) == (job.id, 1)
    desk.broker.delete([job.id])
    desk.now += 60
    desk.fire()
    (job,) = desk.jobs()
    assert desk.mill.schedules.get("keyed").last_job == job.id


def test_a_single_time_ends(desk: Desk) -> None:  # case C7
    desk.mill.schedules.add("once", desk.mill.call("tick"), at=NOON + 60)
    desk.now += 59
    assert desk.due() == []
    desk.now += 1
    desk.fire()
    desk.now += 10_000
    desk.fire()
    assert desk.times() == [60]
    assert [*desk.mill.schedules] == []


def test_a_schedule_paused_meanwhile_does_not_fire(desk: Desk) -> None:
    desk.mill.schedules.add("s", desk.mill.call("tick"), every=60, catch_up=True)
    desk.now += 60
    due = desk.broker.exchange(Step("w1", fires=5)).schedules
    desk.mill.schedules.pause("s")
    desk.firing.fire(desk.broker, due)
    desk.now += 600
    assert desk.due() == []
    desk.mill.schedules.resume("s")
    desk.fire()
    assert desk.times() == []  # nor is it made up for
    desk.now += 60
    desk.fire()
    assert desk.times() == [720]


def test_a_single_time_that_passed_during_a_pause_is_over(desk: Desk) -> None:
    # case C7: nothing done meanwhile is made up for, and what has ended gives its name free
    schedules, call = desk.mill.schedules, desk.mill.call("tick")
    for name, catch_up in (("once", False), ("caught", True)):
        schedules.add(name, call, at=NOON + 60, catch_up=catch_up)
        schedules.pause(name)
    desk.mill.schedule("code", call, at=NOON + 60)
    store_declared(desk.mill)
    schedules.pause("code")
    desk.now += 120
    for name in ("once", "caught", "code"):
        over = schedules.resume(name)
        assert (over.ended, over.paused, over.next, over.fired) == (True, False, None, 0)
    assert [s.name for s in schedules] == ["code"]
    schedules.add("once", call, every=60)
    desk.fire()
    assert desk.times() == []


def test_a_set_clock_neither_doubles_nor_loses_a_job(desk: Desk) -> None:  # law 19
    desk.mill.schedules.add("s", desk.mill.call("tick"), every=600, catch_up=True)
    desk.now += 610
    desk.fire()
    desk.now -= 300  # back: 600 comes again on the clock, and has been
    desk.fire()
    desk.now += 300 + 580
    desk.fire()
    assert desk.times() == [600]
    desk.now += 20
    due = desk.broker.exchange(Step("w1", fires=5)).schedules
    desk.now -= 100  # back between the claim and the firing: the job comes at its planned time
    desk.firing.fire(desk.broker, due)
    assert desk.times() == [600]
    desk.now += 100
    desk.fire()
    assert desk.times() == [600, 1200]
    desk.now += 1800  # forward
    desk.fire()
    assert desk.times() == [600, 1200, 1800, 2400, 3000]


@pytest.mark.parametrize(
    "when", [When(every=1, catch_up=True), When(cron="*/5 9-16 * * *", catch_up=True)]
)
def test_a_clock_that_jumps_days_ahead_puts_a_bounded_number_of_jobs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: When
) -> None:
    # case M13
    monkeypatch.setattr(record, "MOST_MISSED", 150)
    desk.mill.schedules.add("s", desk.mill.call("tick"), when)
    desk.now += 3 * 86_400
    desk.fire()
    # the latest times get a job, each one
    rule = msgspec.structs.replace(when.rule, start=NOON)
    missed, time = list[float](), desk.now - 2 * 86_400
    while (time := next_time(rule, time)) <= desk.now:
        missed.append(time - NOON)
    fired = desk.times()
    assert 150 <= len(fired) <= 300
    assert fired == missed[-len(fired) :]
    assert caplog.text.count("only about the last 150 get a job") == 1
    # the next time is as usual
    desk.now += 86_400
    (schedule,) = desk.mill.schedules
    assert schedule.next.timestamp() == time


def test_few_missed_times_are_all_caught_up_though_some_lie_close_together(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case M13
    monkeypatch.setattr(record, "MOST_MISSED", 150)
    when = When(cron="0,1 0 * * *", catch_up=True)
    desk.mill.schedules.add("s", desk.mill.call("tick"), when)
    desk.now += 60 * 86_400
    desk.fire()
    assert len(desk.times()) == 120


def test_a_cron_fires_no_time_again_when_the_clock_is_set_back(desk: Desk) -> None:
    # case M13, law 19
    desk.mill.schedules.add("s", desk.mill.call("tick"), "0 * * * *")
    for back in (7200, 3 * 86_400):
        desk.now += back
        desk.fire()
        fired = desk.times()
        desk.now -= back
        Scheduling().look_at_clock(desk.broker)
        (schedule,) = desk.mill.schedules
        # the next time is the one after the last that fired
        assert schedule.next.timestamp() - NOON == fired[-1] + 3600
    assert len(fired) == len({*fired})


def test_a_look_at_the_clock_that_fails_is_repeated_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduling, looks = Scheduling(), list[float]()

    def away() -> float:
        raise BrokerUnavailable("the store is away")

    def back() -> float:
        looks.append(desk.now)
        return desk.now

    monkeypatch.setattr(desk.broker, "wall", away)
    with pytest.raises(BrokerUnavailable):
        scheduling.look_at_clock(desk.broker)
    monkeypatch.setattr(desk.broker, "wall", back)
    scheduling.look_at_clock(desk.broker)
    assert looks == [desk.now]


def test_jitter_moves_the_job_and_not_the_times(desk: Desk) -> None:
    desk.mill.schedules.add("s", desk.mill.call("tick"), every=60, jitter=30)
    late = set()
    for _ in range(20):
        (record,) = desk.broker.schedules(["s"])
        desk.now = record.due
        desk.fire()
        late.add(record.due - NOON - desk.times()[-1])
    assert desk.times() == [60.0 * n for n in range(1, 21)]
    assert all(0 <= seconds <= 30 for seconds in late)
    assert len(late) > 10


def test_a_store_without_room_is_tried_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.mill.schedules.add("s", desk.mill.call("tick"), every=60)
    desk.now += 60
    change = desk.broker.change_schedules

    def full(changes: list[Change]) -> None:
        raise StoreFull("the disk is full")

    due = desk.broker.exchange(Step("w1", fires=5)).schedules
    monkeypatch.setattr(desk.broker, "change_schedules", full)
    desk.firing.fire(desk.broker, due)
    assert "wait for room: the disk is full" in caplog.text
    monkeypatch.setattr(desk.broker, "change_schedules", change)
    assert desk.due() == []
    desk.now += 1
    desk.fire()
    assert desk.times() == [60]


# -- signatures ----------------------------------------------------------------------------------


def test_the_job_of_a_schedule_is_signed_for_that_schedule_only() -> None:  # case T15, case S3
    from tidemill.core.codec import verify

    mill = Tidemill("memory://", secret_keys=["new", "old"])
    mill.task(name="tick")(tick)
    mill.schedules.add("s", mill.call("tick"), every=60)
    record = mill.broker.get(mill.schedules.run("s").id)
    job = record.envelope
    verify(job, mill.runtime.keys)
    for field, value in (
        ("planned", Planned("other", 1.0)),
        ("planned", None),
        ("task", "other"),
        ("body", b"other"),
        ("signature", b""),
    ):
        was = getattr(job, field)
        setattr(job, field, value)
        with pytest.raises(BadSignature):
            verify(job, mill.runtime.keys)
        setattr(job, field, was)
    with pytest.raises(BadSignature):
        verify(job, [b"wrong"])
    job.planned, job.id = None, "s"  # no job with the schedule's name for its id, either
    with pytest.raises(BadSignature):
        verify(job, mill.runtime.keys)
    assert record.state is State.READY
    mill.close()


def test_jitter_beyond_the_interval_drops_no_time(desk: Desk) -> None:
    desk.mill.schedules.add("s", desk.mill.call("tick"), cron="* * * * *", jitter=300)
    for _ in range(600):
        desk.now += 10
        desk.fire()
    times = desk.times()
    assert times == [60.0 * n for n in range(1, len(times) + 1)]
    assert 90 <= len(times) <= 100
