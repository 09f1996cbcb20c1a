"""``run_all``: a test runs what is ready, or all there is, and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tidemill import Retries, Snooze, State, Tidemill, TidemillError, current_job
from tidemill.testing import run_all


def test_what_is_scheduled_runs_when_asked_for(mill: Tidemill) -> None:
    # given a delayed job, and one whose retries would take hours
    @mill.task(retries=Retries(2, delay=3600, jitter=False))
    def flaky() -> str:
        job = current_job()
        assert job is not None
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
    assert [r.state for r in mill.find().records] == [State.SUCCEEDED] * 3
    assert time.monotonic() - began < 600


def test_retries_are_used_up_as_ever(mill: Tidemill) -> None:
    @mill.task(retries=Retries(2, delay=3600))
    def bad() -> None:
        raise ValueError

    job = bad.enqueue()
    run_all(mill, scheduled=True)
    assert (job.state, len(job.attempts)) == (State.FAILED, 3)


def test_only_the_queues_asked_for(mill: Tidemill) -> None:
    task = mill.task(len)
    here, there = (task.using(queue=q, delay=3600).enqueue("abc") for q in ("here", "there"))
    run_all(mill, queues=["here"], scheduled=True)
    assert (here.state, there.state) == (State.SUCCEEDED, State.SCHEDULED)


def test_messages_are_left_alone(mill: Tidemill) -> None:
    mill.queue("here").put("later", delay=3600)
    job = mill.task(len).using(queue="here", delay=3600).enqueue("abc")
    run_all(mill, scheduled=True)
    assert job.state is State.SUCCEEDED
    assert mill.queue("here").get_nowait() is None


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
