"""Rules of schedules in words: ``0 3 * * 1-5`` is "at 03:00, Monday to Friday".

A cron rule that has no short form in words comes back as its fields, each with its name.
"""

from __future__ import annotations

import re

from tidemill.schedules.rules import Rule, moment_of

_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTHS = (
    *("", "January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_MONTH_NAMES = (
    *("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"),
)
_TIMES_MOST = 6
_STEP = re.compile(r"(\*|\d+(?:-\d+)?)/(\d+)")


def in_words(rule: Rule) -> str:
    zone = f" {rule.zone}" if rule.zone else ""
    if rule.cron:
        return f"{rule.cron}{zone}"
    if rule.every:
        return f"every {rule.every:g} s"
    if rule.unit:
        step = f"every {rule.unit}" if rule.count == 1 else f"every {rule.count} {rule.unit}s"
        return step + zone
    return f"once at {moment_of(rule, rule.at).isoformat(' ', 'seconds')}"


def cron_in_words(cron: str) -> str:
    """A cron text of five fields, or six with seconds first, in words."""
    fields = cron.split()
    if len(fields) not in (5, 6):
        return cron
    seconds = fields[0] if len(fields) == 6 else "0"
    minute, hour, day, month, weekday = fields[-5:]
    time = _time(seconds, minute, hour)
    days = _day(day, weekday)
    months = _named(month, _MONTHS, _MONTH_NAMES, 1)
    if not days and not months and time.startswith("at ") and time[3:5].isdigit():
        return f"every day {time}"
    parts = [time, days, f"in {months}" if months else ""]
    return ", ".join(part for part in parts if part)


def _time(second: str, minute: str, hour: str) -> str:
    minutes, hours = _numbers(minute), _numbers(hour)
    if second == "0" and minutes and hours and len(minutes) * len(hours) <= _TIMES_MOST:
        return "at " + _and([f"{h:02d}:{m:02d}" for h in hours for m in minutes])
    parts = []
    if second not in ("0", "*"):
        parts.append(_part(second, "second"))
    elif second == "*":
        parts.append("every second")
    if minute != "*" or second == "0":
        parts.append(_part(minute, "minute"))
    if hour != "*":
        parts.append(_part(hour, "hour"))
    return ", ".join(parts)


def _part(field: str, name: str) -> str:
    """A field of the time: ``every 5 minutes``, ``minute 10 and 40``."""
    if field == "*":
        return f"every {name}"
    found = _STEP.fullmatch(field)
    if found:
        span, step = found.groups()
        often = f"every {name}" if step == "1" else f"every {step} {name}s"
        return often if span == "*" else f"{often} {_span(span, name)}"
    if re.fullmatch(r"\d+-\d+", field):
        return f"every {name} {_span(field, name)}"
    numbers = _numbers(field)
    if numbers:
        return f"at {name} {_and([str(number) for number in numbers])}"
    return f"{name} {field}"


def _span(span: str, name: str) -> str:
    first, _, last = span.partition("-")
    return f"from {name} {first} to {last}" if last else f"from {name} {first} on"


def _day(day: str, weekday: str) -> str:
    parts = []
    if day == "L":
        parts.append("on the last day of the month")
    elif (found := _STEP.fullmatch(day)) and found[1] == "*":
        parts.append(f"every {found[2]} days of the month")
    elif day != "*":
        numbers = _numbers(day)
        text = _and([_ordinal(number) for number in numbers]) if numbers else f"day {day}"
        parts.append(f"on the {text}" if numbers else f"on {text}")
    days = _named(weekday, _DAYS, _DAY_NAMES, 0)
    if days:
        parts.append(f"on {days}" if "to" not in days.split() else days)
    return " or ".join(parts)


def _named(field: str, names: tuple[str, ...], short: tuple[str, ...], base: int) -> str:
    """Months or days of the week by their names; empty for all."""
    if field == "*":
        return ""
    text = field.upper()
    for number, name in enumerate(short):
        text = re.sub(rf"\b{name}\b", str(number + base), text)
    parts = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        known = first.isdigit() and int(first) < len(names) and names[int(first)]
        ends = not dash or (last.isdigit() and int(last) < len(names))
        if not known or not ends:
            return field
        parts.append(f"{names[int(first)]} to {names[int(last)]}" if dash else names[int(first)])
    return _and(parts)


def _numbers(field: str) -> list[int]:
    """The numbers of a list such as ``0,30``; empty for anything else."""
    parts = field.split(",")
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else []


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _ordinal(number: int) -> str:
    ending = "th" if number in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
