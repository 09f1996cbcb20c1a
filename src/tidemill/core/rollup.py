"""The numbers in rows of history, and percentiles of times.

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

from collections.abc import Sequence

SUCCEEDED, FAILED, RETRIED, GIVEN_BACK, WAIT_SUM, RUN_SUM = range(6)
BUCKETS = 32
WAITS = slice(6, 6 + BUCKETS)
RUNS = slice(6 + BUCKETS, 6 + 2 * BUCKETS)
CANCELLED = 6 + 2 * BUCKETS
WIDTH = CANCELLED + 1
"""The length of a row of ``task``."""

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
