"""``mill.history``: rows of the store as numbers of tasks, queues and failures."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
from moved_clock import MovedClock

from tidemill import InvalidOption, Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history_rows import (
    ALWAYS,
    HOUR,
    MINUTE,
    RUN_SUM,
    RUNS,
    SUCCEEDED,
    WIDTH,
    HistoryRow,
    bucket_of,
    join_name,
)
from tidemill.brokers.memory.broker import MemoryBroker
from tidemill.client.history import QueueNumbers, QueueSnapshots
from tidemill.core.fingerprint import FailureSample
from tidemill.errors import FeatureMissing
from tidemill.testing import run_all

NOW = 1_000_000 * 3600 + 30 * 60 + 20.0
"""Twenty seconds after half past an hour."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch, speed=0.01, wall=NOW)


@pytest.fixture
def mill(clock: MovedClock) -> Tidemill:
    return Tidemill("memory://")


def keep(mill: Tidemill, *rows: HistoryRow) -> None:
    mill.broker.keep_history(rows)


def floor(at: float, span: int) -> int:
    return int(at) // span * span


def ran(ago: float, *name: str, succeeded: int = 1, seconds: float = 0.1) -> list[HistoryRow]:
    """The rows of runs some seconds ago."""
    counts = [0] * WIDTH
    counts[SUCCEEDED], counts[RUN_SUM] = succeeded, int(1000 * seconds * succeeded)
    counts[RUNS.start + bucket_of(seconds)] = succeeded
    return [
        HistoryRow("task", join_name(*name), span, floor(NOW - ago, span), tuple(counts))
        for span in (MINUTE, HOUR)
    ]


def failed(ago: float, release: str, host: str, number: int, times: int) -> list[HistoryRow]:
    sample = FailureSample("ValueError", f"no {number}", "a.py:f", host=host, time=NOW - ago)
    return [
        HistoryRow(
            "failure",
            join_name("f1", "t", release),
            span,
            floor(NOW - ago, span),
            (0, times, 1),
            msgspec.msgpack.encode(sample),
        )
        for span in (MINUTE, HOUR)
    ]


# -- tasks ----------------------------------------------------------------------------------------


def test_tasks_have_counts_rates_and_times(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    MovedClock(monkeypatch, speed=0.0, wall=NOW)
    keep(mill, *ran(30, "q", "t", "", succeeded=90), *ran(90, "q", "t", "r1", succeeded=10))
    (one,) = mill.history.tasks(since=600)
    assert (one.queue, one.task, one.release) == ("q", "t", "")
    assert (one.succeeded, one.failed, one.runs) == (100, 0, 100)
    assert one.seconds == 620  # from the start of a minute
    assert one.rate == pytest.approx(100 / 620)
    assert one.run.count == 100
    assert one.run.sum == pytest.approx(10.0)
    assert one.run.p50 == pytest.approx(0.1, rel=1.0)
    assert one.wait.p50 is None


def test_tasks_can_be_told_apart_by_less_or_more(mill: Tidemill) -> None:
    keep(mill, *ran(30, "a", "t", "1"), *ran(30, "b", "t", "2"), *ran(90, "b", "u", "2"))
    tasks = mill.history.tasks
    assert {(one.queue, one.task) for one in tasks()} == {("a", "t"), ("b", "t"), ("b", "u")}
    assert {(one.task, one.runs) for one in tasks(by=("task",))} == {("t", 2), ("u", 1)}
    assert {(one.release, one.runs) for one in tasks(by=("release",))} == {("1", 1), ("2", 2)}
    assert [one.runs for one in tasks(queue="b", task="t")] == [1]
    assert [one.runs for one in tasks(release="2", by=())] == [2]
    with pytest.raises(InvalidOption, match="by can name queue, task and release"):
        tasks(by=("host",))


def test_a_time_ends_where_it_is_told_to(mill: Tidemill) -> None:
    keep(mill, *ran(30, "q", "t", "", succeeded=1), *ran(700, "q", "t", "", succeeded=5))
    assert [one.runs for one in mill.history.tasks(since=1200, until=600)] == [5]
    assert [one.runs for one in mill.history.tasks(dt.timedelta(minutes=5))] == [1]
    with pytest.raises(InvalidOption, match="until"):
        mill.history.tasks(since=600, until=600)


def test_a_series_has_a_number_for_every_minute(mill: Tidemill) -> None:
    keep(mill, *ran(30, "q", "t", "", succeeded=2), *ran(150, "q", "t", "", succeeded=3))
    series = mill.history.series(since=240)
    assert series.at == [floor(NOW, 60) - 60 * n for n in (4, 3, 2, 1, 0)]
    assert series.succeeded == [0, 3, 0, 2, 0]
    assert [value is None for value in series.run_p95] == [True, False, True, False, True]


# -- failures -------------------------------------------------------------------------------------


def test_failures_are_grouped_by_fingerprint(mill: Tidemill) -> None:
    rows = [*failed(30, "2", "h2", 18, 4), *failed(600, "1", "h1", 17, 2)]
    keep(mill, *rows)
    (one,) = mill.history.failures()
    assert (one.fingerprint, one.task, one.error, one.place) == ("f1", "t", "ValueError", "a.py:f")
    assert (one.failed, one.retried, one.count) == (6, 2, 8)
    assert (one.releases, one.hosts) == (("1", "2"), ("h1", "h2"))
    assert (one.first, one.last) == (floor(NOW - 600, 60), NOW - 30)
    assert one.message == one.sample.message == "no 18"
    (new,) = mill.history.failures(release="2")
    assert new.count == 5
    assert mill.history.failures(task="other") == []


# -- queues ---------------------------------------------------------------------------------------


def numbers(found: list[QueueNumbers], queue: str = "") -> QueueNumbers:
    (one,) = [one for one in found if one.queue == queue]
    return one


def test_queues_are_differences_of_snapshots_and_end_now(mill: Tidemill, clock: MovedClock) -> None:
    @mill.task(name="t", queue="q")
    def task() -> None: ...

    snapshots = QueueSnapshots()
    snapshots.keep(mill.broker)  # of the empty store
    mill.enqueue_many([task.call() for _ in range(3)])
    snapshots.acted()
    clock.advance(60)
    snapshots.keep(mill.broker)
    mill.enqueue_many([task.call() for _ in range(2)])
    run_all(mill)
    for name in ("q", ""):
        one = numbers(mill.history.queues(since=180), name)
        assert [point.accepted for point in one.points] == [0, 0, 3, 2]
        assert [point.succeeded for point in one.points] == [0, 0, 0, 5]
        assert [point.ready for point in one.points] == [0, 0, 3, 0]
        assert one.points[-1].at == floor(clock.wall(), 60)
        assert one.total("accepted") == 5


def test_jobs_that_ended_before_the_history_began_add_nothing(  # they were moved here
    mill: Tidemill, clock: MovedClock
) -> None:
    @mill.task(name="t")
    def task() -> None: ...

    mill.enqueue_many([task.call() for _ in range(3)])
    run_all(mill)
    for span in (MINUTE, HOUR, ALWAYS):
        for row in mill.broker.history("queue", span):
            mill.broker.keep_history([msgspec.structs.replace(row, counts=())])
    clock.advance(120)
    QueueSnapshots().keep(mill.broker)
    task.enqueue()
    assert numbers(mill.history.queues(since=60)).total("accepted") == 1


def test_a_minute_without_a_snapshot_keeps_the_states(mill: Tidemill, clock: MovedClock) -> None:
    at = floor(NOW - 180, 60)
    counts = (5, *[0] * 8, 4, 0, at + 51)  # a job is ready since then
    keep(mill, HistoryRow("queue", "q", MINUTE, at, counts))
    one = numbers(mill.history.queues(since=180), "q")
    assert [point.ready for point in one.points] == [4, 4, 4, 0]  # the store is empty now
    assert [point.oldest for point in one.points] == [9, 69, 129, 0]  # nobody has taken the job


# -- when snapshots are kept ----------------------------------------------------------------------


@pytest.fixture
def put(mill: Tidemill) -> Callable[[], object]:
    """Change the queues."""

    @mill.task(name="t")
    def task() -> None: ...

    return task.enqueue


def test_one_of_several_busy_processes_keeps_the_snapshot_of_a_minute(
    mill: Tidemill, clock: MovedClock, put: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, stats, reads = [QueueSnapshots() for _ in range(3)], mill.broker.stats, list[float]()
    monkeypatch.setattr(mill.broker, "stats", lambda: reads.append(clock.wall()) or stats())
    for _ in range(300):  # a step each second
        put()
        for one in processes:
            one.keep(mill.broker)
            one.acted()
        clock.advance(1)
    first = floor(NOW, 60) - 60
    assert [row.at for row in rows(mill)][1:] == [first + 60 * n for n in range(6)]
    assert len(reads) == 6
    assert 0 < processes[0].due_in() <= 60.1


def test_idle_queues_cost_no_rows(mill: Tidemill, clock: MovedClock) -> None:
    # given many queues, and a snapshot of them
    @mill.task(name="t")
    def task() -> None: ...

    mill.enqueue_many([task.using(queue=f"q{n}").call() for n in range(400)])
    snapshots = QueueSnapshots()
    snapshots.keep(mill.broker)
    before = all_rows(mill)
    # when one of them has jobs for three hours
    for _ in range(180):
        task.using(queue="q7").enqueue()
        snapshots.acted()
        clock.advance(60)
        snapshots.keep(mill.broker)
    # then only this queue has more rows: by minute, and by hour
    new = all_rows(mill) - before
    assert {name for name, _, _ in new} == {"q7"}
    assert len(new) == 180 + 3
    idle = numbers(mill.history.queues(since=3600), "q8")
    assert [point.ready for point in idle.points] == [1] * 61
    ages = [point.oldest for point in idle.points]
    assert all(later - now == 60 for now, later in itertools.pairwise(ages[:-1]))
    assert numbers(mill.history.queues(since=3600)).points[29].ready == 400 + 180 - 30


def all_rows(mill: Tidemill) -> set[tuple[str, int, int]]:
    spans = (MINUTE, HOUR, ALWAYS)
    return {
        (row.name, row.span, row.at) for span in spans for row in mill.broker.history("queue", span)
    }


def test_a_queue_that_was_deleted_counts_from_nothing_again(
    mill: Tidemill, clock: MovedClock
) -> None:
    @mill.task(name="t", queue="q")
    def task() -> None: ...

    for count in (5, 2):
        mill.enqueue_many([task.call() for _ in range(count)])
        run_all(mill)
        clock.advance(120)
        if count == 5:
            assert mill.broker.forget_queue("q")
            task.using(queue="other").enqueue()
            run_all(mill)  # keeps a snapshot without the queue
            assert ("q", ALWAYS, 0) not in all_rows(mill)
            clock.advance(120)
    one = numbers(mill.history.queues(since=600), "q")
    assert (one.total("accepted"), one.total("succeeded")) == (7, 7)


def test_sums_are_exact_whoever_keeps_the_snapshots(
    clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(int(os.environ.get("TIDEMILL_EXAMPLES", "20"))):
        with Tidemill("memory://") as mill:
            keep_at_random(mill, clock, monkeypatch, seed)


def keep_at_random(
    mill: Tidemill, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # given three processes that act and end at random, and the totals of each of their snapshots
    choose = random.Random(seed)
    processes = [QueueSnapshots() for _ in range(3)]
    totals: dict[tuple[int, int], dict[str, int]] = {}
    keep_history = mill.broker.keep_history

    def keeps(rows: Sequence[HistoryRow]) -> None:
        keep_history(rows)
        for row in rows:
            if row.span:
                totals[row.span, row.at] = accepted(mill)

    monkeypatch.setattr(mill.broker, "keep_history", keeps)

    @mill.task(name="t")
    def task() -> None: ...

    for _ in range(80):
        name, one = choose.choice("abcd"), choose.randrange(3)
        for _ in range(choose.choice((0, 0, 1, 3))):
            task.using(queue=name, delay=1e9).enqueue()
        if choose.random() < 0.7:
            processes[one].acted()
        if choose.random() < 0.1:
            processes[one].keep(mill.broker, ending=True)
            processes[one] = QueueSnapshots()
        clock.advance(choose.choice((1, 20, 59, 61, 200, 4000, 80_000)))
        for each in processes:
            each.keep(mill.broker)
    # then the numbers of each time are what was put since the snapshot before it
    now = accepted(mill)
    for since in (600, 86_400, 20 * 86_400, 89 * 86_400):
        span = MINUTE if since <= 86_400 else HOUR
        begin = floor(clock.wall() - since, span)
        last = max([at for of, at in totals if of == span and at < begin], default=-1)
        before = totals.get((span, last), {})
        expected = {name: number - before.get(name, 0) for name, number in now.items()}
        found = {one.queue: one.total("accepted") for one in mill.history.queues(since=since)}
        assert found == {"": sum(expected.values()), **expected}


def accepted(mill: Tidemill) -> dict[str, int]:
    return {row.name: row.accepted for row in mill.queues()}


def rows(mill: Tidemill) -> list[HistoryRow]:
    return mill.broker.history("queue", MINUTE)


# -- the rest -------------------------------------------------------------------------------------


def test_releases_are_noted_once_by_the_workers_that_run_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mill = Tidemill("memory://")
    for release in ("1.0", "1.0", "1.1"):
        monkeypatch.setenv("TIDEMILL_RELEASE", release)
        run_all(mill)
    assert [one.release for one in mill.history.deploys()] == ["1.0", "1.1"]


def test_a_broker_without_history_says_so(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryBroker, "features", MemoryBroker.features - {Feature.HISTORY})
    mill.close()
    with pytest.raises(FeatureMissing, match=r"mill\.history needs the feature history"):
        mill.history.tasks()
