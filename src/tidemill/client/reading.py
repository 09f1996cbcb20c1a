"""The part of the app that reads: handles, records and queues."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, is_own
from tidemill.client.history import History
from tidemill.client.inline_jobs import move_due
from tidemill.client.job_handle import Job
from tidemill.client.runtime import Runtime
from tidemill.client.search import Found, SearchOptions, find_shown
from tidemill.core.config import check_name


class Reading:
    """The methods of :class:`tidemill.Tidemill` that read."""

    def job(self: Runtime, job_id: str) -> Job[Any]:
        """A handle on the job with this id. This call reads nothing."""
        return Job(self, check_name("id", job_id))

    def find(
        self: Runtime, what: Filter | None = None, *, limit: int = 100, cursor: str = ""
    ) -> Page:
        """A page of at most ``limit`` records of jobs, newest first.

        The page has ``records``, and the ``cursor`` of the next page; an empty cursor ends the
        list. ``tidemill jobs --json`` prints the same pages. The records of groups are left out
        unless the filter names their task, and a page may be short because of them.

        Raises:
            InvalidOption: the cursor is not the ``cursor`` of a page of this store.
            FeatureMissing: the broker can list failed jobs only.
        """
        return find_shown(self.job_store, what or Filter(), limit, cursor)

    def jobs(self: Runtime, **what: Unpack[SearchOptions]) -> Found:
        """Handles of all matching jobs, newest first: :class:`Found` has the search options."""
        return Found(self, **what)

    def queues(self: Runtime) -> list[QueueStats]:
        """All queues with their numbers, without the queues of groups and :meth:`Limits.hold`."""
        move_due(self.job_store)
        return users_queues(self.broker.stats())

    @property
    def history(self: Runtime) -> History:
        """The history of the store: see :class:`History`. This call reads nothing."""
        return History(self)


def users_queues(rows: Iterable[QueueStats]) -> list[QueueStats]:
    """The queues, without the queues that tidemill makes for itself."""
    return [row for row in rows if not is_own(row.name)]
