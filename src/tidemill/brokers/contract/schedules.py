"""The part of the contract that keeps schedules: a name, a due time, and bytes.

The broker never opens the bytes and knows nothing of cron. The broker keeps a record under each
name and hands due records to a worker's supervisor. A change of a record is a compare-and-set, and
the same commit puts the jobs of the change. :mod:`tidemill.schedules` writes the bytes and computes
the next due time.

    due ──(handed out)──► claimed, for a second ──(changed: the next due time, the job)──► due
                              └──(the claimant died)──► handed out again

So a schedule fires exactly once for each due time, with any number of workers and no leader. If two
workers received the same version, only the first can change the record.

Declarations of tasks (their options) are records, too (:data:`DECLARATION`). A declaration comes
due after a long time in which no worker has renewed it (:mod:`tidemill.worker.declarations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.core.envelope import Envelope

CLAIM = 1.0  # seconds after which a due schedule is handed out again, unless it was changed
DECLARATION = "\x01"
"""The beginning of the name of a task's declaration; the name of the task follows.

Names of schedules have no control characters. So declarations are listed before all schedules.
"""

BINDINGS = "\x02bindings"  # the record of all bindings to topics (:mod:`..generic.topics`)
NOTE = "\x03"  # the beginning of the name of a note (:mod:`..generic.notes`)
LAST_OWN = "\x1f"  # after this name a list has only schedules, and no record of tidemill's own


class LeftOut:
    """The reasons why a job of a change is not put."""

    ID = "id"  # another job has its id
    KEY = "key"  # another job has its key
    FULL = "full"  # its queue is full (``max_size``)


class Schedule(msgspec.Struct, frozen=True):
    """One record.

    Attributes:
        version: a new number with every change, never 0, in no order.
        due: the wall time at which the record is handed out; 0 for never.
        body: bytes that the broker never opens.
    """

    name: str
    version: int
    due: float = 0.0
    body: bytes = b""


class Change(msgspec.Struct, array_like=True, frozen=True):
    """A new record in place of the expected version, with jobs to put in the same step.

    Attributes:
        expect: the version that the record must have; 0 when no record of the name may exist.
        jobs: jobs to put in the same step. They wait for no other jobs.
        instead: the due time and body to store when every job is left out; the record then stays,
            even with ``gone``. With an empty body in ``instead``, the change is the same with and
            without its jobs.
    """

    name: str
    expect: int
    due: float = 0.0
    body: bytes = b""
    gone: bool = False
    jobs: tuple[Envelope, ...] = ()
    instead: tuple[float, bytes] = (0.0, b"")


class Changed(msgspec.Struct, array_like=True, frozen=True):
    """The effect of a change.

    Attributes:
        done: False when the record had another version, and nothing was changed.
        version: the new version of the record; 0 when it is deleted or unchanged.
        left_out: for each job that was not put, the reason (:class:`LeftOut`), in order.
    """

    done: bool = False
    version: int = 0
    left_out: tuple[str, ...] = ()


class Schedules(Protocol):
    def wall(self) -> float:
        """The wall time by which schedules are due: the server's, or of this machine."""
        ...

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        """The records of these names, read at one moment."""
        ...

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        """Records in the order of their names in UTF-8, from the first name after ``after`` on."""
        ...

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        """Make these changes and put their jobs, all in one commit.

        A refused change does not stop the other changes. A job is left out when its id is taken,
        its key is held, or its queue is full. The change is made even if its jobs are left out: a
        schedule must not fall behind, nor fill a queue beyond its ``max_size``. ``max_size`` does
        not apply to a job whose key is held, since each key can add only one job. Sleeping owners
        learn of an earlier due time.

        Raises:
            StoreFull, StoreMoved: nothing was changed.
        """
        ...
