"""Time and ids.

There are three clocks (law 19 of ``docs/laws.md``). *Wall* time is for people and for ``at=``.
*Machine* time is for durations and leases; no adjustment moves this time. The third is the
*store's* own time, which each broker builds on these two. All are seconds as floats.

The ids that tidemill makes sort by creation. An id has 26 hexadecimal characters: 11 for the
millisecond, 10 for the process, 5 for a counter. Random ids would scatter writes over the whole
tree of an LMDB store. The last 8 characters tell the jobs of a store apart, so lists for people
show only these 8.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import os
import time
from collections.abc import Callable
from contextvars import ContextVar

from tidemill.core import forks

# CLOCK_BOOTTIME goes on while a laptop sleeps, CLOCK_MONOTONIC stops. macOS lacks CLOCK_BOOTTIME.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock:
    """The clocks of this process. All its code reads them through :data:`clock`; a test moves them.

    Code that really waits, for a descriptor or a lock, measures its wait with ``time.monotonic``.

    Attributes:
        wall: reads the wall time.
        machine: reads the seconds since this machine booted. This clock never jumps, and all
            processes read the same.
        server_ahead: reads the seconds that brokers add to the time of their server. Only a test
            changes them.
        database: reads the time of a database that has no clock: the wall time. A test moves
            this time with the clocks of servers.
    """

    def __init__(self) -> None:
        self.wall: Callable[[], float] = time.time
        self.machine: Callable[[], float] = functools.partial(time.clock_gettime, _CLOCK)
        self.server_ahead: Callable[[], float] = float  # 0.0
        self.database: Callable[[], float] = time.time


clock = Clock()


class _Ids:
    """Makes the ids of this process, which never repeat, even when the wall clock goes back."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # The last 8 characters are the counter and 3 characters of the process. The counter starts
        # at a random number, so that these 8 characters differ between processes. The number is in
        # the lower half, so that the counter wraps late.
        start = int.from_bytes(os.urandom(3)) >> 5  # 19 bits
        self.tick = itertools.count(start).__next__  # atomic under the GIL, so no lock is needed
        self.process = os.urandom(5).hex()


_ids = _Ids()
forks.after_fork(_ids.reset)


def new_id() -> str:
    if not forks.mark[0]:
        forks.enter_child()
    moment, count = int(clock.wall() * 1000), _ids.tick() & 0xFFFFF
    return "%011x%s%05x" % (moment, _ids.process, count)  # noqa: UP031 - quicker than an f-string


def id_floor(seconds: float) -> bytes:
    """The lowest id that tidemill can make at a wall time, encoded."""
    return b"%011x" % int(seconds * 1000)


def id_time(job_id: str) -> float | None:
    """The wall time at which tidemill made an id; None for an id chosen by a user."""
    job_id = job_id.partition(".")[0]  # the rest names a part of a chain or group
    if len(job_id) != 26:
        return None
    try:
        int(job_id, 16)
    except ValueError:
        return None
    return int(job_id[:11], 16) / 1000


_SHORT = 8


def short_id(job_id: str) -> str:
    """The last characters of an id, for people; an id that a user chose stays whole."""
    # The id of a part of a chain or group also keeps its suffix, which names the part.
    return job_id[26 - _SHORT :] if id_time(job_id) is not None else job_id


reader_zone: ContextVar[dt.tzinfo | None] = ContextVar("reader_zone", default=None)
"""The time zone in which texts for people show times; None for the zone of this process."""

_LATEST = 253_402_000_000.0  # in the year 9999, which is the last of ``datetime``


def local_time(moment: float) -> dt.datetime:
    """A wall time in the zone of the person who reads the text."""
    return dt.datetime.fromtimestamp(min(moment, _LATEST), dt.UTC).astimezone(reader_zone.get())
