"""The part of the contract that reads: queues in numbers, and records page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tidemill.core.errors import InvalidOption
from tidemill.core.job import Owner, Record, State

__all__ = [
    "TOTALS",
    "Filter",
    "Inspection",
    "Page",
    "QueueStats",
    "bad_cursor",
    "matches",
    "number_of",
    "totals_of",
]


_UNKNOWN = frozenset(
    {
        *("scheduled", "running", "oldest"),
        *("accepted", "succeeded", "failed", "retried", "cancelled", "expired", "purged"),
    }
)


class QueueStats(msgspec.Struct, kw_only=True):
    """A queue in numbers. Totals count since the store was made or the queue was deleted.

    Attributes:
        oldest: the wall time at which the ready job that was accepted first was made; 0 when no job
            is ready. A store may look only at its 256 highest priorities, and skip jobs under a
            limit.
        carried: the number of ready jobs that lie with the carrier (:mod:`.carrier`).
        consumers: the number of consumers that a server counts, for a broker that cannot look into
            its queues; else -1. Such a broker also knows ``ready``; its other numbers are 0, and
            ``unknown`` names them.
    """

    name: str
    waiting: int = 0
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    paused: bool = False
    max_size: int = 0
    accepted: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    expired: int = 0
    purged: int = 0
    oldest: float = 0.0
    carried: int = 0
    consumers: int = -1

    @property
    def unknown(self) -> frozenset[str]:
        """The names of the numbers that the broker does not know."""
        return _UNKNOWN if self.consumers >= 0 else frozenset()

    @property
    def size(self) -> int:
        """Unfinished jobs: waiting, scheduled, ready and running."""
        return self.waiting + self.scheduled + self.ready + self.running

    def public(self) -> dict[str, Any]:
        """The numbers as plain data for programs; None for a number that the broker lacks."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        values |= {"size": self.size, "oldest": self.oldest or None}
        if self.unknown:
            return values | dict.fromkeys([*self.unknown, "size"])
        del values["consumers"]
        return values


class Filter(msgspec.Struct, kw_only=True, frozen=True):
    """Conditions on jobs; a job matches when every given condition holds."""

    states: frozenset[State] = frozenset()
    queue: str = ""
    task: str = ""
    key: str = ""
    tag: str = ""
    text: str = ""
    id_prefix: str = ""


class Page(msgspec.Struct):
    """Some records, newest first by acceptance, and the cursor of the next page.

    An empty cursor means that there are no more records. A broker refuses a cursor that no page
    ended with, where it can see that.
    """

    records: list[Record]
    cursor: str = ""


TOTALS = (
    *("waiting", "scheduled", "ready", "running"),
    *("accepted", "succeeded", "failed", "retried", "cancelled", "expired", "purged"),
)
"""The numbers of queues that are summed over all queues."""


def totals_of(rows: Sequence[QueueStats], *, knows: bool) -> dict[str, int | None]:
    """The totals of all queues; None for a number that the broker does not know.

    ``knows`` says whether the broker can look into its queues; there may be no queue yet.
    """
    unknown = frozenset() if knows else _UNKNOWN
    return {n: None if n in unknown else sum(getattr(row, n) for row in rows) for n in TOTALS}


def number_of(cursor: str) -> int:
    """The number in a cursor, for stores that number their records.

    Raises:
        InvalidOption: the cursor is not a number.
    """
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise bad_cursor(cursor)
    return int(cursor)


def bad_cursor(cursor: str) -> InvalidOption:
    """The error for a cursor that no page of this store ended with."""
    return InvalidOption(
        f"cursor {cursor[:80]!r} does not come from a list of jobs here; "
        "leave it out to begin with the newest"
    )


def matches(record: Record, what: Filter) -> bool:
    """True when the record meets every given condition."""
    e = record.envelope
    return (
        (not what.states or record.state in what.states)
        and (not what.queue or e.queue == what.queue)
        and (not what.task or e.task == what.task)
        and (not what.key or e.key == what.key)
        and (not what.tag or what.tag in e.tags)
        and (not what.text or what.text.lower() in e.text.lower())
        and e.id.startswith(what.id_prefix)
    )


class Inspection(Protocol):
    """Requests that change nothing."""

    def get(self, job_id: str) -> Record | None:
        """The record of a job, or None."""
        ...

    def was_here(self, job_id: str) -> bool:
        """True when a missing job may have been pruned: its id was made since the store began."""
        ...

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """Records that match, newest first; a page may be short though more follow."""
        ...

    def stats(self) -> list[QueueStats]:
        """Every queue in numbers, by name."""
        ...

    def owners(self) -> list[Owner]:
        """The owners attached now."""
        ...

    def info(self) -> dict[str, Any]:
        """Facts about the store for ``tidemill info`` and ``doctor``."""
        ...
