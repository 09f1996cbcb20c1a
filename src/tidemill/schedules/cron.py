"""The next time of a cron.

A cron whose minute or hour begins with ``*`` follows the clock. Its times in a skipped hour are
lost, and it fires twice in a repeated hour. Any other cron fires once for each local time
(:mod:`.local_time`).
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import zoneinfo

from cronsim import CronSim

from tidemill.schedules.local_time import UTC, instant


@functools.lru_cache(1024)  # many schedules are due at the same times
def cron_after(cron: str, zone: str, after: float) -> float:
    """The first time of a cron later than ``after``; infinity when there is none."""
    tz = zoneinfo.ZoneInfo(zone) if zone else UTC
    fields = cron.split()
    follows_clock = fields[-5].startswith("*") or fields[-4].startswith("*")
    now = dt.datetime.fromtimestamp(math.floor(after), tz)
    try:
        if follows_clock or tz is UTC:
            return next(CronSim(cron, now)).timestamp()
        for local in CronSim(cron, now.replace(tzinfo=None, fold=0)):
            when = instant(local, tz)
            if when > after:
                return when
    except (StopIteration, OverflowError, ValueError):
        pass
    return math.inf
