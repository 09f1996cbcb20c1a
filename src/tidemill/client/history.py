"""The history of a store, ``mill.history``, and snapshots of queues (``docs/design/history.md``).

A period that begins at most a day ago is read from rows by minute, a longer period from rows by
hour. A period begins at the start of a minute or hour. By default it ends now.

A snapshot stores the queues that have changed since the previous snapshot. For such a queue it
stores a row by minute, a row by hour, and a row without a period: the latest numbers, followed by
their minute. If the queue did not change in the previous minute, the snapshot also stores the old
numbers as a row of that minute. A reader starts from the numbers of the first row that it finds. So
a reader needs no older row, and an idle queue costs no rows.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import astuple

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import (
    ALWAYS,
    CANCELLED,
    FAILED,
    GIVEN_BACK,
    HOUR,
    MINUTE,
    QUEUE_STATES,
    QUEUE_TOTALS,
    RETRIED,
    RUN_SUM,
    RUNS,
    SUCCEEDED,
    WAIT_SUM,
    WAITS,
    WIDTH,
    HistoryRow,
    join_name,
    percentile,
    split_name,
)
from tidemill.brokers.contract.inspection import QueueStats, is_own
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.client.threads import in_thread
from tidemill.core.clock import clock
from tidemill.core.config import Seconds, check_seconds
from tidemill.core.fingerprint import FailureSample
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


# -- numbers ---------------------------------------------------------------------------------------


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
        lists: dict[str, list[Any]] = {}
        for name in cls.__struct_fields__[2:]:  # such as ``failed`` and ``wait_p50``
            read = operator.attrgetter(name.replace("_p", ".p"))
            lists[name] = [read(one) for one in all_]
        return cls(span=span, at=at, **lists)


class Deploy(msgspec.Struct, frozen=True):
    """The first time that a worker of a release started.

    Attributes:
        release: the name of the release.
        at: the wall time.
    """

    release: str
    at: int


# -- snapshots of queues ---------------------------------------------------------------------------

log = logging.getLogger("tidemill")

Counts = tuple[int, ...]
"""The totals, the states, and the time since which the oldest job is ready (0 without one)."""

TOTALS = len(QUEUE_TOTALS)  # the number of totals, which come first

NOTHING: Counts = (0,) * (TOTALS + len(QUEUE_STATES) + 1)
"""The numbers of a queue that does not exist."""

ALL_QUEUES = join_name("", "")
"""The name of a row without counts, which has the minute of the latest snapshot. No queue has this
name."""

_RAN = slice(1, 4)  # succeeded, failed, retried

_LATE = 0.05  # a snapshot is due this many seconds after its minute, because clocks differ a little

_NEEDS = {Feature.HISTORY, Feature.INSPECT}

Read = Callable[[str, int, int, int], list[HistoryRow]]
"""Reads the rows of a kind and a span between two times."""

ReadQueues = Callable[[], Sequence[QueueStats]]  # reads the queues as they are now


class Latest(NamedTuple):
    """The numbers of a queue in the latest snapshot with a row of the queue, and the minute."""

    counts: Counts
    at: int


def counts_of(stats: Iterable[QueueStats]) -> dict[str, Counts]:
    """The numbers of each queue as it is now."""
    names: Sequence[str] = (*QUEUE_TOTALS, *QUEUE_STATES)
    return {
        one.name: (*(getattr(one, name) for name in names), int(one.oldest))
        for one in stats
        if not is_own(one.name)
    }


def before_history(counts: Counts) -> Counts:
    """The numbers of a queue before the first snapshot of a store.

    If no job of the queue has run yet, all numbers before it were 0. Otherwise a move brought jobs
    that had ended. Then the result is the present numbers, so that the first snapshot adds nothing.
    """
    return counts if any(counts[_RAN]) else NOTHING


def latest_of(rows: Iterable[HistoryRow]) -> dict[str, Latest]:
    """The latest numbers by queue, from the rows without a period."""
    return {row.name: Latest(row.counts[:-1], row.counts[-1]) for row in rows}


def changed_rows(
    latest: Mapping[str, Latest], counts: Mapping[str, Counts], minute: int
) -> list[HistoryRow]:
    """The rows of queues that have changed; ``counts`` are the numbers at the end of a minute."""
    changed: list[HistoryRow] = []
    for name in counts.keys() | (latest.keys() - {ALL_QUEUES}):
        now, known = counts.get(name), latest.get(name)
        if now is None or known is None or now != known.counts:
            changed += _rows(name, now, known, minute, begins=not latest)
    return changed


def _rows(
    name: str, now: Counts | None, known: Latest | None, minute: int, *, begins: bool
) -> Iterator[HistoryRow]:
    counts = now or NOTHING
    before = known or Latest(before_history(counts) if begins else NOTHING, 0)
    for span in (MINUTE, HOUR):
        at = minute - minute % span
        if before.at - before.at % span < at - span:
            yield HistoryRow("queue", name, span, at - span, before.counts)
        yield HistoryRow("queue", name, span, at, counts)
    # A row without counts deletes the stored row, because the queue no longer exists.
    yield HistoryRow("queue", name, ALWAYS, 0, () if now is None else (*counts, minute))


# -- storing snapshots -----------------------------------------------------------------------------


class QueueSnapshots:
    """The snapshots that one process stores."""

    def __init__(self) -> None:
        self._due = 0.0  # wall time; at once, since later snapshots are compared with the first

    def acted(self) -> None:
        """Record that this process did something with jobs in this minute."""
        self._due = min(self._due, _minute_of(clock.wall()) + MINUTE + _LATE)

    def due_in(self) -> float:
        """Seconds until the next snapshot is due; infinity until the process acts."""
        return max(0.0, self._due - clock.wall())

    def keep(self, broker: Store, *, ending: bool = False) -> None:
        """Store the snapshot that is due, if any: the totals at the end of the minute before now.

        Give ``ending`` when the process ends: then the snapshot of this minute is stored early.

        Raises:
            BrokerUnavailable: the store cannot be reached. The next try comes a minute later.
        """
        now = clock.wall()
        if now < self._due and not (ending and self._due < float("inf")):
            return
        self._due = now + MINUTE
        if broker.features.issuperset(_NEEDS):
            try:
                _store(broker, now, ending)
            except BrokerUnavailable:
                raise
            except TidemillError as error:
                log.warning("the totals of queues are not kept for this minute: %s", error)
        self._due = float("inf")


def _store(broker: Store, now: float, ending: bool) -> None:
    minute = _minute_of(now) - (0 if ending else MINUTE)
    history = with_history(broker, "a snapshot of the queues")
    latest = latest_of(history.history("queue", ALWAYS, 0, 1))
    if not ending and ALL_QUEUES in latest and latest[ALL_QUEUES].at >= minute:
        return  # another process has stored it
    rows = changed_rows(latest, counts_of(broker.stats()), minute)
    if not ending and (rows or not latest):  # after ``ending``, others store this minute again
        rows.append(HistoryRow("queue", ALL_QUEUES, ALWAYS, 0, (minute,)))
    if rows:
        history.keep_history(rows)


def _minute_of(now: float) -> int:
    return int(now) - int(now) % MINUTE


# -- reading snapshots -----------------------------------------------------------------------------


def queue_numbers(
    read: Read, stats: ReadQueues | None, since: int, span: int, now: float
) -> list[QueueNumbers]:
    """The numbers of all queues together, then of each, from ``since`` up to now.

    ``stats`` is None when the broker cannot read its queues. The newest numbers are read last. So
    no number of a period is newer than the numbers of the next period.
    """
    latest = latest_of(read("queue", ALWAYS, 0, 1))
    current = int(now) - int(now) % span
    found: dict[str, dict[int, Counts]] = {}
    for row in read("queue", span, since - span, current + span):
        found.setdefault(row.name, {})[row.at] = row.counts
    names = (found.keys() | latest.keys()) - {ALL_QUEUES}
    first = {name: _first(found.get(name, {}), latest.get(name)) for name in names}
    if stats is not None:
        queues = counts_of(stats())
        for name in first.keys() | queues.keys():
            counts = queues.get(name, NOTHING)
            if name not in first:
                first[name] = NOTHING if latest else before_history(counts)
            found.setdefault(name, {})[current] = counts
    ends = [(at, min(at + span, int(now))) for at in range(since, current + span, span)]
    lines = {name: _points(ends, found.get(name, {}), first[name]) for name in sorted(first)}
    return [
        QueueNumbers(name, span, points)
        for name, points in (("", _sum(ends, lines.values())), *lines.items())
    ]


def _first(rows: Mapping[int, Counts], latest: Latest | None) -> Counts:
    """The first known numbers of a queue, to compare later numbers with."""
    if rows:
        return rows[min(rows)]
    assert latest is not None  # a queue without a row in this time has not changed
    return latest.counts


def _points(
    ends: Sequence[tuple[int, int]], rows: Mapping[int, Counts], last: Counts
) -> list[QueuePoint]:
    """A point for each period. A period without a row, or with fallen totals, adds nothing."""
    points = []
    for at, end in ends:
        counts = rows.get(at, last)
        added = [max(0, now - then) for now, then in zip(counts, last[:TOTALS], strict=False)]
        *states, oldest = counts[TOTALS:]
        numbers = at, *added, *states, max(1, end - oldest) if oldest else 0
        points.append(QueuePoint(*numbers))
        last = counts
    return points


def _sum(
    ends: Sequence[tuple[int, int]], lines: Iterable[Sequence[QueuePoint]]
) -> list[QueuePoint]:
    """The sums of the points of all queues, and the age of the oldest job in all queues."""
    sums = []
    for (at, _), *points in zip(ends, *lines, strict=True):
        columns = [*zip(NOTHING, *[astuple(point)[1:] for point in points], strict=True)]
        numbers = [*map(sum, columns[:-1]), max(columns[-1])]
        sums.append(QueuePoint(at, *numbers))
    return sums


# -- mill.history ----------------------------------------------------------------------------------

DAY = 24 * 3600

_PARTS = ("queue", "task", "release")


class Period(msgspec.Struct, frozen=True):
    """A period of rows: ``since <= at < until`` in wall seconds; each row has ``span`` seconds."""

    since: int
    until: int
    span: int
    now: float

    @property
    def seconds(self) -> float:
        """The length of the period up to now; at least a second."""
        return max(1.0, min(float(self.until), self.now) - self.since)


class History:
    """Numbers of past runs and queues: by minute for two days, by hour for ninety days.

    ``since`` and ``until`` are seconds before now: numbers or ``timedelta``. Every method has an
    async twin with an ``a`` before its name.

    Raises:
        FeatureMissing: the broker keeps no history.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def tasks(
        self,
        since: Seconds = 3600,
        *,
        until: Seconds = 0,
        task: str = "",
        queue: str = "",
        release: str | None = None,
        by: Sequence[str] = ("queue", "task"),
    ) -> list[TaskNumbers]:
        """How runs ended, and how long they waited and ran. The task with the most runs is first.

        Args:
            since: seconds before now at which the period begins.
            until: seconds before now at which the period ends.
            task: only runs of this task.
            queue: only runs of jobs of this queue.
            release: only runs by workers of this release; ``""`` for workers without a release.
            by: how the runs are grouped: by ``queue``, ``task``, ``release``, or several of these.

        Raises:
            InvalidOption: the period is empty, or ``by`` has an unknown name.
        """
        if not set(by) <= set(_PARTS):
            raise InvalidOption(f"by can name queue, task and release, not {tuple(by)!r}")
        period = _period(since, until)
        sums: dict[tuple[str, ...], list[int]] = {}
        for row, parts, _ in self._task_rows(period, queue, task, release):
            key = tuple([parts[n] if name in by else "" for n, name in enumerate(_PARTS)])
            before = sums.get(key)
            sums[key] = list(map(operator.add, before, row)) if before else row
        found = [TaskNumbers.of(key, row, period.seconds) for key, row in sums.items()]
        return sorted(found, key=lambda one: -one.runs)

    def totals(self) -> list[TaskNumbers]:
        """How all runs ended since the history began, grouped by queue and task, sorted by name.

        These numbers never fall. They belong to no period, so their ``rate`` is 0.
        """
        found = []
        for row in self._rows("task", ALWAYS, 0, 1):
            counts = [*row.counts, *[0] * (WIDTH - len(row.counts))]
            found.append(TaskNumbers.of(split_name(row.name), counts, float("inf")))
        return sorted(found, key=lambda one: (one.queue, one.task))

    def series(
        self,
        since: Seconds = 3600,
        *,
        until: Seconds = 0,
        task: str = "",
        queue: str = "",
        release: str | None = None,
    ) -> Series:
        """As :meth:`tasks`, for charts: one number for each minute or hour, even if it is 0."""
        period = _period(since, until)
        sums: dict[int, list[int]] = {}
        for row, _, at in self._task_rows(period, queue, task, release):
            before = sums.get(at)
            sums[at] = list(map(operator.add, before, row)) if before else row
        times = list(range(period.since, period.until, period.span))
        return Series.of(times, period.span, [sums.get(at, [0] * WIDTH) for at in times])

    def queues(self, since: Seconds = 3600, *, queue: str = "") -> list[QueueNumbers]:
        """How many jobs entered each queue, and how they ended, by minute or hour, up to now.

        The numbers of the current minute come from the queues themselves. A minute in which no
        worker or server acts has no numbers: its puts count in the next minute that has numbers.
        """
        runtime, period = self._runtime, _period(since, 0)
        broker = runtime.broker
        stats = broker.stats if Feature.INSPECT in broker.features else None
        found = queue_numbers(self._rows, stats, period.since, period.span, period.now)
        return [one for one in found if queue in ("", one.queue)]

    def failures(
        self,
        since: Seconds = 3600,
        *,
        until: Seconds = 0,
        task: str = "",
        release: str | None = None,
    ) -> list[FailureNumbers]:
        """The failures of the code, grouped by fingerprint and task; the most frequent first."""
        period = _period(since, until)
        groups: dict[tuple[str, str], list[tuple[str, HistoryRow]]] = {}
        for row in self._rows("failure", period.span, period.since, period.until):
            fingerprint, name, of = split_name(row.name)
            if task in ("", name) and release in (None, of):
                groups.setdefault((fingerprint, name), []).append((of, row))
        found = [_failure(*key, rows, period.span) for key, rows in groups.items()]
        return sorted(found, key=lambda one: -one.count)

    def deploys(self, since: Seconds = 90 * DAY) -> list[Deploy]:
        """The releases that workers have run for the first time, oldest first."""
        period = _period(since, 0)
        notes = Notes(self._runtime.broker, "deploy", "deploys").list()
        found = [msgspec.msgpack.decode(note.body, type=Deploy) for note in notes]
        found = [one for one in found if one.at >= period.since]
        return sorted(found, key=lambda one: one.at)

    # -- asyncio --------------------------------------------------------------------------------

    atasks = in_thread(tasks)
    atotals = in_thread(totals)
    aseries = in_thread(series)
    aqueues = in_thread(queues)
    afailures = in_thread(failures)
    adeploys = in_thread(deploys)

    # -- rows -----------------------------------------------------------------------------------

    def _rows(self, kind: str, span: int, since: int, until: int) -> list[HistoryRow]:
        return with_history(self._runtime.broker, "mill.history").history(kind, span, since, until)

    def _task_rows(
        self, period: Period, queue: str, task: str, release: str | None
    ) -> Iterable[tuple[list[int], tuple[str, str, str], int]]:
        """The numbers of each row that matches, its (queue, task, release), and its time."""
        for row in self._rows("task", period.span, period.since, period.until):
            of_queue, of_task, of_release = split_name(row.name)
            if queue in ("", of_queue) and task in ("", of_task) and release in (None, of_release):
                counts = [*row.counts, *[0] * (WIDTH - len(row.counts))]
                yield counts, (of_queue, of_task, of_release), row.at


def _period(since: Seconds, until: Seconds) -> Period:
    first, last, now = check_seconds("since", since), check_seconds("until", until), clock.wall()
    if last >= first:
        raise InvalidOption(
            f"until ({last:g}) must be less than since ({first:g}): both count seconds before now"
        )
    span = MINUTE if first <= DAY else HOUR
    begin = int(now - first) // span * span
    end = int(now - last) // span * span + (0 if last else span)
    return Period(begin, max(end, begin + span), span, now)


def _failure(
    fingerprint: str, task: str, rows: Sequence[tuple[str, HistoryRow]], span: int
) -> FailureNumbers:
    samples = [
        msgspec.msgpack.decode(row.sample, type=FailureSample) for _, row in rows if row.sample
    ]
    latest = max(samples, key=lambda sample: sample.time, default=FailureSample())
    return FailureNumbers(
        fingerprint=fingerprint,
        task=task,
        error=latest.error,
        message=latest.message,
        place=latest.place,
        failed=_total(rows, FAILED),
        retried=_total(rows, RETRIED),
        first=min(row.at for _, row in rows),
        last=latest.time or max(row.at + span for _, row in rows),
        releases=tuple(sorted({release for release, _ in rows})),
        hosts=tuple(sorted({sample.host for sample in samples})),
        sample=latest,
    )


def _total(rows: Iterable[tuple[str, HistoryRow]], place: int) -> int:
    return sum(row.counts[place] for _, row in rows if len(row.counts) > place)
