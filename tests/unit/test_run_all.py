"""``run_all`` and ``join``: a test runs jobs, or waits for them, and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tidemill import (
    ResultTimeout,
    Retries,
    Snooze,
    State,
    Tidemill,
    TidemillError,
    testing,
    this_job,
)
from tidemill.testing import join, run_all, worker


def test_scheduled_jobs_run_on_request(mill: Tidemill) -> None:
    # given a delayed job, and one whose retries would take hours
    @mill.task(retries=Retries(2, delay=3600, jitter=False))
    def flaky() -> str:
        job = this_job()
        if job.attempt < 3:
            raise ConnectionError
        second.using(delay=3600).enqueue()
        return "at last"

    @mill.task
    def second() -> str:
        return "second"

    job, delayed = flaky.enqueue(), second.using(delay=3600).enqueue()
    began = time.monotonic()
    # when only what is ready runs, then both are scheduled
    run_all(mill)
    assert (job.state, delayed.state) == (State.SCHEDULED, State.SCHEDULED)
    # when all runs, then they end, and what they enqueued too, without the hours
    run_all(mill, scheduled=True)
    assert (job.result(timeout=0), delayed.result(timeout=0)) == ("at last", "second")
    assert len(job.attempts) == 3
    assert [r.state for r in mill.jobs().page().records] == [State.SUCCEEDED] * 3
    assert time.monotonic() - began < 600


def test_only_the_queues_asked_for(mill: Tidemill) -> None:
    task = mill.task(len)
    here, there = (task.using(queue=q, delay=3600).enqueue("abc") for q in ("here", "there"))
    run_all(mill, queues=["here"], scheduled=True)
    assert (here.state, there.state) == (State.SUCCEEDED, State.SCHEDULED)


def test_a_retry_that_comes_due_between_two_rounds_runs(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ready, rounds = testing._run_ready, list[int]()

    def round_and_pause(*args: Any) -> None:
        run_ready(*args)
        rounds.append(1)
        mill.broker.retry([job.id] if len(rounds) < 3 else [])  # as its time would

    @mill.task(retries=Retries(2, delay=3600))
    def fails() -> None:
        raise ConnectionError

    job = fails.enqueue()
    monkeypatch.setattr(testing, "_run_ready", round_and_pause)
    run_all(mill, scheduled=True)
    assert (job.state, len(job.attempts)) == (State.FAILED, 3)


def test_a_ready_job_that_cannot_run_is_left(mill: Tidemill) -> None:
    job = mill.task(len).using(delay=3600).enqueue("abc")
    mill.queue("default").pause()
    run_all(mill, scheduled=True)
    assert job.state is State.READY


def test_a_job_that_never_ends_is_given_up(
    make_mill: Callable[..., Tidemill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.testing.MOST_ROUNDS", 3)
    mill = make_mill()

    @mill.task
    def later() -> None:
        raise Snooze(3600)

    later.enqueue()
    with pytest.raises(TidemillError, match="still put off after 3 rounds"):
        run_all(mill, scheduled=True)


# -- join ------------------------------------------------------------------------------------------


def test_join_waits_for_jobs_that_jobs_enqueue_and_for_retries(make_mill: Any) -> None:
    mill, ended = make_mill(), list[int]()

    @mill.task(name="leaf", retries=Retries(2, delay=0))
    def leaf(number: int) -> None:
        job = this_job()
        if job.attempt == 1:
            raise ValueError("again")
        ended.append(number)

    @mill.task(name="branch")
    def branch() -> None:
        for number in range(3):
            leaf.using(delay=0.2 if number else 0).enqueue(number)

    mill.queue("post").put("a message that nobody takes")
    branch.enqueue()
    # when no worker runs
    with pytest.raises(
        ResultTimeout, match=r"have not ended after 0 s: \w+ \(ready\); no worker serves queue"
    ):
        join(mill, timeout=0)
    join(mill, timeout=0, queues=["other"])
    # when a worker runs, then all jobs have ended
    with worker(mill):
        join(mill, timeout=60)
        assert sorted(ended) == [0, 1, 2]
        join(mill)


def test_join_returns_at_once_with_sync() -> None:
    mill = Tidemill("memory://", sync=True)

    @mill.task
    def nothing() -> None: ...

    nothing.enqueue()
    join(mill, timeout=0)
