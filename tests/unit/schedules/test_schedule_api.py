"""Schedules as a user meets them: declared in code, added at run time, refused when wrong."""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from declared_schedules import store_declared

from tidemill import InvalidOption, Schedule, Tidemill, When
from tidemill.brokers.contract.features import Feature
from tidemill.core.clock import clock
from tidemill.errors import FeatureMissing, ScheduleExists, ScheduleNotFound, ScheduleOver
from tidemill.schedules.parse import ScheduleOptions

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
START = dt.datetime(2099, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(params=["memory", "lmdb"])
def mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tidemill]:
    url = "memory://" if request.param == "memory" else f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        declare(mill)
        yield mill


def declare(mill: Tidemill) -> None:
    def report(what: str = "all") -> str:
        return what

    mill.task(name="report")(report)


def nothing() -> None: ...


def names(mill: Tidemill) -> list[str]:
    return [schedule.name for schedule in mill.schedules]


# -- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, r"one of cron=, every= and at=, as cron="),
        ({"cron": "* * * * *", "every": 5}, "not both cron= and every="),
        ({"cron": "* * * *"}, r"has 4 fields; it takes five: minute, hour"),
        ({"cron": "61 * * * *"}, r"'61 \* \* \* \*': its minute '61' is wrong; it goes from 0 to"),
        ({"cron": "* 24 * * *"}, "its hour '24' is wrong; it goes from 0 to 23"),
        ({"cron": "* * 32 * *"}, "its day-of-month '32' is wrong"),
        ({"cron": "* * 30 2 *"}, r"'\* \* 30 2 \*' never comes: no month '2' has a day '30'"),
        ({"cron": "* * 32 2 *"}, "its day-of-month '32' is wrong; it goes from 1 to 31"),
        ({"cron": "* * * 13 *"}, "its month '13' is wrong"),
        ({"cron": "* * * * mond"}, "its day-of-week 'mond' is wrong"),
        ({"cron": "99 * * * * *"}, "its second '99' is wrong"),
        ({"cron": 5}, "cron must be a text"),
        ({"cron": "@daly"}, "has 1 field"),
        ({"every": 0}, r"every must be at least 0\.01 s"),
        ({"every": -1}, "every must be 0 or more"),
        ({"every": "fortnight"}, "every 'fortnight' is no interval; write a whole number"),
        ({"every": "1.5 months"}, "every '1.5 months' is no interval"),
        ({"every": "0 days"}, "every must be a whole number from 1"),
        ({"every": 60, "jitter": 61}, "jitter is longer than every=60"),
        ({"every": 60, "jitter": -1}, "jitter must be 0 or more"),
        ({"every": 60, "repeats": 0}, "repeats must be a whole number from 1"),
        ({"every": 60, "catch_up": 1}, "catch_up must be True or False"),
        ({"every": 60, "zone": "Berlin"}, "zone 'Berlin' is no time zone"),
        ({"every": 60, "start": dt.datetime(2026, 1, 1)}, "start is a datetime without a time"),
        ({"every": 60, "start": 2000, "end": 1000}, "end is before start"),
        ({"at": 2000, "repeats": 3}, "at= comes once"),
        ({"at": "tomorrow"}, "at must be an aware datetime"),
    ],
)
def test_a_bad_rule_is_refused_with_the_reason(
    given: dict[str, Any], sentence: str
) -> None:  # case C8
    with pytest.raises(InvalidOption, match=sentence):
        When(**given)


def test_an_unknown_option_is_refused_by_name(mill: Tidemill) -> None:
    call = mill.call("report")
    with pytest.raises(InvalidOption, match=r"unknown option 'crom' of a schedule; did you mean"):
        mill.schedule("s", call, crom="* * * * *")
    with pytest.raises(InvalidOption, match="either a When or its options"):
        mill.schedule("s", call, When(every=5), zone="UTC")
    with pytest.raises(InvalidOption, match="must be a cron text, seconds"):
        mill.schedule("s", call, object())
    with pytest.raises(InvalidOption, match=r"has '\* \* \* \* \*' already; leave cron= out"):
        mill.schedule("s", call, "* * * * *", cron="5 * * * *")
    with pytest.raises(InvalidOption, match="has 5 already; leave every= out"):
        mill.schedule("s", call, 5, every=6)


def test_a_schedule_and_a_when_take_the_same_options() -> None:
    hints = get_type_hints(When.__init__)
    del hints["return"]
    assert hints == get_type_hints(ScheduleOptions)


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("0 3 * * *", "0 3 * * *"),
        ("@Daily", "0 0 * * *"),
        (90, "every 90 s"),
        (dt.timedelta(minutes=2), "every 120 s"),
        (When(every="2 hours"), "every 7200 s"),
        (When(every="month", zone="Europe/Berlin"), "every month Europe/Berlin"),
        (When(every="3 weeks"), "every 3 weeks"),
        (When(cron="0 3  * * mon", zone=BERLIN), "0 3 * * mon Europe/Berlin"),
        (When(at=4102444800), "once at 2100-01-01 00:00:00+00:00"),
    ],
)
def test_a_rule_is_shown_in_words(mill: Tidemill, when: Any, words: str) -> None:
    assert mill.schedules.add("s", mill.call("report"), when).when == words


def test_two_whens_with_the_same_times_are_equal() -> None:
    one, same = When(every=120, start=START), When(every="2 minutes", start=START)
    assert one == same
    assert hash(one) == hash(same)
    for other in (When(every=60, start=START), When(every=120, start=START, repeats=3), 120):
        assert one != other


def test_the_zone_of_the_start_is_the_zone(mill: Tidemill) -> None:
    start = dt.datetime(2099, 1, 31, 9, tzinfo=BERLIN)
    mill.schedules.add("s", mill.call("report"), every="month", start=start)
    found = mill.schedules.next_times("s", 3)
    assert found == [start, start.replace(month=2, day=28), start.replace(month=3)]
    assert found[2].utcoffset() == dt.timedelta(hours=2)


@pytest.mark.parametrize("options", [{"cron": "0 3 * * *"}, {"every": "month"}])
def test_a_fixed_offset_is_no_zone(options: dict[str, Any]) -> None:
    start = dt.datetime(2027, 1, 31, 0, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    with pytest.raises(InvalidOption, match=r"zone must be named.*UTC.02:00"):
        When(start=start, **options)
    assert When(start=start.astimezone(dt.UTC), **options).rule.zone == ""
    assert When(start=start, zone="Europe/Berlin", **options).rule.zone == "Europe/Berlin"


def test_a_time_without_a_zone_is_in_that_of_the_schedule(mill: Tidemill) -> None:
    at = dt.datetime(2099, 7, 1, 12)
    shown = mill.schedules.add("s", mill.call("report"), at=at, zone="Europe/Berlin")
    assert shown.next == at.replace(tzinfo=BERLIN)


# -- at run time ---------------------------------------------------------------------------------


def test_a_schedule_is_added_shown_and_removed(mill: Tidemill) -> None:
    before = clock.wall()
    shown = mill.schedules.add("s", mill.call("report", "sales"), every=60, repeats=3)
    assert isinstance(shown, Schedule)
    assert shown == mill.schedules.get("s")
    assert (shown.task, shown.queue, shown.arguments) == ("report", "default", "'sales'")
    assert (shown.fired, shown.repeats, shown.paused, shown.ended) == (0, 3, False, False)
    assert (shown.code, shown.known, shown.last) == (False, True, None)
    assert 59 < shown.next.timestamp() - before < 90
    assert shown.public()["next"] == shown.next.timestamp()
    assert len(mill.schedules.next_times("s", 10)) == 3
    mill.schedules.remove("s")
    assert names(mill) == []


def test_a_name_that_is_taken_is_an_error(mill: Tidemill) -> None:  # case C8
    mill.schedules.add("s", mill.call("report"), every=60)
    with pytest.raises(ScheduleExists, match="there is a schedule 's' already"):
        mill.schedules.add("s", mill.call("report"), every=5)
    assert mill.schedules.get("s").when == "every 60 s"


def test_a_schedule_that_is_not_there_says_so(mill: Tidemill) -> None:
    for act in ("get", "pause", "resume", "remove", "run", "next_times"):
        with pytest.raises(ScheduleNotFound, match="there is no schedule 'nobody'"):
            getattr(mill.schedules, act)("nobody")
    mill.schedules.add("nightly", mill.call("report"), every=60)
    with pytest.raises(ScheduleNotFound, match="'nihgtly'; did you mean 'nightly'"):
        mill.schedules.get("nihgtly")


def test_a_time_that_is_past_is_refused(mill: Tidemill) -> None:
    for when in (
        {"at": 1000.0},
        {"every": 60, "end": 1000.0},
        {"cron": "* * * * *", "end": 1.0},
        {"cron": "0 0 1 1 *", "start": 1000.0, "end": 1001.0},
    ):
        with pytest.raises(ScheduleOver, match="would never fire: its time is past"):
            mill.schedules.add("s", mill.call("report"), **when)
    assert names(mill) == []


def test_an_unschedulable_call_is_refused_with_the_reason(mill: Tidemill) -> None:
    @mill.task(name="needs")
    def needs(what: str) -> None: ...

    for call, sentence in (
        (
            needs.call(),
            "argument: 'what'; task needs takes (what); give the arguments in task.call(…)",
        ),
        (needs.using(id="x").call("a"), "leave id= out of its call"),
        (needs.using(at=4102444800).call("a"), "leave at= out of its call"),
        (needs.call("a").on_success(needs.call("b")), "takes a single call"),
        (needs, "takes task.call"),
    ):
        with pytest.raises(InvalidOption, match=re.escape(sentence)):
            mill.schedules.add("s", call, every=60)  # type: ignore[arg-type]


def test_pause_and_resume(mill: Tidemill) -> None:
    mill.schedules.add("s", mill.call("report"), every=60)
    paused = mill.schedules.pause("s")
    assert (paused.paused, paused.next) == (True, None)
    assert mill.schedules.next_times("s") == []
    resumed = mill.schedules.resume("s")
    assert resumed.next is not None
    assert not resumed.paused
    assert mill.schedules.resume("s").next == resumed.next


def test_run_puts_its_job_now_and_changes_no_time(mill: Tidemill) -> None:
    mill.schedules.add("s", mill.call("report", "x").using(queue="q", tags=["t"]), every=3600)
    before = mill.schedules.get("s")
    job = mill.schedules.run("s")
    record = mill.broker.get(job.id)
    assert (record.envelope.queue, record.envelope.tags) == ("q", ("t",))
    assert record.envelope.planned.schedule == "s"
    assert mill.schedules.get("s") == before


async def twins(mill: Tidemill) -> None:
    await mill.schedules.aadd("s", mill.call("report"), every=60)
    assert [s.name for s in await mill.schedules.alist()] == ["s"]
    assert (await mill.schedules.apause("s")).paused
    assert not (await mill.schedules.aresume("s")).paused
    assert (await mill.schedules.aget("s")).name == "s"
    assert await (await mill.schedules.arun("s")).acancel()
    await mill.schedules.aremove("s")


def test_the_async_twins_do_the_same(mill: Tidemill) -> None:
    import asyncio

    asyncio.run(twins(mill))
    assert names(mill) == []


# -- in code -------------------------------------------------------------------------------------


def again(mill: Tidemill) -> Tidemill:
    """The app as a new process has it, on the same store: nothing is declared yet."""
    runtime = mill.runtime
    runtime.code_schedules = type(runtime.code_schedules)(runtime)
    return mill


def test_declaring_stores_nothing_until_it_is_asked_for(mill: Tidemill) -> None:
    mill.schedule("s", mill.call("report"), every=60)
    assert names(mill) == []
    store_declared(mill)
    assert names(mill) == ["s"]
    assert mill.schedules.get("s").code


def test_the_same_rule_again_keeps_its_next_time(mill: Tidemill) -> None:  # case C8
    mill.schedule("s", mill.call("report"), every=3600)
    store_declared(mill)
    before = mill.schedules.get("s")
    (kept,) = mill.broker.schedules(["s"])
    again(mill).schedule("s", mill.call("report"), every=3600)
    store_declared(mill)
    assert mill.broker.schedules(["s"]) == [kept]  # nothing was written
    again(mill).schedule("s", mill.call("report", "other").using(queue="q"), every=3600)
    store_declared(mill)
    after = mill.schedules.get("s")
    assert (after.arguments, after.queue) == ("'other'", "q")
    assert after.next == before.next


def test_another_rule_begins_anew(mill: Tidemill) -> None:  # case C8
    mill.schedule("s", mill.call("report"), every=3600)
    store_declared(mill)
    again(mill).schedule("s", mill.call("report"), "0 3 * * *", zone="Europe/Berlin")
    store_declared(mill)
    shown = mill.schedules.get("s")
    assert shown.when == "0 3 * * * Europe/Berlin"
    assert (shown.next.hour, shown.next.minute) == (3, 0)


def test_a_paused_schedule_stays_paused_when_declared_again(mill: Tidemill) -> None:
    mill.schedules.add("s", mill.call("report"), every=60)
    mill.schedules.pause("s")
    for every in (60, 60, 90):
        again(mill).schedule("s", mill.call("report"), every=every)
        store_declared(mill)
        assert mill.schedules.get("s").paused
    mill.schedules.resume("s")
    assert mill.schedules.get("s").when == "every 90 s"


def test_code_takes_over_a_schedule_that_a_person_added(mill: Tidemill) -> None:  # case C8
    mill.schedules.add("s", mill.call("report"), every=60)
    mill.schedule("s", mill.call("report"), every=90)
    store_declared(mill)
    shown = mill.schedules.get("s")
    assert (shown.code, shown.when) == (True, "every 90 s")


def test_a_name_is_declared_once(mill: Tidemill) -> None:
    mill.task(name="other")(nothing)
    mill.schedule("s", mill.call("report", "eu"), every=60)
    mill.schedule("s", mill.call("report", "eu"), every=60)  # the same file, run once more
    was = r"schedule 's' is declared twice, as report\('eu'\) every 60 s and as "
    for call, every, said in (
        (mill.call("other"), 60, r"other\(\) every 60 s; give one another name"),
        (mill.call("report", "us"), 60, r"report\('us'\) every 60 s"),
        (mill.call("report", "eu"), 90, r"report\('eu'\) every 90 s"),
        (mill.call("report", "eu").using(queue="q"), 60, r"report\('eu'\) every 60 s"),
    ):
        with pytest.raises(InvalidOption, match=was + said):
            mill.schedule("s", call, every=every)
    store_declared(mill)
    assert mill.schedules.get("s").when == "every 60 s"


def test_a_task_may_carry_its_schedule(mill: Tidemill) -> None:
    @mill.task(name="nightly", schedule="0 3 * * *")
    def nightly() -> None: ...

    @mill.task(name="often", schedule=When(every="5 minutes", jitter=10))
    def often() -> None: ...

    store_declared(mill)
    assert {s.name: s.when for s in mill.schedules} == {
        "nightly": "0 3 * * *",
        "often": "every 300 s",
    }
    with pytest.raises(InvalidOption, match="missing a required argument"):

        @mill.task(name="bad", schedule=60)
        def bad(what: str) -> None: ...


def test_a_broker_without_schedules_says_so(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = mill.broker.features - {Feature.SCHEDULES}
    monkeypatch.setattr(type(mill.broker), "features", features)
    with pytest.raises(FeatureMissing, match="a schedule needs the feature schedules"):
        mill.schedules.add("s", mill.call("report"), every=60)
