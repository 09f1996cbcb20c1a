"""Check the times that a user gives for a schedule, and turn them into a rule."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import zoneinfo
from collections.abc import Iterator
from typing import Any, TypedDict

import msgspec
from cronsim import CronSim, CronSimError

from tidemill.core import config
from tidemill.core.clock import clock
from tidemill.errors import InvalidOption, TidemillError
from tidemill.schedules.rules import UNITS, Rule, next_time


class ScheduleOptions(TypedDict, total=False):
    """The options of :meth:`Tidemill.schedule`, as in :class:`When`."""

    cron: str | None
    every: config.Seconds | None
    at: dt.datetime | float | None
    zone: str | zoneinfo.ZoneInfo | None
    start: dt.datetime | float | None
    end: dt.datetime | float | None
    repeats: int | None
    jitter: config.Seconds | None
    catch_up: bool


OPTIONS = tuple(ScheduleOptions.__annotations__)

_NO_END = 6325  # a schedule whose end is in this year or later has no end
LEAST = 0.01  # the shortest interval, in seconds
_ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS = {
    "second": "0 to 59",
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31, or L",
    "month": "1 to 12, or JAN to DEC",
    "day-of-week": "0 (Sunday) to 7, or SUN to SAT",
}


class When:
    """The times of a schedule: one of ``cron``, ``every`` and ``at``, with further options.

    Args:
        cron: five fields (minute, hour, day of month, month, day of week), or six with seconds
            first, or ``@hourly``, ``@daily``, ``@weekly``, ``@monthly``, ``@yearly``.
        every: seconds or a timedelta; or a text such as ``"15 minutes"``, ``"day"``, ``"3
            months"``. A text in days or longer units keeps the local time. It also keeps the day of
            the month, if the month has this day.
        at: a single time: an aware datetime or epoch seconds.
        zone: the time zone of ``cron`` and of ``every`` in days or longer units, as
            ``"Europe/Berlin"``. The default is the named zone of ``start``, else UTC. A datetime
            without a zone gets the zone that ``zone`` or ``start`` names. If neither names a zone,
            this datetime is refused.
        start: the earliest time. ``every`` counts from ``start``, which is its first time. Without
            ``start`` the first time is one interval after the schedule is stored.
        end: the latest time.
        repeats: the number of jobs after which the schedule ends.
        jitter: the most seconds by which a job is late, at random.
        catch_up: True puts one job for each time that was missed while no worker ran; False puts
            one job for all missed times together.

    Raises:
        InvalidOption: a value is wrong; the message names the option, and the field of a cron.
    """

    def __init__(
        self,
        cron: str | None = None,
        *,
        every: config.Seconds | None = None,
        at: dt.datetime | float | None = None,
        zone: str | zoneinfo.ZoneInfo | None = None,
        start: dt.datetime | float | None = None,
        end: dt.datetime | float | None = None,
        repeats: int | None = None,
        jitter: config.Seconds | None = None,
        catch_up: bool = False,
    ) -> None:
        given = {"cron": cron, "every": every, "at": at}
        named = [f"{name}=" for name, value in given.items() if value is not None]
        if len(named) != 1:
            advice = f"not both {' and '.join(named)}" if named else "as cron='0 3 * * *'"
            raise InvalidOption(f"a schedule takes one of cron=, every= and at=, {advice}")
        tz = _zone(zone, start)
        local = cron is not None or isinstance(every, str)
        if local and tz is None and isinstance(start, dt.datetime) and start.utcoffset():
            raise InvalidOption(
                "zone must be named, as zone='Europe/Berlin': start has the fixed offset "
                f"{start.tzname()}, which does not follow daylight-saving time"
            )
        rule = Rule(
            cron=_cron(cron) if cron is not None else "",
            zone=tz.key if tz else "",
            at=_moment("at", at, tz),
            start=_moment("start", start, tz),
            end=_end(end, tz),
            **(_every(every) if every is not None else {}),
        )
        if rule.end and rule.end < rule.start:
            raise InvalidOption("end is before start: the schedule would never fire")
        endless = msgspec.structs.replace(rule, end=0.0)
        if rule.cron and next_time(endless, rule.start) == math.inf:
            raise InvalidOption(f"cron {cron!r} never comes")
        if rule.at and (repeats is not None or start is not None or end is not None):
            raise InvalidOption("at= comes once: leave out repeats=, start= and end=")
        if not isinstance(catch_up, bool):
            raise InvalidOption(f"catch_up must be True or False, not {catch_up!r}")
        self.rule = rule
        self.said = clock.wall() if rule.at or rule.start or rule.end else 0.0
        self.repeats = 0 if repeats is None else config.check_count("repeats", repeats, 1)
        self.jitter = 0.0 if jitter is None else config.check_seconds("jitter", jitter)
        self.catch_up = catch_up
        if rule.every and self.jitter > rule.every:
            raise InvalidOption(f"jitter is longer than every={rule.every:g} s; take a shorter one")

    def _terms(self) -> tuple[object, ...]:
        return self.rule, self.repeats, self.jitter, self.catch_up

    def __eq__(self, other: object) -> bool:
        return isinstance(other, When) and self._terms() == other._terms()

    def __hash__(self) -> int:
        return hash(self._terms())

    def __repr__(self) -> str:
        return f"When({self.rule!r})"


Timing = config.Seconds | When
"""The times of a schedule: a cron text, seconds, a timedelta, or a :class:`When`."""


def when_of(when: Timing | None, options: ScheduleOptions) -> When:
    """The rule of a schedule from a cron text, seconds, a timedelta, a ``When``, or its options.

    Raises:
        InvalidOption: the value is none of these, or both forms were given.
    """
    config.check_known("a schedule", options, OPTIONS)
    if when is None:
        return When(**options)
    if isinstance(when, When):
        if options:
            raise InvalidOption("give either a When or its options, not both")
        return when
    if isinstance(when, bool) or not isinstance(when, (str, int, float, dt.timedelta)):
        raise InvalidOption(
            f"a schedule must be a cron text, seconds, a timedelta or When(…), not {when!r}"
        )
    field = "cron" if isinstance(when, str) else "every"
    if field in options:
        raise InvalidOption(f"the schedule has {when!r} already; leave {field}= out")
    given: dict[str, Any] = {**options, field: when}
    return When(**given)


def _zone(zone: object, start: object) -> zoneinfo.ZoneInfo | None:
    if zone is None:
        tz = start.tzinfo if isinstance(start, dt.datetime) else None
        return tz if isinstance(tz, zoneinfo.ZoneInfo) and tz.key else None
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        return zone
    try:
        if isinstance(zone, str) and zone:
            return zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise InvalidOption(
        f"zone {zone!r} is no time zone of this machine; write a name as 'Europe/Berlin'"
    )


def _moment(field: str, value: Any, tz: zoneinfo.ZoneInfo | None) -> float:
    if value is None:
        return 0.0
    if isinstance(value, dt.datetime) and value.tzinfo is None and tz is not None:
        value = value.replace(tzinfo=tz)
    return config.check_moment(field, value)


def _end(value: Any, tz: zoneinfo.ZoneInfo | None) -> float:
    """The end of a schedule. ``datetime.max`` and the like mean no end, which is 0."""
    far = isinstance(value, dt.datetime) and value.year >= _NO_END
    return 0.0 if far else _moment("end", value, tz)


def _every(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        seconds = config.check_seconds("every", value)
        if seconds < LEAST:
            raise InvalidOption(f"every must be at least {LEAST} s, not {value!r}")
        return {"every": seconds}
    count, unit = config.count_and_unit(value)
    if unit in config.ELAPSED:
        return _every(float(count or 1) * config.ELAPSED[unit])
    if unit in UNITS and "." not in count:
        return {"count": config.check_count("every", int(count or 1), 1, 10_000), "unit": unit}
    raise InvalidOption(
        f"every {value!r} is no interval; write a whole number of seconds, minutes, hours, days, "
        "weeks, months or years, as '15 minutes', or give seconds as a number"
    )


def _cron(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidOption(f"cron must be a text as '*/5 * * * *', not {text!r}")
    cron = " ".join(_ALIASES.get(text.strip().lower(), text).split())
    try:
        CronSim(cron, dt.datetime(2024, 1, 1))
    except CronSimError as error:
        raise InvalidOption(_bad_cron(text, cron.split(), str(error))) from None
    return cron


def _is_cron(fields: list[str]) -> bool:
    try:
        CronSim(" ".join(fields), dt.datetime(2024, 1, 1))
    except CronSimError:
        return False
    return True


def _bad_cron(text: str, fields: list[str], error: str) -> str:
    names = list(_FIELDS)[-len(fields) :]
    if len(fields) not in (5, 6):
        return (
            f"cron {text!r} has {len(fields)} fields; it takes five: minute, hour, day of month, "
            "month, day of week, or six with seconds first"
        )
    bad = error.removeprefix("Bad ")
    if bad not in names:
        return f"cron {text!r} cannot be used: {error}"
    field = fields[names.index(bad)]
    if bad == "day-of-month" and _is_cron([*fields[:-2], "*", fields[-1]]):
        return f"cron {text!r} never comes: no month {fields[-2]!r} has a day {field!r}"
    return f"cron {text!r}: its {bad} {field!r} is wrong; it goes from {_FIELDS[bad]}"


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    try:
        yield
    except TidemillError as error:
        error.args = (f"schedule {name!r} cannot be stored: {error}", *error.args[1:])
        raise
