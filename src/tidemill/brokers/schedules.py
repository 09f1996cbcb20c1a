"""Schedules as a broker has them: a name, a due time, and bytes it never opens.

The broker knows nothing of cron. It keeps a record under each name, hands those that are due to a
worker's supervisor, and changes records by compare-and-set, with jobs put in the same step. What
the bytes say, and when a schedule is due next, is in :mod:`tidemill.schedules`.

    due ──(handed out)──► claimed, for a second ──(changed: the next due time, the job)──► due
                              └──(who had it is dead)──► handed out again

So a schedule fires exactly once for each due time, with any number of workers and no leader: of two
that were handed the same version, the change of one succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.job import Envelope

__all__ = ["CLAIM", "Change", "Changed", "LeftOut", "Schedule", "Schedules"]

CLAIM = 1.0
"""Seconds after which a due schedule that was handed out, and not changed, is handed out again."""


class LeftOut:
    """Why a job of a change was not put."""

    ID = "id"  # a job has its id
    KEY = "key"  # an unfinished job has its key, and is kept as it is, or merged with
    FULL = "full"  # its queue holds max_size jobs


class Schedule(msgspec.Struct, frozen=True):
    """One record.

    Attributes:
        name: what it is known by.
        version: fresh with every change, never 0; it counts nothing.
        due: wall time at which it is to be handed out; 0 for never.
        body: what the broker never opens.
    """

    name: str
    version: int
    due: float = 0.0
    body: bytes = b""


class Change(msgspec.Struct, array_like=True, frozen=True):
    """What is to become of a record, if it still has the version expected, and jobs to put then.

    Attributes:
        name: the record's.
        expect: its version; 0 when there must be none of that name.
        due, body: as they are to be.
        gone: it is to be no more.
        jobs: put in the same step. They wait for nothing.
        instead: due and body as they are to be, and it stays, should every job be left out; without
            a body that changes nothing.
    """

    name: str
    expect: int
    due: float = 0.0
    body: bytes = b""
    gone: bool = False
    jobs: tuple[Envelope, ...] = ()
    instead: tuple[float, bytes] = (0.0, b"")


class Changed(msgspec.Struct, array_like=True, frozen=True):
    """What a change did.

    Attributes:
        done: False when the record had another version, and nothing was changed.
        version: the record's new one; 0 when it is gone, or nothing was changed.
        left_out: for each job that was not put, why (:class:`LeftOut`), in order.
    """

    done: bool = False
    version: int = 0
    left_out: tuple[str, ...] = ()


class Schedules(Protocol):
    """The part of the seam that keeps schedules."""

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        """The records of these names, of one moment."""
        ...

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        """Records by name (as UTF-8 sorts), from the first one behind ``after`` on."""
        ...

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        """Change records and put their jobs, each of the changes by itself, all as one step.

        A job whose id is taken, whose key another has, or whose queue is full is left out, and the
        change is made all the same: a schedule must not fall behind, nor fill a queue beyond its
        ``max_size``. A job whose key an unfinished one has is no matter of ``max_size``: there is
        at most one more of them. Sleepers learn of an earlier due time.

        Raises:
            StoreFull, StoreMoved: nothing was changed.
        """
        ...
