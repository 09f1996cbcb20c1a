"""The history of verdicts: what counts, and in which step the numbers go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest
from harness import eventually
from moved_clock import MovedClock

from tidemill import State, Tidemill
from tidemill.brokers.contract.exchange import Reply
from tidemill.brokers.contract.history_rows import (
    ALWAYS,
    CANCELLED,
    FAILED,
    GIVEN_BACK,
    HOUR,
    MINUTE,
    RETRIED,
    RUN_SUM,
    RUNS,
    SUCCEEDED,
    WAIT_SUM,
    WAITS,
    HistoryRow,
    split_name,
)
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.fingerprint import OTHER, FailureSample
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.core.retry import Fail, RetryPolicy, Snooze
from tidemill.errors import BrokerUnavailable, StoreFull
from tidemill.testing import run_all, worker
from tidemill.worker.counting import Concluded, Counting
from tidemill.worker.history import FAILURES_MOST, TICK, WorkerHistory


def concluded(
    outcome: Outcome = Outcome.SUCCESS,
    *,
    token: int = 1,
    attempt: int = 1,
    error: str = "",
    started: float = 110.0,
    envelope: Envelope | None = None,
) -> Concluded:
    """A verdict on a job that was made at 100 and ran for half a second, from 110 on."""
    if envelope is None:
        envelope = Envelope(
            id="a", queue="q", task="t", created=100.0, retries=RetryPolicy(limit=2)
        )
    lease = Lease(token, attempt, 0, 0, 0, 0.0, 0.0, 0.0, encode_envelope(envelope))
    ended = started + 0.5 if started else 0.0
    return Verdict(token, outcome, error=error, started=started, ended=ended), lease, None


def counts_of(*of: Concluded) -> dict[str, tuple[int, ...]]:
    counting = Counting("w")
    counting.count(of)
    return {row.kind: row.counts for row in counting.take()}


# -- what counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "attempt", "place"),
    [
        (Outcome.SUCCESS, 1, SUCCEEDED),
        (Outcome.RETRY, 2, RETRIED),
        (Outcome.RETRY, 3, FAILED),  # the last attempt
        (Outcome.FAIL, 1, FAILED),
        (Outcome.CANCELLED, 1, CANCELLED),
        (Outcome.RELEASE, 1, GIVEN_BACK),
        (Outcome.SNOOZE, 1, GIVEN_BACK),
    ],
)
def test_each_end_of_a_run_has_its_place(outcome: Outcome, attempt: int, place: int) -> None:
    row = counts_of(concluded(outcome, attempt=attempt))["task"]
    places = (SUCCEEDED, FAILED, RETRIED, GIVEN_BACK, CANCELLED)
    assert [row[one] for one in places] == [int(one == place) for one in places]


@pytest.mark.parametrize("outcome", [Outcome.RELEASE, Outcome.SNOOZE])
def test_a_job_that_did_not_run_counts_nowhere(outcome: Outcome) -> None:
    assert counts_of(concluded(outcome, started=0.0)) == {}


def test_waits_and_runs_are_in_sums_and_buckets() -> None:
    row = counts_of(concluded(), concluded())["task"]
    assert (row[WAIT_SUM], row[RUN_SUM]) == (20_000, 1000)
    assert row[WAITS][14] == 2  # 2 ** 13 to 2 ** 14 ms
    assert row[RUNS][9] == 2
    assert sum(row[WAITS]) == sum(row[RUNS]) == 2


@pytest.mark.parametrize(
    ("envelope", "wait"),
    [
        (Envelope(id="a", created=100.0, delay=4.0), 6000),
        (Envelope(id="a", created=100.0, at=107.0), 3000),
        (Envelope(id="a", created=120.0), 0),  # the producer's clock is ahead
    ],
)
def test_a_wait_begins_when_the_job_is_due(envelope: Envelope, wait: int) -> None:
    assert counts_of(concluded(envelope=envelope))["task"][WAIT_SUM] == wait


def test_a_failure_has_a_fingerprint_and_a_sample() -> None:
    counting = Counting("w")
    for outcome, number in ((Outcome.RETRY, 1), (Outcome.FAIL, 2)):
        counting.count([concluded(outcome, error=f"ValueError: no {number}")])
    (_, failure) = counting.take()
    assert (failure.kind, failure.counts[FAILED], failure.counts[RETRIED]) == ("failure", 1, 1)
    sample = msgspec.msgpack.decode(failure.sample, type=FailureSample)
    assert (sample.error, sample.message) == ("ValueError", "no 2")
    assert (sample.job, sample.queue, sample.task, sample.worker) == ("a", "q", "t", "w")


def test_a_frame_counts_what_its_verdicts_count() -> None:
    of = [
        concluded(envelope=Envelope(id="a", queue=queue, task=task, created=created, at=at))
        for queue, task in (("a", "t"), ("a", "t"), ("b", "t"), ("b", "u"), ("a", "t"))
        for created in (100.0, 120.0, 0.0, 110.0 - 0.001)  # also later than the start, and long ago
        for at in (0.0, 109.0)
    ]
    of += [concluded(attempt=2), concluded(Outcome.RETRY), concluded(started=3e9)]
    of = [(verdict, lease, lease and lease.open()) for verdict, lease, _ in of]
    frame, one_by_one = Counting("w"), Counting("w")
    frame.count_frame(of)
    one_by_one.count(of)
    assert frame.take() == one_by_one.take()


# -- with which step ------------------------------------------------------------------------------


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch, speed=0.0, wall=3661.0)


@pytest.fixture
def history(stopped: MovedClock) -> WorkerHistory:
    """A history at 3,661 s."""
    one = WorkerHistory("w", "r1", pause=30.0)
    one.on = True
    return one


def due_in(history: WorkerHistory) -> float:
    """Seconds until a step with numbers is due."""
    return max(0.0, history.due - clock.machine())


def settle(
    history: WorkerHistory,
    *of: Concluded,
    answers: Sequence[bool | None] = (),
    refused: bool = False,
) -> list[HistoryRow]:
    """Make a step with these verdicts, and settle them; return the rows that were in the step."""
    history.conclude(of)
    rows = history.rows(settles=True)
    verdicts = [one[0] for one in of]
    history.settled(verdicts, answers or [True] * len(of), refused=refused)
    return rows


def test_settled_numbers_go_with_the_next_step_by_minute_by_hour_and_for_ever(
    history: WorkerHistory,
) -> None:
    assert settle(history, concluded()) == []
    assert due_in(history) == TICK
    rows = settle(history)
    assert [(row.span, row.at, row.name) for row in rows] == [
        (MINUTE, 3660, "q\x1ft\x1fr1"),
        (HOUR, 3600, "q\x1ft\x1fr1"),
        (ALWAYS, 0, "q\x1ft\x1f"),  # not by release, since nobody deletes this row
    ]
    assert history.rows(settles=True) == []  # once only
    assert due_in(history) == float("inf")


def test_verdicts_that_the_store_did_not_take_do_not_count(history: WorkerHistory) -> None:
    of = [concluded(token=1), concluded(Outcome.FAIL, token=2, error="E: x")]
    settle(history, *of, answers=[True, False])
    assert [row.kind for row in history.rows(settles=True)] == ["task"] * 3
    assert total(history.rows(settles=True), "task", SUCCEEDED) == 1


def test_a_job_with_a_held_verdict_counts_once(history: WorkerHistory) -> None:
    held, back = concluded(Outcome.RETRY, error="E: x"), concluded(Outcome.RELEASE, started=0.0)
    history.conclude([held, concluded(token=2)])
    history.rows(settles=True)
    history.settled([held[0], back[0], concluded(token=2)[0]], [True, True, False])
    assert total(history.rows(settles=True), "task", RETRIED) == 1


def test_a_verdict_that_was_replaced_counts_as_what_was_stored(
    history: WorkerHistory, stopped: MovedClock
) -> None:
    history.conclude([concluded()])
    history.rows(settles=True)
    history.settled([concluded(Outcome.FAIL, error="E: x")[0]], [True], refused=True)
    stopped.advance(history.pause)
    rows = history.rows(settles=True)
    assert (total(rows, "task", SUCCEEDED), total(rows, "task", FAILED)) == (0, 1)


def test_too_many_failures_share_one_name(history: WorkerHistory) -> None:
    words = [f"{'x' * n}y" for n in range(FAILURES_MOST + 10)]
    settle(history, *[concluded(Outcome.FAIL, error=f"E: {word}") for word in words])
    rows = [row for row in history.rows(settles=True) if (row.kind, row.span) == ("failure", HOUR)]
    assert len({row.name for row in rows}) == FAILURES_MOST + 1
    assert sum(row.counts[FAILED] for row in rows if split_name(row.name)[0] == OTHER) == 10


def total(rows: Sequence[HistoryRow], kind: str, place: int, span: int = MINUTE) -> int:
    return sum(row.counts[place] for row in rows if (row.kind, row.span) == (kind, span))


# -- a worker -------------------------------------------------------------------------------------


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def in_store(mill: Tidemill, kind: str, place: int, span: int = MINUTE) -> int:
    rows = mill.broker.history(kind, span)  # type: ignore[attr-defined]
    return total(rows, kind, place, span)


def test_the_numbers_of_a_worker_are_those_of_its_queues(mill: Tidemill) -> None:
    @mill.task(name="well")
    def well() -> None: ...

    @mill.task(name="ill", retries=2)
    def ill() -> None:
        raise ValueError("ill")

    @mill.task(name="over")
    def over() -> None:
        raise Fail("over")

    snoozed: list[int] = []

    @mill.task(name="later")
    def later() -> None:
        if not snoozed:
            snoozed.append(1)
            raise Snooze(600)

    for task, count in ((well, 30), (ill, 3), (over, 2), (later, 1)):
        mill.enqueue_many([task.call() for _ in range(count)])
    run_all(mill, scheduled=True)
    (queue,) = mill.queues()
    for span in (MINUTE, HOUR, ALWAYS):
        assert in_store(mill, "task", SUCCEEDED, span) == queue.succeeded == 31
        assert in_store(mill, "task", FAILED, span) == queue.failed == 5
        assert in_store(mill, "task", RETRIED, span) == queue.retried == 6
        assert in_store(mill, "task", GIVEN_BACK, span) == 1
    for span in (MINUTE, HOUR):
        assert in_store(mill, "failure", FAILED, span) == 5
        assert in_store(mill, "failure", RETRIED, span) == 6


def test_a_worker_says_its_release(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_RELEASE", "2.1")

    @mill.task(name="well")
    def well() -> None: ...

    well.enqueue()
    run_all(mill)
    (row,) = mill.broker.history("task", HOUR)  # type: ignore[attr-defined]
    assert split_name(row.name) == ["default", "well", "2.1"]


def test_a_job_that_the_supervisor_settles_is_counted(mill: Tidemill) -> None:
    over = threading.Event()

    @mill.task(name="stuck", timeout=0.2, retries=0)
    def stuck() -> None:
        while not over.is_set():
            try:
                over.wait(60)
            except BaseException:
                continue

    job = stuck.enqueue()
    with worker(mill):
        mill.runtime.job_store.wait_for([job.id], 60)
        eventually(lambda: in_store(mill, "task", FAILED) == 1, "the failure counts")
        over.set()
    assert in_store(mill, "task", FAILED) == 1  # not a second time when its process is dead
    assert job.state is State.FAILED


@pytest.mark.parametrize("error", [BrokerUnavailable, OSError, StoreFull])
def test_numbers_of_steps_that_fail_come_later(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Each step with verdicts fails the first time."""
    monkeypatch.setenv("TIDEMILL_WAITS", '{"retry": 0.01, "refused": 0}')

    @mill.task(name="well")
    def well() -> None: ...

    mill.enqueue_many([well.call() for _ in range(20)])
    exchange: Callable[..., Reply] = mill.broker.exchange
    failed: set[tuple[int, ...]] = set()

    def fails(step: object) -> Reply:
        tokens = tuple(verdict.token for verdict in step.verdicts)  # type: ignore[attr-defined]
        if tokens and not failed & {tokens}:
            failed.add(tokens)
            raise error("not now")
        return exchange(step)

    monkeypatch.setattr(mill.broker, "exchange", fails)
    with worker(mill):
        while any(not job.state.finished for job in mill.jobs()):
            mill.runtime.job_store.wait_for([job.id for job in mill.jobs()], 60)
    assert failed
    assert in_store(mill, "task", SUCCEEDED) == 20
