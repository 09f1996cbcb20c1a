"""The parts of the contract that read, and that wait for jobs to end or for room in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Protocol, cast

import msgspec

from tidemill.brokers.contract.history_rows import QUEUE_STATES, QUEUE_TOTALS
from tidemill.core.job import Owner, Record, State
from tidemill.errors import InvalidOption

_UNKNOWN = frozenset({"scheduled", "running", "oldest", *QUEUE_TOTALS})


class QueueStats(msgspec.Struct, kw_only=True):
    """A queue in numbers. Totals count since the store was made or the queue was deleted.

    Attributes:
        name: the name of the queue.
        waiting, scheduled, ready, running: jobs in this state now.
        paused: True when no job of the queue starts.
        max_size: the most unfinished jobs; 0 for no bound.
        accepted: jobs that puts have stored.
        succeeded, failed, cancelled, expired: jobs that ended this way.
        retried: failed attempts after which the job was tried again.
        purged: jobs that purges have taken out.
        oldest: the creation time (wall time) of the ready job that was accepted first; 0 when no
            job is ready, or if its age is not known. A store may look only at its 256 highest
            priorities, and only at some keys of limits (about 256 on Redis, 1,000 on LMDB and
            PostgreSQL).
        consumers: the number of consumers by the server's count, for a broker that cannot look into
            its queues; -1 for other brokers. A broker that cannot look into its queues also knows
            ``ready``, but not the numbers in ``unknown``, which are 0.
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


HOLDS = "tidemill.holds."  # begins the queue of a hold; the id of the owner follows
GROUPS = "tidemill.groups"  # the queue of groups, which no act on a user's queue reaches


def is_own(queue: str) -> bool:
    """True for a queue that no user has made."""
    return queue == GROUPS or queue.startswith(HOLDS)


def check_users(queue: str) -> None:
    """Raise InvalidOption for the queue of groups, whose jobs nobody may remove."""
    if queue == GROUPS:
        raise InvalidOption(f"queue {GROUPS} has the records of groups; delete a group by its id")


LOOK_MOST = 200_000  # the most jobs that one page of a search by ``id_suffix`` looks at


class Filter(msgspec.Struct, kw_only=True, frozen=True):
    """Conditions on jobs; a job matches when every given condition holds.

    Attributes:
        states: the job has one of these states; an empty set for any state.
        queue: the queue of the job.
        task: the name of the job's task.
        key: the key of the job.
        tag: one of the job's tags.
        text: a part of the text that shows the job's arguments.
        id_prefix: the beginning of the job's id.
        id_suffix: the ending of the job's id. No store has an index of endings. So the search for a
            page ends after 200,000 jobs.
        look: the number of jobs after which the search for a page ends, even if the page is not
            full; 0 for no bound. Stores read jobs in pieces, so a store may read some thousand jobs
            more.
    """

    states: frozenset[State] = frozenset()
    queue: str = ""
    task: str = ""
    key: str = ""
    tag: str = ""
    text: str = ""
    id_prefix: str = ""
    id_suffix: str = ""
    look: int = 0

    @property
    def look_most(self) -> float:
        """The number of jobs after which the search for a page ends; infinity for no bound."""
        return self.look or (LOOK_MOST if self.id_suffix else inf)


class Page(msgspec.Struct):
    """Some records, the latest accepted first, and the cursor of the next page.

    Each record is ``listed``: the result, the log and the arguments are left out.

    An empty cursor means that no more records match. Some brokers refuse a cursor that did not come
    from one of their pages.
    """

    records: list[Record]
    cursor: str = ""


TOTALS = (*QUEUE_STATES, *QUEUE_TOTALS)  # the numbers of queues that are summed over all queues


def totals_of(rows: Sequence[QueueStats], *, knows: bool) -> dict[str, int | None]:
    """The totals of all queues; None for a number that the broker does not know.

    ``knows`` is False when the broker cannot look into its queues. Empty ``rows`` do not show this.
    """
    unknown = frozenset() if knows else _UNKNOWN
    return {n: None if n in unknown else sum(getattr(row, n) for row in rows) for n in TOTALS}


def number_of(cursor: str) -> int:
    """The number in the cursor of a store that numbers its records. Raises InvalidOption."""
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise bad_cursor(cursor)
    return int(cursor)


def bad_cursor(cursor: str) -> InvalidOption:
    """The error for a cursor that did not come from a page of this store."""
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
        and e.id.endswith(what.id_suffix)
    )


class Inspection(Protocol):
    """Requests that change nothing."""

    def get(self, job_id: str) -> Record | None:
        """The record of a job, or None."""
        ...

    def was_here(self, job_id: str) -> bool:
        """True when a missing job may have been pruned, since its id is younger than the store."""
        ...

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """Records that match, newest first; a page may be short although more pages follow.

        The records are ``listed``: the store reads no results, logs and bodies for them.
        """
        ...

    def ahead(self, job_id: str, most: int) -> int:
        """The number of ready jobs before a ready job, in the order of leasing; at most ``most``.

        The counted jobs have the job's queue and kind, task or message. For a job under a limit
        they also have its limit and key. 0 for a job that is not ready.
        """
        ...

    def stats(self) -> list[QueueStats]:
        """Every queue in numbers, by name."""
        ...

    def owners(self) -> list[Owner]:
        """The owners attached now."""
        ...

    def info(self) -> dict[str, Any]:
        """Facts about the store for ``tidemill info`` and ``doctor``.

        A store with ``INSPECT`` has ``made``, the wall time at which it was made.
        """
        ...


class JobWaits(Protocol):
    """Waits of callers that lease no jobs. Each wait first moves the jobs whose time has come."""

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        """Sleep until all jobs have finished or the time is over; return their records.

        With ``first`` sleep until one job has finished. None stands for a job that the store does
        not have. A missing job counts as finished.
        """
        ...

    def wait_space(self, queue: str, timeout: float) -> bool:
        """Sleep until the queue is below its ``max_size``; False when the time is over."""
        ...


class Danger(msgspec.Struct, frozen=True):
    """A policy that can destroy accepted jobs, and the advice against it."""

    text: str
    advice: str


class ServerPolicies(msgspec.Struct, frozen=True):
    """The policies of a server, as far as they concern jobs.

    Attributes:
        seen: the place where the policies were read, or the reason why they could not be read.
        dangers: the dangerous policies that were found.
    """

    seen: str
    dangers: list[Danger]


class HasPolicies(Protocol):
    """A broker whose server has policies."""

    def policies(self) -> ServerPolicies:
        """The policies that can destroy accepted jobs."""
        ...


def with_policies(broker: object) -> HasPolicies | None:
    """The broker with its policies; None when its server has no policies."""
    return cast(HasPolicies, broker) if hasattr(broker, "policies") else None
