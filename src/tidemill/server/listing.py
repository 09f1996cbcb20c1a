"""Lists of jobs whose size in bytes has a bound, besides the number of jobs.

A job may have 1 MiB, so a list of 1,000 could take a gigabyte. A broker is asked for some jobs at a
time, and the list ends early once these are large; its cursor says where to go on.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.brokers.base import Filter, Page
from tidemill.job import Record
from tidemill.server.asks import ENOUGH

__all__ = ["AT_ONCE", "find_some", "size_of_record"]

AT_ONCE = 100
"""Jobs that a broker is asked for at a time."""


def find_some(
    find: Callable[[Filter, int, str], Page], what: Filter, limit: int, cursor: str
) -> Page:
    """Up to ``limit`` jobs, fewer when they are large: at least one, if any matches."""
    records: list[Record] = []
    left = ENOUGH
    while True:
        asked = min(limit - len(records), AT_ONCE)
        page = find(what, asked, cursor)
        fit = _how_many_fit(page.records, left)
        if fit < len(page.records):
            if fit or not records:
                page = find(what, max(fit, 1), cursor)  # for its cursor
                records, cursor = records + page.records, page.cursor
            return Page(records, cursor)
        records += page.records
        left -= sum(map(size_of_record, page.records))
        cursor = page.cursor
        if not cursor or len(page.records) < asked or len(records) >= limit:
            return Page(records, cursor)


def _how_many_fit(records: list[Record], left: int) -> int:
    for n, record in enumerate(records):
        left -= size_of_record(record)
        if left < 0:
            return n
    return len(records)


def size_of_record(record: Record) -> int:
    """About how many bytes a record has."""
    envelope = record.envelope
    texts = [*envelope.headers, *envelope.headers.values(), *envelope.tags]
    texts += [attempt.traceback for attempt in record.attempts]
    return len(envelope.body) + len(record.result) + sum(map(len, texts))
