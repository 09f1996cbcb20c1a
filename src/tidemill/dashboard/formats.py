"""Numbers, times and states as people read them."""

from __future__ import annotations

import datetime as dt
import time
import zoneinfo
from typing import NamedTuple

import msgspec

from tidemill.core.clock import clock as clocks
from tidemill.core.clock import local_time, short_id
from tidemill.core.fingerprint import FRAME, package_of
from tidemill.core.words import counted
from tidemill.doctor import words

NOTHING = "\N{EN DASH}"  # the text of an unknown value
ICONS = {  # the icon of each state, by its name in ``templates/icons.svg``
    "waiting": "link",
    "scheduled": "clock",
    "ready": "inbox",
    "running": "play",
    "succeeded": "check",
    "failed": "cross",
    "cancelled": "ban",
    "expired": "hourglass",
    "paused": "pause",
}


def number(value: float | None) -> str:
    """A count with separators; a dash for an unknown count."""
    return NOTHING if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A time span in two units at most; a dash for an unknown span."""
    return NOTHING if seconds is None else words.duration(seconds)


def ago(when: float | None, now: float | None = None) -> str:
    """How long ago a wall time was, or how long it is until a future wall time."""
    if not when:
        return NOTHING
    gone = (clocks.wall() if now is None else now) - when
    if abs(gone) < 1:
        return "now"
    return f"{duration(gone)} ago" if gone > 0 else f"in {duration(-gone)}"


def clock(when: float | None) -> str:
    """A wall time in the zone of the viewer, to the second, with the name of the zone."""
    return f"{local_time(when):%Y-%m-%d %H:%M:%S %Z}" if when else NOTHING


def zone_named(name: str) -> dt.tzinfo | None:
    if name == "localtime":  # Debian's link to the zone of the server, which no browser knows
        return None
    try:
        return dt.UTC if name == "UTC" else zoneinfo.ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        return None


def iso(when: float) -> str:
    """A wall time for machines, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


def size(count: float | None) -> str:
    """Bytes in a unit that fits; a dash for an unknown number."""
    return NOTHING if count is None else words.size(count)


def percent(part: float | None) -> str:
    if part is None:
        return NOTHING
    return f"{part * 100:.1f} %" if 0 < part < 0.1 else f"{part * 100:.0f} %"


def rate(per_second: float | None) -> str:
    """Jobs per second, minute or hour: the unit depends on the size of the number."""
    if per_second is None:
        return NOTHING
    for per, name in ((1, "s"), (60, "min"), (3600, "h")):
        value = per_second * per
        if value >= 1 or (name == "h" and value >= 0.1):
            return f"{value:,.0f}/{name}" if value >= 100 else f"{value:.3g}/{name}"
    return "0/s"


def as_json(value: object) -> str:
    """A value as JSON, for an attribute that a script reads."""
    return msgspec.json.encode(value).decode()


class Frames(NamedTuple):
    """A part of a traceback: frames of other code than the user's, or all lines between them."""

    text: str
    packages: tuple[str, ...] = ()  # the packages of the frames; empty for the other parts
    number: int = 0  # the number of frames


def frames(traceback: str) -> list[Frames]:
    """The parts of a traceback, in order; a single part if it has no frame of the user's code."""
    parts: list[Frames] = []
    inside, package = "\n", ""  # how the lines of the present frame begin
    for line in traceback.splitlines(keepends=True):
        found = FRAME.match(line.rstrip("\n"))
        if found:
            inside, package = f"{line[: line.index('File')]}  ", package_of(found[1])
        elif not line.startswith((inside, f"{inside[:-2]}[")):
            inside, package = "\n", ""
        last = parts[-1] if parts else Frames("")
        if parts and bool(last.packages) == bool(package):
            parts.pop()
        else:
            last = Frames("")
        names = (*last.packages, *([package] if package not in (*last.packages, "") else []))
        parts.append(Frames(last.text + line, names, last.number + bool(found)))
    is_users = any(part.number and not part.packages for part in parts)
    return parts if is_users else [Frames(traceback)]


FILTERS = {
    "number": number,
    "counted": counted,
    "duration": duration,
    "ago": ago,
    "clock": clock,
    "iso": iso,
    "size": size,
    "percent": percent,
    "rate": rate,
    "short_id": short_id,
    "json": as_json,
    "frames": frames,
}
