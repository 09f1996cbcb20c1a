"""Lists of jobs, with a bound on their number and a bound on their bytes.

Headers, tags and errors of a job may have a megabyte. The server asks the broker for some jobs at a
time. A list of such jobs ends early, and its cursor continues the list.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.brokers.contract.inspection import Filter, Page
from tidemill.brokers.contract.store import Store
from tidemill.client.search import find_shown
from tidemill.core.job import Record
from tidemill.server.waiters import ANSWER_BYTES

AT_ONCE = 100
"""Jobs that the broker is asked for at a time."""


def find_some(
    find: Callable[[Filter, int, str], Page], what: Filter, limit: int, cursor: str
) -> Page:
    """Up to ``limit`` jobs; fewer when they are large, but at least one if any job matches."""
    records: list[Record] = []
    left = ANSWER_BYTES
    while True:
        count = min(limit - len(records), AT_ONCE)
        page = find(what, count, cursor)
        fit = _how_many_fit(page.records, left)
        if fit < len(page.records):
            if fit or not records:
                page = find(what, max(fit, 1), cursor)  # read fewer jobs, to get the right cursor
                records, cursor = records + page.records, page.cursor
            return Page(records, cursor)
        records += page.records
        left -= sum(map(size_of_record, page.records))
        cursor = page.cursor
        if not cursor or len(page.records) < count or len(records) >= limit:
            return Page(records, cursor)


def find_with_bodies(store: Store, what: Filter, limit: int, cursor: str) -> Page:
    """A page of jobs with their bodies. Whole jobs are read one at a time: results may be large."""
    page = find_shown(store, what, limit, cursor)
    for record in page.records:
        whole = store.get(record.envelope.id)
        record.envelope = whole.envelope if whole is not None else record.envelope
    return page


def _how_many_fit(records: list[Record], left: int) -> int:
    for n, record in enumerate(records):
        left -= size_of_record(record)
        if left < 0:
            return n
    return len(records)


def size_of_record(record: Record) -> int:
    """The approximate number of bytes of a record."""
    envelope = record.envelope
    texts = [*envelope.headers, *envelope.headers.values(), *envelope.tags, envelope.text]
    texts += [text for attempt in record.attempts for text in (attempt.error, attempt.traceback)]
    texts += [record.error, *(line for _, line in record.log)]
    return len(envelope.body) + len(record.raw_result) + sum(map(len, texts))
