"""Time and ids.

Three clocks are told apart (law 19): *wall* time, for people and for ``at=``; *machine* time, which
no adjustment moves, for durations and leases; and a store's own time, which each broker builds on
these. All are seconds as floats.

Own ids are 26 hexadecimal characters that sort by creation: 11 for the millisecond, 5 for a
counter, 10 for the process. Random ids would scatter writes over the whole tree of an LMDB store.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time

__all__ = ["id_floor", "id_time", "machine_time", "new_id", "wall_time"]

wall_time = time.time

# CLOCK_BOOTTIME goes on while a laptop sleeps, CLOCK_MONOTONIC does not; macOS has only the latter.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


# Default arguments are locals, which are fast; every hot path calls this.
def machine_time(_read=time.clock_gettime, _clock=_CLOCK) -> float:  # type: ignore[no-untyped-def]
    """Seconds since this machine booted; never steps, the same in all its processes."""
    return _read(_clock)  # type: ignore[no-any-return]


class _Ids:
    """The id source of this process: ids strictly increase, also when the wall clock goes back."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # Counters of neighbouring processes may meet; the process part keeps them apart.
        self.tick = itertools.count(1).__next__  # atomic under the GIL, so no lock is needed
        self.process = secrets.token_hex(5)


_ids = _Ids()
os.register_at_fork(after_in_child=_ids.reset)


def new_id() -> str:
    """A new job id: unique without coordination, in the order of creation."""
    moment = int(time.time() * 1000) << 20 | _ids.tick() & 0xFFFFF
    return "%016x%s" % (moment, _ids.process)  # noqa: UP031 - a third quicker than an f-string


def id_floor(seconds: float) -> bytes:
    """The lowest id that may be made at a wall time, encoded."""
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
