"""The spans of a job: its waits, as far as the store knows their causes, and its runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tidemill.client.explain import trail_of
from tidemill.core.envelope import Envelope, JobLimit, Links
from tidemill.core.job import CANCEL_ASKED, Attempt, Outcome, Record, RunOn, State
from tidemill.dashboard.waterfall import WIDTH, Cause, Known, bars_of, spans_of

T = 1_800_000_000.0


def record(state: str, envelope: dict[str, Any] | None = None, **given: Any) -> Record:
    job = Envelope(id="j", task="t", created=T, **(envelope or {}))
    return Record(envelope=job, state=State(state), seq=1, rank=0, max_attempts=4, **given)


def attempt(number: int, *times: float, outcome: Outcome = Outcome.RETRY, **given: Any) -> Attempt:
    error = given.pop("error", "" if outcome is Outcome.SUCCESS else "ValueError: no")
    leased, started, ended = (T + time if time else 0.0 for time in times)
    return Attempt(number, "w1", leased, started, ended, outcome, error, **given)


def story(one: Record, **known: Any) -> list[tuple[str, float, float]]:
    spans = spans_of(one, Known(**{"now": T + 100, **known}))
    for before, after in itertools.pairwise(spans):
        assert before.end <= after.start
    return [(span.kind, round(span.start - T, 3), round(span.end - T, 3)) for span in spans]


def test_a_job_that_failed_once_and_then_succeeded() -> None:
    one = record(
        "succeeded",
        attempts=[attempt(1, 1, 2, 5), attempt(2, 9, 9.5, 12, outcome=Outcome.SUCCESS)],
        finished=T + 12,
    )
    assert story(one) == [
        ("wait", 0, 1),
        ("prefetch", 1, 2),
        ("run", 2, 5),
        ("backoff", 5, 9),
        ("prefetch", 9, 9.5),
        ("run", 9.5, 12),
    ]
    spans = spans_of(one, Known(T + 100))
    assert [span.state for span in spans if span.kind == "run"] == ["failed", "succeeded"]
    assert not spans[0].known
    assert "a free slot" in spans[0].detail


def test_a_delayed_job_is_not_due_before_it_waits() -> None:
    done = [attempt(1, 35, 35, 36, outcome=Outcome.SUCCESS)]
    assert story(record("succeeded", {"delay": 30.0}, attempts=done)) == [
        ("delay", 0, 30),
        ("wait", 30, 35),
        ("run", 35, 36),
    ]
    waits = record("scheduled", {"delay": 300.0}, due=T + 300)
    assert story(waits) == [("delay", 0, 300)]


def test_a_ready_job_waits_for_the_present_cause() -> None:
    cause = Cause("limit", "waits for the limit api", "4 of 4 are running")
    [span] = spans_of(record("ready"), Known(T + 100, cause))
    assert (span.kind, span.label, span.is_open, span.known) == ("limit", cause.label, True, True)


def test_a_past_wait_names_its_possible_causes_only() -> None:
    done = [attempt(1, 50, 50, 51, outcome=Outcome.SUCCESS)]
    limited = record("succeeded", {"limit": JobLimit("api", "eu")}, attempts=done)
    [wait, _] = spans_of(limited, Known(T + 100, Cause("paused", "the queue is paused")))
    assert (wait.kind, wait.known) == ("wait", False)
    assert "its limit api for key eu" in wait.detail


def test_a_job_of_a_flow_waits_for_the_jobs_before_it() -> None:
    links = {"links": Links((), RunOn.SUCCESS, ("a", "b"))}
    parents = [record("succeeded", finished=T + 20), record("succeeded", finished=T + 40)]
    done = [attempt(1, 41, 41, 42, outcome=Outcome.SUCCESS)]
    one = record("succeeded", links, attempts=done)
    assert story(one, parents=parents) == [("jobs", 0, 40), ("wait", 40, 41), ("run", 41, 42)]
    # and without its parents, nobody knows when they ended
    [wait, _] = spans_of(one, Known(T + 100))
    assert (wait.kind, wait.known) == ("jobs", False)
    waiting = record("waiting", links, pending=2)
    assert story(waiting) == [("jobs", 0, 100)]


def test_a_successor_waits_for_the_job_with_its_key() -> None:
    assert story(record("waiting", {"key": "k"})) == [("key", 0, 100)]


def test_interrupted_runs_are_bars_between_the_waits() -> None:
    # case M6
    one = record(
        "running",
        log=[
            (T + 3, "begins"),
            (T + 9, "interrupted after 7.000 s: its worker was stopped"),
            (T + 60, "lost after 20.000 s with its worker w2"),
        ],
        leased=T + 70,
        worker="w3",
    )
    assert story(one, started=T + 70) == [
        ("wait", 0, 2),
        ("run", 2, 9),
        ("wait", 9, 40),
        ("run", 40, 60),
        ("wait", 60, 70),
        ("run", 70, 100),
    ]
    spans = spans_of(one, Known(T + 100, started=T + 70))
    assert [span.state for span in spans if span.kind == "run"] == ["interrupted"] * 2 + [""]
    assert "its worker was stopped" in spans[1].detail
    assert spans[3].label == "at the worker, until the worker was lost"
    assert spans[5].label == "attempt 1 of 4"
    # and the trail has them as events
    events = [(event.what, event.time - T) for event in trail_of(one)]
    assert events[1:] == [
        *[("started", 2), ("log", 3), ("interrupted", 9)],
        *[("leased", 40), ("interrupted", 60), ("leased", 70)],
    ]


def test_a_stop_is_asked_for_and_then_interrupts_the_run() -> None:
    one = record(
        "cancelled",
        attempts=[attempt(1, 1, 1, 9, outcome=Outcome.CANCELLED, error="cancelled")],
        log=[(T + 2, "begins"), (T + 6, CANCEL_ASKED[True])],
        finished=T + 9,
    )
    assert story(one) == [("wait", 0, 1), ("run", 1, 6), ("stop", 6, 9)]
    last = spans_of(one, Known(T + 100))[-1]
    assert last.label == "asked to stop; interrupted, cancelled"


def test_a_running_job_runs_until_now() -> None:
    one = record("running", leased=T + 1, worker="w1")
    assert story(one, started=T + 3) == [("wait", 0, 1), ("prefetch", 1, 3), ("run", 3, 100)]
    # and without a witness of its start, the span says so
    last = spans_of(one, Known(T + 100))[-1]
    assert "known only on the worker's machine" in last.detail


def test_a_backoff_ends_at_the_due_time_while_that_is_known() -> None:
    failed = attempt(1, 1, 1, 2)
    backing_off = record("scheduled", attempts=[failed], attempt=1, due=T + 130)
    assert story(backing_off)[-1] == ("backoff", 2, 130)
    cause = Cause("no-worker", "no worker serves the queue")
    due_again = record("ready", attempts=[failed], attempt=1, due=T + 30)
    assert story(due_again, cause=cause)[-2:] == [("backoff", 2, 30), ("no-worker", 30, 100)]


def test_bars_fill_the_drawing_and_a_long_wait_is_folded() -> None:
    one = record(
        "succeeded",
        {"delay": 86_400.0},
        attempts=[attempt(1, 86_401, 86_401, 86_402, outcome=Outcome.SUCCESS)],
    )
    bars = bars_of(spans_of(one, Known(T + 90_000)))
    assert [bar.is_folded for bar in bars] == [True, False, False]
    assert bars[-1].width > WIDTH / 5
    assert sum(bar.width for bar in bars) == pytest.approx(WIDTH, abs=1)
    assert bars[0].x == 0
    assert bars_of([]) == []
