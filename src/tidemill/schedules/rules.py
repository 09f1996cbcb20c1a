"""The times of a rule, one after the other. Pure arithmetic without a clock.

Times are wall time in epoch seconds. A rule is one of four: cron, an interval, a calendar step, or
a single time. An interval is elapsed time: on the day on which the clock goes back, 24 hours end an
hour earlier by the clock. A calendar step keeps the local time of its zone, and the day of its
start where the month has it: from 31 January a month goes to 28 February and on to 31 March.

Local times that do not exist, or exist twice, follow Debian's cron. A skipped time comes at the
first moment after it. A repeated time counts the first time. So each intended local time comes
once. A cron whose minute or hour begins with ``*`` follows the clock instead: it does not make up
for a skipped hour, and runs through a repeated hour.
"""

from __future__ import annotations

import calendar
import datetime as dt
import functools
import math
import zoneinfo

import msgspec
from cronsim import CronSim

__all__ = ["UNITS", "Rule", "next_time", "times"]

UTC = dt.UTC
UNITS = ("day", "week", "month", "year")
"""Units of a calendar step."""


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of ``cron``, ``every``, ``unit`` with ``count``, or ``at``; the others are empty or 0.

    Attributes:
        cron: five fields, or six with seconds first.
        zone: of cron and calendar steps, by its IANA name; empty for UTC.
        every: the seconds of an interval.
        count, unit: of a calendar step, as 3 and ``month``.
        at: the single time.
        start: the earliest time. Intervals and steps count from it, and it is their first time.
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
        """The zone."""
        return zoneinfo.ZoneInfo(self.zone) if self.zone else UTC

    @property
    def counts_from_start(self) -> bool:
        """True for intervals and calendar steps, which need a ``start``."""
        return bool(self.every or self.unit)


def next_time(rule: Rule, after: float) -> float:
    """The first time of the rule later than ``after``; infinity when there is none."""
    if rule.cron:
        found = _next_cron(rule, max(after, math.nextafter(rule.start, 0)))
    elif rule.every:
        found = _next_interval(rule, after)
    elif rule.unit:
        found = _next_step(rule, after)
    else:
        found = rule.at if rule.at > after else math.inf
    return found if not rule.end or found <= rule.end else math.inf


def times(rule: Rule, after: float, most: int) -> list[float]:
    """The next times, up to the given number."""
    found: list[float] = []
    while len(found) < most and (after := next_time(rule, after)) < math.inf:
        found.append(after)
    return found


def _next_interval(rule: Rule, after: float) -> float:
    if after < rule.start:
        return rule.start
    steps = math.floor((after - rule.start) / rule.every)
    # The division may be off by a rounding: the first that really is later.
    return next(
        when for n in (steps, steps + 1, steps + 2) if (when := rule.start + n * rule.every) > after
    )


# -- local time ----------------------------------------------------------------------------------


def _instant(local: dt.datetime, tz: dt.tzinfo) -> float:
    """The moment of a local time: the first if it comes twice, the next if it is skipped."""
    aware = local.replace(tzinfo=tz)
    when = aware.timestamp()
    back = dt.datetime.fromtimestamp(when, tz).replace(tzinfo=None)
    if back == local:
        return when
    # Skipped: PEP 495 has it as far behind the gap as it is behind the gap's beginning.
    low, high = when - (back - local).total_seconds(), when
    before = dt.datetime.fromtimestamp(low, tz).utcoffset()
    while high - low > 1e-3:
        middle = (low + high) / 2
        if dt.datetime.fromtimestamp(middle, tz).utcoffset() == before:
            low = middle
        else:
            high = middle
    return float(round(high))


def _local(when: float, tz: dt.tzinfo) -> dt.datetime:
    return dt.datetime.fromtimestamp(when, tz).replace(tzinfo=None, fold=0)


# -- calendar steps ------------------------------------------------------------------------------


def _next_step(rule: Rule, after: float) -> float:
    if after < rule.start:
        return rule.start
    tz = rule.tz
    first = _local(rule.start, tz)
    n = max(1, _steps_until(rule, first, _local(after, tz)) - 1)
    while True:
        try:
            when = _instant(_stepped(rule, first, n), tz)
        except (OverflowError, ValueError):
            return math.inf  # beyond the year 9999
        if when > after:
            return when
        n += 1


def _steps_until(rule: Rule, first: dt.datetime, now: dt.datetime) -> int:
    """A lower bound of the steps between two local times, close to their number."""
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


# -- cron ----------------------------------------------------------------------------------------


@functools.lru_cache(1024)  # many schedules are due at the same times
def _cron_after(cron: str, zone: str, after: float) -> float:
    tz = zoneinfo.ZoneInfo(zone) if zone else UTC
    fields = cron.split()
    follows_clock = fields[-5].startswith("*") or fields[-4].startswith("*")
    now = dt.datetime.fromtimestamp(math.floor(after), tz)
    try:
        if follows_clock or tz is UTC:
            return next(CronSim(cron, now)).timestamp()
        for local in CronSim(cron, now.replace(tzinfo=None, fold=0)):
            when = _instant(local, tz)
            if when > after:
                return when
    except (StopIteration, OverflowError, ValueError):
        pass
    return math.inf


def _next_cron(rule: Rule, after: float) -> float:
    return _cron_after(rule.cron, rule.zone, after)
