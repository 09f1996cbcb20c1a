"""The jobs of a search: pages, counts, and all jobs. The work for each page is bounded.

A page ends when it is full, or when its time is over. A page that ended early says so, and its
cursor continues at the last job that was read. So a search for a rare text in a large store takes
several pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, is_own
from tidemill.core.job import FINISHED, Record, State
from tidemill.dashboard.job_query import JobQuery

LOOK = 2500
"""The most jobs that the store checks in one read of a search with conditions."""

_BATCH = 200
"""Records that one read gets when the store checks only a part of the search."""

PATIENCE = 0.08
"""Seconds after which a page ends, even if it is not full."""


class Listed(msgspec.Struct, frozen=True):
    """A page of jobs.

    Attributes:
        records: the jobs, newest first.
        cursor: where the next page begins; empty at the end.
        is_full: False when the page ended early, because its time was over.
    """

    records: list[Record]
    cursor: str
    is_full: bool


class Count(msgspec.Struct, frozen=True):
    """How many jobs match.

    Attributes:
        number: the jobs that match.
        is_exact: False when more jobs may match, because counting took too long.
    """

    number: int
    is_exact: bool = True


def page_of(mill: Tidemill, query: JobQuery, limit: int = 50, cursor: str = "") -> Listed:
    """A page of the jobs that match.

    Raises:
        InvalidOption: the cursor is not the cursor of a page.
        FeatureMissing: the broker can list failed jobs only.
    """
    until = time.monotonic() + PATIENCE
    found: list[Record] = []
    while True:
        page, matching = _read(mill, query, limit - len(found), cursor)
        found += matching
        cursor = page.cursor
        if not cursor or len(found) >= limit:
            return Listed(found, cursor, is_full=True)
        if time.monotonic() >= until:
            return Listed(found, cursor, is_full=False)


def _read(mill: Tidemill, query: JobQuery, want: int, cursor: str) -> tuple[Page, list[Record]]:
    """One read: a page of the store, and at most ``want`` of its records that match."""
    what = query.what
    if what != Filter():
        what = msgspec.structs.replace(what, look=LOOK)
    most = max(want, _BATCH) if query.failure else want
    page = mill.find(what, limit=most, cursor=cursor)
    places = [n for n, record in enumerate(page.records) if query.matches_rest(record)]
    if len(places) > want:
        page = mill.find(what, limit=places[want - 1] + 1, cursor=cursor)
    return page, [record for record in page.records if query.matches_rest(record)][:want]


def pages_of(
    mill: Tidemill, query: JobQuery, cursor: str = "", size: int = 500
) -> Iterator[tuple[list[Record], str]]:
    """All jobs that match, newest first, in pages. Each page has the cursor of the next page."""
    need_lists(mill, query)
    while True:
        page, matching = _read(mill, query, size, cursor)
        cursor = page.cursor
        yield matching, cursor
        if not cursor:
            return


def need_lists(mill: Tidemill, query: JobQuery) -> None:
    """Refuse a search that the broker cannot answer.

    Raises:
        FeatureMissing: the broker can list failed jobs only.
    """
    broker = mill.broker
    failed_only = query.states and query.states <= {State.FAILED}
    if Feature.INSPECT not in broker.features and not failed_only:
        raise lacks(broker.url, Feature.INSPECT, "a list of jobs that did not fail")


def count_of(
    mill: Tidemill, query: JobQuery, queues: list[QueueStats], patience: float = 0.25
) -> Count:
    """How many jobs match, counted for ``patience`` seconds at most.

    ``queues`` are the numbers of all queues at this moment.
    """
    number = counted_by_queues(query, queues)
    if number is not None:
        return Count(number)
    if query.is_empty and (counted := count_all(mill)) is not None:
        return counted
    until, number = time.monotonic() + patience, 0
    for records, cursor in pages_of(mill, query):
        number += len(records)
        if cursor and time.monotonic() >= until:
            return Count(number, is_exact=False)
    return Count(number)


def count_all(mill: Tidemill) -> Count | None:
    """The number of all jobs, if the store counts them."""
    jobs = mill.broker.info().get("jobs")
    own = any(row.size or row.accepted for row in mill.broker.stats() if is_own(row.name))
    return Count(jobs) if isinstance(jobs, int) and not own else None


def counted_by_queues(query: JobQuery, queues: list[QueueStats]) -> int | None:
    """The number of jobs that match; None if the numbers of the queues do not tell."""
    states = query.states
    if not query.tokens.keys() <= {"state", "queue"} or not states or states & FINISHED:
        return None
    rows = [row for row in queues if query.what.queue in ("", row.name)]
    if any(state.value in row.unknown for row in rows for state in states):
        return None
    number: int = sum(getattr(row, state.value) for row in rows for state in states)
    return number
