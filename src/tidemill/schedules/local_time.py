"""The moments of local times, also on days on which a zone's clock goes forward or back.

Local times that do not exist, or exist twice, follow Debian's cron. A skipped local time means the
first moment after the gap. A repeated local time means its first moment. So a schedule fires once
for each planned local time.
"""

from __future__ import annotations

import datetime as dt

UTC = dt.UTC


def instant(local: dt.datetime, tz: dt.tzinfo) -> float:
    """The moment of a local time: the first moment of a repeated time; for a skipped time, the end
    of the gap."""
    aware = local.replace(tzinfo=tz)
    when = aware.timestamp()
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
    """The local time of a moment, without its zone."""
    return dt.datetime.fromtimestamp(when, tz).replace(tzinfo=None, fold=0)
