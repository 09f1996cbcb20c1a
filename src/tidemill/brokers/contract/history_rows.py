"""Rows of history: small rows of numbers by period, and percentiles of times.

A worker adds to the rows of its jobs in a step soon after the store has taken their verdicts. The
store deletes the rows of a period after some time (:data:`KEEP`).

=========== ============================================ ========
kind        name                                         written
=========== ============================================ ========
``task``    queue, task and release (:func:`join_name`)  added
``failure`` fingerprint, task and release                added
``queue``   queue                                        replaced
=========== ============================================ ========

Counts of ``task`` and ``failure`` rows, by place::

    0 succeeded   1 failed   2 retried   3 given back: counts no attempt
    4 sum of waits in ms     5 sum of runs in ms
    6 … 37  waits by length  38 … 69  runs by length
    70 cancelled while running

A wait is the time from when a job was due until its first attempt started. The waits of jobs that
waited for other jobs are not counted. A run is the time from the start to the end of an attempt.
Bucket 0 counts times below 1 ms. Bucket ``n`` counts times from ``2 ** (n - 1)`` to ``2 ** n`` ms.

Counts of ``queue`` rows, by place: first the totals of :data:`QUEUE_TOTALS` since the store was
made. Then come the numbers of jobs in :data:`QUEUE_STATES`, and the age in seconds of the oldest
ready job. Both are numbers at the end of the period. A queue that did not change in a period has no
row for it. One more row of each queue belongs to no period. It has the latest numbers, and as its
last count the time of the minute in which they were taken.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec

from tidemill.errors import InvalidOption

MINUTE, HOUR, ALWAYS = 60, 3600, 0
"""The spans of rows, in seconds. ``ALWAYS`` is the span of rows that stay until somebody deletes
them. These are the latest numbers of each queue, and the sums of ``task`` rows since the history
began. These rows have ``at`` 0, and the names of the sums have no release."""

KEEP = {MINUTE: 48 * 3600, HOUR: 90 * 24 * 3600}  # seconds from the beginning of a period
ADDED = ("failure", "task")  # the kinds of rows that workers add to; others are replaced
MAX_KIND, MAX_NAME_BYTES, MAX_SAMPLE = 40, 1000, 256 * 1024
"""The most characters of a kind, and the most bytes of a name and of a sample."""

MAX_COUNTS, MAX_COUNT, LATEST = 1000, 1 << 52, 1 << 40
"""The most counts of a row, the highest count, and the latest time of a row."""

_SEPARATOR = "\x1f"


class HistoryRow(msgspec.Struct, array_like=True, frozen=True):
    """The numbers of one name in one period.

    Attributes:
        kind: what the row is about; see the table above.
        name: the subject: a queue, a task, a fingerprint of a failure.
        span: the length of the period in seconds: ``MINUTE``, ``HOUR``, or ``ALWAYS``.
        at: the wall time in whole seconds at which the period began; a multiple of ``span``.
        counts: numbers, whose meaning depends on the kind. Newer releases may append counts, so
            rows can differ in length.
        sample: bytes, whose meaning depends on the kind. The latest sample that is not empty stays.
    """

    kind: str
    name: str
    span: int
    at: int
    counts: tuple[int, ...] = ()
    sample: bytes = b""


def add_counts(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The sums of two lists of counts, one by one; a missing count is 0."""
    if len(one) < len(other):
        one, other = other, one
    return (*map(operator.add, one, other), *one[len(other) :])


def added(before: HistoryRow | None, row: HistoryRow) -> HistoryRow:
    """The stored row ``before``, if any, after ``row`` was added."""
    if before is None:
        return row
    counts = add_counts(before.counts, row.counts)
    return HistoryRow(row.kind, row.name, row.span, row.at, counts, row.sample or before.sample)


def join_name(*parts: str) -> str:
    """The name of a row with several subjects, such as a queue, a task and a release."""
    return _SEPARATOR.join(parts)


def split_name(name: str) -> list[str]:
    return name.split(_SEPARATOR)


def check_rows(rows: Sequence[HistoryRow]) -> None:
    """Raise InvalidOption, which names the field, for rows that a store cannot keep."""
    for row in rows:
        if not (0 < len(row.kind) <= MAX_KIND and row.kind.isprintable() and row.kind.isascii()):
            text = f"1 to {MAX_KIND} printable ASCII characters, not {row.kind[:60]!r}"
            raise InvalidOption(f"the kind of a row of history must be {text}")
        if len(row.name.encode()) > MAX_NAME_BYTES or "\0" in row.name:
            text = f"more than {MAX_NAME_BYTES} bytes, or a zero byte"
            raise InvalidOption(f"the name {row.name[:40]!r}… of a row of history has {text}")
        if row.span not in (*KEEP, ALWAYS):
            raise InvalidOption(
                f"the span of a row of history must be 60, 3600 or 0, not {row.span}"
            )
        if not 0 <= row.at < LATEST:
            raise InvalidOption(f"the time of a row of history must be 0 to 2**40, not {row.at}")
        if len(row.counts) > MAX_COUNTS or any(abs(count) > MAX_COUNT for count in row.counts):
            text = f"{MAX_COUNTS} counts, each from -{MAX_COUNT} to {MAX_COUNT}"
            raise InvalidOption(f"a row of history may have at most {text}")
        if len(row.sample) > MAX_SAMPLE:
            raise InvalidOption(f"the sample of a row of history has more than {MAX_SAMPLE} bytes")


SUCCEEDED, FAILED, RETRIED, GIVEN_BACK, WAIT_SUM, RUN_SUM = range(6)
BUCKETS = 32
WAITS = slice(6, 6 + BUCKETS)
RUNS = slice(6 + BUCKETS, 6 + 2 * BUCKETS)
CANCELLED = 6 + 2 * BUCKETS
WIDTH = CANCELLED + 1  # the length of a row of ``task``
QUEUE_TOTALS = ("accepted", "succeeded", "failed", "retried", "cancelled", "expired", "purged")
QUEUE_STATES = ("waiting", "scheduled", "ready", "running")


def bucket_of(seconds: float) -> int:
    """The number of the bucket that counts a time."""
    return min(int(seconds * 1000).bit_length(), BUCKETS - 1) if seconds > 0 else 0


def percentile(buckets: Sequence[int], part: float) -> float | None:
    """The percentile ``part`` (0 to 1) of the counted times, in seconds; None without times.

    The times of a bucket count as spread evenly, so the result may be wrong by a factor of two.
    """
    total = sum(buckets)
    if not total:
        return None
    rest = part * total
    for number, count in enumerate(buckets):
        if count and rest <= count:
            low = 2.0 ** (number - 1) if number else 0.0
            return (low + (2.0**number - low) * rest / count) / 1000
        rest -= count
    return 2.0 ** (len(buckets) - 1) / 1000
