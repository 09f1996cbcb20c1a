"""The arithmetic of schedules: every intended local time once, across every change of the clock."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import zoneinfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.schedules.rules import UNITS, Rule, next_time, times

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
ZONES = ["", BERLIN, NEW_YORK, "Australia/Lord_Howe", "Asia/Kolkata", "America/Santiago"]
# The days of 2026 and 2027 on which the clock is set, and the hours that are skipped or come twice.
SPRING = {BERLIN: (3, 29, 2), NEW_YORK: (3, 8, 2)}
AUTUMN = {BERLIN: (10, 25, 2), NEW_YORK: (11, 1, 1)}


def at(zone: str, *when: int, fold: int = 0) -> float:
    tz = zoneinfo.ZoneInfo(zone) if zone else dt.UTC
    return dt.datetime(*when, tzinfo=tz, fold=fold).timestamp()  # type: ignore[misc, arg-type]


def shown(rule: Rule, after: float, count: int) -> list[str]:
    """The next times in the rule's zone."""
    found = times(rule, after, count)
    return [dt.datetime.fromtimestamp(t, rule.tz).strftime("%m-%d %H:%M %z") for t in found]


# -- the clock is set ----------------------------------------------------------------------------


def test_a_time_that_is_skipped_comes_at_the_next_moment() -> None:  # case C6
    rule = Rule(cron="30 2 * * *", zone=BERLIN)
    assert shown(rule, at(BERLIN, 2026, 3, 27, 12), 4) == [
        *("03-28 02:30 +0100", "03-29 03:00 +0200", "03-30 02:30 +0200", "03-31 02:30 +0200")
    ]
    rule = Rule(cron="30 2 * * *", zone=NEW_YORK)
    assert shown(rule, at(NEW_YORK, 2026, 3, 7, 1), 3) == [
        *("03-07 02:30 -0500", "03-08 03:00 -0400", "03-09 02:30 -0400")
    ]


def test_a_time_that_comes_twice_counts_the_first_time() -> None:  # case C6
    rule = Rule(cron="30 2 * * *", zone=BERLIN)
    assert shown(rule, at(BERLIN, 2026, 10, 24, 1), 3) == [
        *("10-24 02:30 +0200", "10-25 02:30 +0200", "10-26 02:30 +0100")
    ]
    rule = Rule(cron="30 1 * * *", zone=NEW_YORK)
    assert shown(rule, at(NEW_YORK, 2026, 10, 31, 1), 3) == [
        *("10-31 01:30 -0400", "11-01 01:30 -0400", "11-02 01:30 -0500")
    ]


def test_a_cron_with_seconds_works_alike() -> None:  # case C6
    rule = Rule(cron="15 30 2 * * *", zone=BERLIN)
    spring = times(rule, at(BERLIN, 2026, 3, 28, 12), 2)
    assert spring == [at(BERLIN, 2026, 3, 29, 3), at(BERLIN, 2026, 3, 30, 2, 30, 15)]
    autumn = times(rule, at(BERLIN, 2026, 10, 24, 12), 2)
    assert autumn == [at(BERLIN, 2026, 10, 25, 2, 30, 15), at(BERLIN, 2026, 10, 26, 2, 30, 15)]


def test_two_times_that_fall_on_the_same_moment_are_one() -> None:
    rule = Rule(cron="0,30 2,3 * * *", zone=BERLIN)
    assert shown(rule, at(BERLIN, 2026, 3, 29, 1), 3) == [
        *("03-29 03:00 +0200", "03-29 03:30 +0200", "03-30 02:00 +0200")
    ]


@pytest.mark.parametrize("cron", ["*/30 * * * *", "0,30 * * * *"])
def test_an_hourly_cron_follows_the_clock(cron: str) -> None:  # case C6
    rule = Rule(cron=cron, zone=BERLIN)
    for month, day in (SPRING[BERLIN][:2], AUTUMN[BERLIN][:2]):
        found = times(rule, at(BERLIN, 2026, month, day), 12)
        assert {b - a for a, b in itertools.pairwise(found)} == {1800}


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK])
@pytest.mark.parametrize("changes", [SPRING, AUTUMN])
def test_a_daily_time_comes_once_a_day(zone: str, changes: dict[str, tuple[int, int, int]]) -> None:
    # case C6: each local time of the day that has 23 or 25 hours, and of those beside it
    days = [dt.date(2026, *changes[zone][:2]) + dt.timedelta(days=n) for n in (-1, 0, 1)]
    before = days[0].year, days[0].month, days[0].day
    for hour in range(5):
        for minute in (0, 1, 30, 59):
            daily = Rule(cron=f"{minute} {hour} * * *", zone=zone)
            start = at(zone, *before, hour, minute)
            step = Rule(count=1, unit="day", zone=zone, start=start)
            for rule in (daily, step):
                found = times(rule, at(zone, *before) - 1, 3)
                assert [dt.datetime.fromtimestamp(t, rule.tz).date() for t in found] == days


# -- calendar periods ----------------------------------------------------------------------------


def test_a_month_from_the_31st_keeps_the_day_where_it_exists() -> None:  # case C6
    rule = Rule(count=1, unit="month", zone=BERLIN, start=at(BERLIN, 2026, 1, 31, 9))
    found = [dt.datetime.fromtimestamp(t, rule.tz) for t in times(rule, 0, 14)]
    assert [(d.month, d.day, d.hour) for d in found] == [
        *((1, 31, 9), (2, 28, 9), (3, 31, 9), (4, 30, 9), (5, 31, 9), (6, 30, 9), (7, 31, 9)),
        *((8, 31, 9), (9, 30, 9), (10, 31, 9), (11, 30, 9), (12, 31, 9), (1, 31, 9), (2, 28, 9)),
    ]


def test_a_year_from_29_february() -> None:  # case C6
    rule = Rule(count=1, unit="year", start=at("", 2024, 2, 29, 12))
    found = [dt.datetime.fromtimestamp(t, rule.tz) for t in times(rule, 0, 6)]
    assert [(d.year, d.month, d.day) for d in found] == [
        *((2024, 2, 29), (2025, 2, 28), (2026, 2, 28), (2027, 2, 28), (2028, 2, 29), (2029, 2, 28))
    ]


def test_several_months_at_a_time() -> None:
    rule = Rule(count=5, unit="month", start=at("", 2026, 10, 31))
    found = times(rule, at("", 2026, 11, 1), 3)
    assert found == [at("", 2027, 3, 31), at("", 2027, 8, 31), at("", 2028, 1, 31)]


@given(
    unit=st.sampled_from(UNITS),
    count=st.integers(1, 30),
    zone=st.sampled_from(ZONES),
    start=st.integers(0, 4_000_000_000),
    later=st.floats(0, 2_000_000_000),
)
@settings(deadline=None)
def test_a_step_is_the_first_that_is_later(
    unit: str, count: int, zone: str, start: int, later: float
) -> None:
    # None is left out: counted from the start one by one, it is the same.
    rule = Rule(count=count, unit=unit, zone=zone, start=float(start))
    after = start + later % (400 * 86400 * (1 if unit in ("day", "week") else 40))
    when = next_time(rule, after)
    assert when > after
    assert next_time(rule, math.nextafter(when, 0)) == when
    previous = start + 0.0
    while previous <= after:
        previous, before = next_time(rule, previous), previous
        assert previous > before
    assert previous == when


# -- intervals and single times ------------------------------------------------------------------


def test_an_interval_counts_from_its_start() -> None:
    rule = Rule(every=90.0, start=1000.0)
    assert times(rule, 0, 3) == [1000.0, 1090.0, 1180.0]
    assert next_time(rule, 1090.0) == 1180.0
    assert next_time(rule, 1089.999) == 1090.0


def test_an_interval_is_elapsed_time() -> None:
    start = at(BERLIN, 2026, 10, 24, 12)
    rule = Rule(every=86400.0, zone=BERLIN, start=start)
    assert shown(rule, start, 2) == ["10-25 11:00 +0100", "10-26 11:00 +0100"]


@given(
    every=st.floats(0.01, 10_000_000),
    start=st.floats(1, 4_000_000_000),
    after=st.floats(0, 4_000_000_000),
)
def test_an_interval_is_never_early_nor_late(every: float, start: float, after: float) -> None:
    rule = Rule(every=every, start=start)
    when = next_time(rule, after)
    assert when > after
    assert when == start or when - after <= every * (1 + 1e-9) + 1e-6
    assert next_time(rule, when) > when


def test_a_single_time_comes_once() -> None:
    rule = Rule(at=1000.0)
    assert times(rule, 0, 5) == [1000.0]
    assert next_time(rule, 1000.0) == math.inf


@pytest.mark.parametrize(
    "rule", [Rule(cron="* * * * *"), Rule(every=60.0), Rule(count=1, unit="day")], ids=str
)
def test_start_and_end_are_the_bounds_themselves(rule: Rule) -> None:
    start = at("", 2026, 5, 1, 12)
    fields = {name: getattr(rule, name) for name in ("cron", "every", "count", "unit")}
    bounded = Rule(**fields, start=start, end=start + 2 * 86400)
    found = times(bounded, 0, 10_000)
    assert found[0] == start
    assert found[-1] == start + 2 * 86400


# -- cron ----------------------------------------------------------------------------------------

part = st.sampled_from(["*", "*/7", "0", "1", "1,2", "1-3", "2", "2-3", "3", "3/5"])
crons = st.tuples(part, part, st.sampled_from(["*", "29", "L"]), st.sampled_from(["*", "3", "10"]))


@given(fields=crons, zone=st.sampled_from(ZONES), after=st.floats(1.75e9, 1.85e9))
def test_cron_agrees_with_debian(fields: tuple[str, ...], zone: str, after: float) -> None:
    # case C6: cronsim has Debian's rules for five fields; ours must hold for six as well.
    cron = " ".join([*fields, "*"])
    rule = Rule(cron=cron, zone=zone)
    expected = CronSim(cron, dt.datetime.fromtimestamp(math.floor(after), rule.tz))
    found = times(rule, after, 4)
    assert found == [next(expected).timestamp() for _ in found]
    assert times(Rule(cron=f"0 {cron}", zone=zone), after, 4) == found


@given(
    fields=crons,
    zone=st.sampled_from(ZONES),
    after=st.floats(1.7e9, 1.9e9),
    seconds=st.sampled_from(["", "*/20 ", "5,40 "]),
)
def test_times_only_grow(fields: tuple[str, ...], zone: str, after: float, seconds: str) -> None:
    found = times(Rule(cron=seconds + " ".join([*fields, "*"]), zone=zone), after, 20)
    assert all(b > a for a, b in itertools.pairwise([after, *found]))


def test_a_cron_ends_with_its_end() -> None:
    assert times(Rule(cron="0 0 1 1 *", end=at("", 2027, 1, 1)), at("", 2026, 1, 1), 5) == [
        at("", 2027, 1, 1)
    ]
