"""Reading the history of a store: ``mill.history``.

A period that begins at most a day ago is read from rows by minute. A longer period is read from
rows by hour. A period begins at the start of a minute or hour. By default it ends now.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, MINUTE, HistoryRow, split_name
from tidemill.brokers.generic.notes import Notes
from tidemill.client.history_numbers import (
    Deploy,
    FailureNumbers,
    QueueNumbers,
    Series,
    TaskNumbers,
)
from tidemill.client.queue_history import queue_numbers
from tidemill.client.threads import in_thread
from tidemill.core.clock import clock
from tidemill.core.config import Seconds, check_seconds
from tidemill.core.errors import InvalidOption
from tidemill.core.fingerprint import FailureSample
from tidemill.core.rollup import FAILED, RETRIED, WIDTH

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

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

    def __init__(self, mill: Runtime) -> None:
        self._mill = mill

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
        mill, period = self._mill, _period(since, 0)
        broker = mill.broker
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
        notes = Notes(self._mill.broker, "deploy", "deploys").list()
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
        return with_history(self._mill.broker, "mill.history").history(kind, span, since, until)

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
