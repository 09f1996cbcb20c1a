"""Search jobs: iterate over the handles of all matching jobs, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, is_own
from tidemill.client.inline_jobs import JobStore, move_due
from tidemill.client.job_handle import Job
from tidemill.client.task import Task
from tidemill.core.config import check_known, check_name
from tidemill.core.job import GROUP, State
from tidemill.core.suggest import did_you_mean
from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

_PAGE = 200

_MORE_READS = 10
"""The most further reads for one page, in place of records that the page leaves out."""


class SearchOptions(TypedDict, total=False):
    """The options of :meth:`Tidemill.jobs`: see :class:`Found`."""

    task: str | Task[..., Any]
    group: str
    state: str | Iterable[str]
    queue: str
    key: str
    tag: str
    text: str


class Found:
    """Handles of the matching jobs, newest first, for ``for`` and ``async for``.

    Pages are read from the store as the iteration goes on. :meth:`page` reads one page of records.

    Args:
        what: a :class:`Filter`, in place of the options.
        task: a task, or its name.
        group: the id of a group, chain or flow; its jobs match.
        state: a state, or a list of states.
        queue: the queue of the job.
        key: the key of the job.
        tag: one of the tags of the job.
        text: a part of the text that shows a job's arguments.

    Raises:
        InvalidOption: there is no such option or state, a name is invalid, or there is a filter
            beside the options.
    """

    def __init__(
        self, runtime: Runtime, what: Filter | None, **options: Unpack[SearchOptions]
    ) -> None:
        check_known("a search", options, SearchOptions.__annotations__)
        if what is not None and not isinstance(what, Filter):
            raise InvalidOption(
                f"a search takes a Filter or options such as state='failed', not {what!r}"
            )
        if what is not None and options:
            raise InvalidOption("give either a Filter or options of a search, not both")
        self._runtime = runtime
        self._what = _filter_of(options) if what is None else what

    def __iter__(self) -> Iterator[Job[Any]]:
        cursor: str | None = ""
        while cursor is not None:
            jobs, cursor = self._page(cursor)
            yield from jobs

    async def __aiter__(self) -> AsyncIterator[Job[Any]]:
        cursor: str | None = ""
        while cursor is not None:
            jobs, cursor = await self._runtime.threaded(self._page, cursor)
            for job in jobs:
                yield job

    def page(self, limit: int = 100, cursor: str = "") -> Page:
        """A page of at most ``limit`` records of jobs.

        The page has ``records``, and the ``cursor`` of the next page; an empty cursor ends the
        list. ``tidemill jobs --json`` prints the same pages. The records of groups are left out
        unless the search names their task, and a page may be short because of them.

        Raises:
            InvalidOption: the cursor is not the ``cursor`` of a page of this store.
            FeatureMissing: the broker can list failed jobs only.
        """
        return find_shown(self._runtime.job_store, self._what, limit, cursor)

    def _page(self, cursor: str) -> tuple[list[Job[Any]], str | None]:
        page = self.page(_PAGE, cursor)
        jobs: list[Job[Any]] = []
        for record in page.records:
            jobs.append(Job(self._runtime, record.envelope.id))
            jobs[-1].remember(record)
            jobs[-1]._is_step = True
        return jobs, page.cursor or None


def _filter_of(options: SearchOptions) -> Filter:
    task, group = options.get("task", ""), options.get("group", "")
    return Filter(
        states=states_of(options.get("state", ())),
        queue=options.get("queue", ""),
        task=task.name if isinstance(task, Task) else task,
        key=options.get("key", ""),
        tag=options.get("tag", ""),
        text=options.get("text", ""),
        id_prefix=f"{check_name('group', group)}." if group else "",
    )


def find_shown(store: JobStore, what: Filter, limit: int, cursor: str) -> Page:
    """A page without the records of groups and holds, unless the filter asks for them."""
    if not cursor:
        move_due(store)
    page = store.find(what, limit, cursor)
    if what.task == GROUP or is_own(what.queue):
        return page
    shown = [record for record in page.records if not is_own(record.envelope.queue)]
    for _ in range(_MORE_READS):
        if not page.cursor or len(shown) == limit:
            break
        page = store.find(what, limit - len(shown), page.cursor)
        shown += [record for record in page.records if not is_own(record.envelope.queue)]
    return Page(shown, page.cursor)


def users_queues(rows: Iterable[QueueStats]) -> list[QueueStats]:
    """The queues, without the queues that tidemill makes for itself."""
    return [row for row in rows if not is_own(row.name)]


def states_of(given: str | Iterable[str]) -> frozenset[State]:
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        if name not in list(State):
            near = did_you_mean(str(name), State)
            raise InvalidOption(
                f"state must be one of {', '.join(State)}, not {name!r}{near and f'; {near}'}"
            )
    return frozenset(map(State, names))
