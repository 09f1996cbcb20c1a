"""What brokers show when asked: queues in numbers, records by a filter, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.errors import InvalidOption
from tidemill.job import Record, State

__all__ = ["Filter", "Page", "QueueStats", "bad_cursor", "matches", "number_of", "totals_of"]


_UNKNOWN = frozenset(
    {
        *("scheduled", "running", "oldest"),
        *("accepted", "succeeded", "failed", "retried", "cancelled", "expired", "purged"),
    }
)


class QueueStats(msgspec.Struct, kw_only=True):
    """A queue in numbers. Totals count since the store was made, or the queue deleted.

    ``oldest`` is when the job was made that was accepted before all others that are ready now, in
    wall time; 0 when none is ready. A store may look no further than its 256 highest priorities,
    and at none that waits for a limit by name.

    ``carried`` of those that are ready lie with the carrier (:mod:`.base`).

    A broker that cannot look into its queues knows how many ``consumers`` its server counts
    (else -1), and what is ready; the numbers that are ``unknown`` are 0 here, and count nowhere.
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
        """Names of the numbers that the broker cannot tell."""
        return _UNKNOWN if self.consumers >= 0 else frozenset()

    @property
    def size(self) -> int:
        """Unfinished jobs: waiting, scheduled, ready and running."""
        return self.waiting + self.scheduled + self.ready + self.running

    def public(self) -> dict[str, Any]:
        """The same as plain data for programs; None for what the broker cannot tell."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        values |= {"size": self.size, "oldest": self.oldest or None}
        if self.unknown:
            return values | dict.fromkeys([*self.unknown, "size"])
        del values["consumers"]
        return values


class Filter(msgspec.Struct, kw_only=True, frozen=True):
    """Which jobs to look at; every condition given must hold."""

    states: frozenset[State] = frozenset()
    queue: str = ""
    task: str = ""
    key: str = ""
    tag: str = ""
    text: str = ""
    id_prefix: str = ""


class Page(msgspec.Struct):
    """Some records, newest first, and where to go on; an empty cursor means there are no more.

    To go on with a cursor that no list ended with is refused, where that can be seen.

    Newest first is by acceptance, whatever the ids.
    """

    records: list[Record]
    cursor: str = ""


TOTALS = (
    *("waiting", "scheduled", "ready", "running"),
    *("accepted", "succeeded", "failed", "retried", "cancelled", "expired", "purged"),
)
"""The numbers of a queue that all queues have a total of."""


def totals_of(rows: Sequence[QueueStats], *, knows: bool) -> dict[str, int | None]:
    """The totals of all queues; None for what the broker cannot tell.

    ``knows`` says whether it can look into its queues, of which there may be none yet.
    """
    unknown = frozenset() if knows else _UNKNOWN
    return {n: None if n in unknown else sum(getattr(row, n) for row in rows) for n in TOTALS}


def number_of(cursor: str) -> int:
    """The number that a cursor is, where a store counts its records.

    Raises:
        InvalidOption: it is none.
    """
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise bad_cursor(cursor)
    return int(cursor)


def bad_cursor(cursor: str) -> InvalidOption:
    """No list here ended with this cursor."""
    return InvalidOption(
        f"cursor {cursor[:80]!r} is none that a list of jobs here ended with; "
        "leave it out to begin with the newest"
    )


def matches(record: Record, what: Filter) -> bool:
    """True when every condition given holds."""
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
