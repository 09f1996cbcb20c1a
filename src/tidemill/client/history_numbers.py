"""The answers of ``mill.history``: plain structs of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.core.fingerprint import FailureSample
from tidemill.core.rollup import (
    CANCELLED,
    FAILED,
    GIVEN_BACK,
    RETRIED,
    RUN_SUM,
    RUNS,
    SUCCEEDED,
    WAIT_SUM,
    WAITS,
    percentile,
)


class Times(msgspec.Struct, frozen=True):
    """How long some runs took, or waited, in seconds.

    Attributes:
        count: the number of times.
        sum: their sum.
        buckets: bucket ``n`` counts times from ``2 ** (n - 1)`` to ``2 ** n`` ms, bucket 0 times
            below 1 ms.
        p50, p95, p99: percentiles, right within a factor of two; None without a time.
    """

    count: int
    sum: float
    buckets: tuple[int, ...]
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, total: int, buckets: Sequence[int]) -> Times:
        """Make the times from the counts of the buckets and the sum in milliseconds."""
        parts = [percentile(buckets, part) for part in (0.5, 0.95, 0.99)]
        return cls(sum(buckets), total / 1000, tuple(buckets), *parts)

    @property
    def mean(self) -> float | None:
        """The mean; None without a time."""
        return self.sum / self.count if self.count else None


class TaskNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a task.

    Attributes:
        queue, task, release: the names that all the runs share; empty if the runs may differ.
        succeeded: runs that succeeded.
        failed: runs after which the job failed for good.
        retried: failed runs that another attempt follows.
        cancelled: runs that somebody cancelled.
        given_back: runs that counted no attempt: snoozed, or interrupted by the end of a worker.
        wait: the times from when jobs were due until their first attempts started. Jobs that waited
            for other jobs are left out.
        run: how long attempts ran.
        seconds: the length of the period in which the runs ended.
    """

    queue: str = ""
    task: str = ""
    release: str = ""
    succeeded: int
    failed: int
    retried: int
    cancelled: int
    given_back: int
    wait: Times
    run: Times
    seconds: float

    @classmethod
    def of(cls, names: Sequence[str], row: Sequence[int], seconds: float) -> TaskNumbers:
        """The numbers of a row of kind ``task``; ``names`` are queue, task and release."""
        queue, task, release = names
        return cls(
            queue=queue,
            task=task,
            release=release,
            succeeded=row[SUCCEEDED],
            failed=row[FAILED],
            retried=row[RETRIED],
            cancelled=row[CANCELLED],
            given_back=row[GIVEN_BACK],
            wait=Times.of(row[WAIT_SUM], row[WAITS]),
            run=Times.of(row[RUN_SUM], row[RUNS]),
            seconds=seconds,
        )

    @property
    def runs(self) -> int:
        """The number of runs."""
        ended = self.succeeded + self.failed + self.retried
        return ended + self.cancelled + self.given_back

    @property
    def rate(self) -> float:
        """Runs per second."""
        return self.runs / self.seconds

    @property
    def failure_rate(self) -> float:
        """The part of attempts that failed, 0 to 1; 0 without an attempt."""
        bad = self.failed + self.retried
        return bad / (bad + self.succeeded) if bad else 0.0


class FailureNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of the code: all failed attempts with one fingerprint, of one task.

    Attributes:
        fingerprint: a hash of class, place and message without values. A worker tells 200 failures
            apart in an hour. All further failures have the fingerprint ``"other"``.
        task: the task that failed.
        error: the class of the exception; empty without an exception.
        message: the first line of the latest message.
        place: ``file:function`` of the innermost frame of your code.
        failed, retried: attempts after which the job failed for good, or was tried again.
        first: the wall time of the first failure in the period, in whole minutes or hours.
        last: the wall time of the latest failure.
        releases: the releases of the workers.
        hosts: the machines of the workers.
        sample: the latest failure, with its job, its worker and the end of its traceback.
    """

    fingerprint: str
    task: str
    error: str
    message: str
    place: str
    failed: int
    retried: int
    first: float
    last: float
    releases: tuple[str, ...]
    hosts: tuple[str, ...]
    sample: FailureSample

    @property
    def count(self) -> int:
        """The number of failed attempts."""
        return self.failed + self.retried


class QueuePoint(msgspec.Struct, frozen=True):
    """A minute or hour of a queue.

    Attributes:
        at: the wall time at which the minute or hour began.
        accepted: jobs that were put.
        succeeded, failed, cancelled, expired, purged: jobs that ended this way.
        retried: failed attempts that another attempt follows.
        waiting, scheduled, ready, running: jobs in this state at the end of the minute or hour.
        oldest: the age in seconds of the oldest ready job at the end of the minute or hour.
    """

    at: int
    accepted: int
    succeeded: int
    failed: int
    retried: int
    cancelled: int
    expired: int
    purged: int
    waiting: int
    scheduled: int
    ready: int
    running: int
    oldest: int


class QueueNumbers(msgspec.Struct, frozen=True):
    """The history of a queue.

    Attributes:
        queue: the name of the queue; empty for all queues together.
        span: the length of a point in seconds.
        points: one point for each minute or hour, oldest first. The last point is the current
            minute or hour.
    """

    queue: str
    span: int
    points: list[QueuePoint]

    def total(self, name: str) -> int:
        """The sum over all points of a number, such as ``"succeeded"``."""
        return sum([getattr(point, name) for point in self.points])


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of runs by minute or hour, for charts. All lists have the length of ``at``.

    Attributes:
        span: the length of a period in seconds.
        at: the wall times at which the periods began.
        succeeded, failed, retried, cancelled, given_back: see :class:`TaskNumbers`.
        wait_p50, wait_p95, wait_p99, run_p50, run_p95, run_p99: seconds, or None.
    """

    span: int
    at: list[int]
    succeeded: list[int]
    failed: list[int]
    retried: list[int]
    cancelled: list[int]
    given_back: list[int]
    wait_p50: list[float | None]
    wait_p95: list[float | None]
    wait_p99: list[float | None]
    run_p50: list[float | None]
    run_p95: list[float | None]
    run_p99: list[float | None]

    @classmethod
    def of(cls, at: list[int], span: int, rows: Sequence[Sequence[int]]) -> Series:
        """The numbers of rows of kind ``task``."""
        all_ = [TaskNumbers.of(("", "", ""), row, span) for row in rows]
        return cls(
            span=span,
            at=at,
            succeeded=[one.succeeded for one in all_],
            failed=[one.failed for one in all_],
            retried=[one.retried for one in all_],
            cancelled=[one.cancelled for one in all_],
            given_back=[one.given_back for one in all_],
            wait_p50=[one.wait.p50 for one in all_],
            wait_p95=[one.wait.p95 for one in all_],
            wait_p99=[one.wait.p99 for one in all_],
            run_p50=[one.run.p50 for one in all_],
            run_p95=[one.run.p95 for one in all_],
            run_p99=[one.run.p99 for one in all_],
        )


class Deploy(msgspec.Struct, frozen=True):
    """The first time that a worker of a release started.

    Attributes:
        release: the name of the release.
        at: the wall time.
    """

    release: str
    at: int
