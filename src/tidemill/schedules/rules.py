"""The times of a rule, one after the other. Pure arithmetic without a clock.

Times are wall time in epoch seconds. A rule is one of four: cron, an interval, a calendar period,
or a single time. An interval is elapsed time: after 24 hours, a clock that was put back in this
time shows one hour less. A calendar period keeps the local time of its zone. It also keeps the day
of its start, if the month has this day. For example, the times of a monthly rule from 31 January
are 28 February and 31 March. Local times that do not exist, or exist twice, follow Debian's cron: a
skipped local time means the first moment after the gap, a repeated local time its first moment.
"""

from __future__ import annotations

import calendar
import datetime as dt
import functools
import math
import zoneinfo

import msgspec
from cronsim import CronSim

UNITS = ("day", "week", "month", "year")  # units of a calendar period


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of ``cron``, ``every``, ``unit`` with ``count``, or ``at``; the others are empty or 0.

    Attributes:
        cron: five fields, or six with seconds first.
        zone: the zone of cron and calendar periods, by its IANA name; empty for UTC.
        every: the seconds of an interval.
        count, unit: a calendar period, as 3 and ``month``.
        at: the single time.
        start: the earliest time. Intervals and calendar periods count from this time, which is
            their first time.
        end: the latest time; 0 for no end.
    """

    cron: str = ""
    zone: str = ""
    every: float = 0.0
    count: int = 0
    unit: str = ""
    at: float = 0.0
    start: float = 0.0
    end: float = 0.0

    @property
    def tz(self) -> dt.tzinfo:
        return zoneinfo.ZoneInfo(self.zone) if self.zone else dt.UTC

    @property
    def counts_from_start(self) -> bool:
        """True for intervals and calendar periods, which need a ``start``."""
        return bool(self.every or self.unit)


def next_time(rule: Rule, after: float) -> float:
    """The first time of the rule later than ``after``; infinity when there is none."""
    if rule.cron:
        found = cron_after(rule.cron, rule.zone, max(after, math.nextafter(rule.start, 0)))
    elif rule.every:
        found = _next_interval(rule, after)
    elif rule.unit:
        found = _next_step(rule, after)
    else:
        found = rule.at if rule.at > after else math.inf
    return found if not rule.end or found <= rule.end else math.inf


def moment_of(rule: Rule, when: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(when, rule.tz)


def times(rule: Rule, after: float, most: int) -> list[float]:
    found: list[float] = []
    while len(found) < most and (after := next_time(rule, after)) < math.inf:
        found.append(after)
    return found


def _next_interval(rule: Rule, after: float) -> float:
    if after < rule.start:
        return rule.start
    steps = math.floor((after - rule.start) / rule.every)
    # The division may be off by a rounding error, so take the first time that is later.
    return next(
        when for n in (steps, steps + 1, steps + 2) if (when := rule.start + n * rule.every) > after
    )


@functools.lru_cache(1024)  # many schedules are due at the same times
def cron_after(cron: str, zone: str, after: float) -> float:
    """The first time of a cron later than ``after``; infinity when there is none.

    A cron whose minute or hour begins with ``*`` follows the clock. Its times in a skipped hour are
    lost, and it fires twice in a repeated hour. Any other cron fires once for each local time.
    """
    tz = zoneinfo.ZoneInfo(zone) if zone else dt.UTC
    fields = cron.split()
    follows_clock = fields[-5].startswith("*") or fields[-4].startswith("*")
    now = dt.datetime.fromtimestamp(math.floor(after), tz)
    try:
        if follows_clock or tz is dt.UTC:
            return next(CronSim(cron, now)).timestamp()
        for local in CronSim(cron, now.replace(tzinfo=None, fold=0)):
            when = instant(local, tz)
            if when > after:
                return when
    except (StopIteration, OverflowError, ValueError):
        pass
    return math.inf


def _next_step(rule: Rule, after: float) -> float:
    if after < rule.start:
        return rule.start
    tz = rule.tz
    first = local_time(rule.start, tz)
    n = max(1, _steps_until(rule, first, local_time(after, tz)) - 1)
    while True:
        try:
            when = instant(_stepped(rule, first, n), tz)
        except (OverflowError, ValueError):
            return math.inf  # beyond the year 9999
        if when > after:
            return when
        n += 1


def _steps_until(rule: Rule, first: dt.datetime, now: dt.datetime) -> int:
    """A number of steps between two local times that is exact or a little too low."""
    if rule.unit in ("day", "week"):
        return (now - first).days // (rule.count * (7 if rule.unit == "week" else 1))
    months = (now.year - first.year) * 12 + now.month - first.month
    return months // (rule.count * (12 if rule.unit == "year" else 1))


def _stepped(rule: Rule, first: dt.datetime, n: int) -> dt.datetime:
    if rule.unit in ("day", "week"):
        return first + dt.timedelta(days=n * rule.count * (7 if rule.unit == "week" else 1))
    months = n * rule.count * (12 if rule.unit == "year" else 1)
    years, month = divmod(first.month - 1 + months, 12)
    year, month = first.year + years, month + 1
    day = min(first.day, calendar.monthrange(year, month)[1])
    return first.replace(year=year, month=month, day=day)


def instant(local: dt.datetime, tz: dt.tzinfo) -> float:
    """The moment of a local time; for a skipped time, the end of the gap."""
    when = local.replace(tzinfo=tz).timestamp()
    back = dt.datetime.fromtimestamp(when, tz).replace(tzinfo=None)
    if back == local:
        return when
    # The time is skipped. By PEP 495, ``when`` is as far after the gap as the local time is after
    # the start of the gap. So search for the end of the gap between ``low`` and ``when``.
    low, high = when - (back - local).total_seconds(), when
    before = dt.datetime.fromtimestamp(low, tz).utcoffset()
    while high - low > 1e-3:
        middle = (low + high) / 2
        if dt.datetime.fromtimestamp(middle, tz).utcoffset() == before:
            low = middle
        else:
            high = middle
    return float(round(high))


def local_time(when: float, tz: dt.tzinfo) -> dt.datetime:
    return dt.datetime.fromtimestamp(when, tz).replace(tzinfo=None, fold=0)
