"""A worker gives back jobs of tasks that it does not know; such jobs are tried again later."""

from __future__ import annotations

import pytest
from broker_driver import LiveOwner, job, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.core.clock import clock as time
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.core.job import Lease, Outcome, State
from tidemill.core.verdicts import given_back, is_given_back, waits_for_its_task

ERROR = "no worker knows task 'b.work'"


def give_back(owner: LiveOwner, lease: Lease, delay: float = 100.0) -> None:
    verdict = given_back(lease.token, lease.open())
    assert is_given_back(verdict)
    assert owner.settle(lease, Outcome(verdict.outcome), error=verdict.error, delay=delay)


@pytest.mark.needs(Feature.INSPECT)
def test_a_job_of_an_unknown_task_is_tried_again_later_and_not_counted(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case T2, law 7
    # given
    broker.put([job(id="b", task="b.work")])
    [lease] = worker.await_all(1)
    # when
    give_back(worker, lease)
    # then
    record = broker.get("b")
    assert waits_for_its_task(record)
    assert (record.state, record.error) == (State.SCHEDULED, ERROR)
    assert (record.attempt, record.attempts, record.losses, record.log) == (0, [], 0, [])
    assert worker.take_ids() == []
    clock.advance(101)
    [again] = worker.await_all(1)
    assert (again.open().id, again.attempt) == ("b", 1)
    assert worker.settle(again)


@pytest.mark.needs(Feature.INSPECT)
def test_a_retry_of_scheduled_jobs_leaves_a_cancelled_job_as_it_is(broker: Broker) -> None:
    # law 14
    broker.put([job(id="a", delay=1000.0), job(id="b", delay=1000.0)])
    broker.cancel(["b"])
    assert broker.retry(["a", "b", "c"], only_scheduled=True) == [True, False, False]
    assert (state(broker, "a"), state(broker, "b")) == (State.READY, State.CANCELLED)


@pytest.mark.needs(Feature.INSPECT)
def test_a_retry_makes_the_job_ready_at_once(broker: Broker, worker: LiveOwner) -> None:
    # law 7
    broker.put([job(id="b", task="b.work")])
    give_back(worker, *worker.await_all(1))
    assert broker.retry(["b"]) == [True]
    assert [lease.open().id for lease in worker.await_all(1)] == ["b"]


@pytest.mark.needs(Feature.LIMITS)
@pytest.mark.parametrize("queue", [False, True])
def test_the_token_and_the_place_of_a_limit_go_back(
    broker: Broker, worker: LiveOwner, queue: bool
) -> None:
    # law 13: one start in 1,000 s, and one job at a time
    terms = LimitSettings(rate=(0.001, 1), concurrency=1)
    if queue:
        broker.set_limit("default", terms, queue=True)
    limit = None if queue else JobLimit("one", "", 1.0, terms)
    broker.put([job(id=f"b{n}", task="b.work", limit=limit) for n in range(3)])
    # when two jobs are given back in turn
    give_back(worker, *worker.await_all(1))
    give_back(worker, *worker.await_all(1))
    # then the third may start, and takes the token
    [lease] = worker.await_all(1)
    assert lease.open().id == "b2"
    assert worker.settle(lease)
    assert broker.retry(["b0"]) == [True]
    assert worker.take_ids() == []


@pytest.mark.needs(Feature.LIMITS)
def test_a_snooze_of_a_job_that_has_run_keeps_its_token(broker: Broker, worker: LiveOwner) -> None:
    limit = JobLimit("one", "", 1.0, LimitSettings(rate=(0.001, 1)))
    broker.put([job(id=f"b{n}", limit=limit) for n in range(2)])
    [lease] = worker.await_all(1)
    assert worker.settle(lease, Outcome.SNOOZE, delay=100, started=time.wall())
    assert worker.take_ids() == []


@pytest.mark.needs(Feature.CANCEL)
def test_a_job_cancelled_while_it_was_leased_is_not_tried_again(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put([job(id="b", task="b.work")])
    [lease] = worker.await_all(1)
    broker.cancel(["b"])
    give_back(worker, lease)
    assert state(broker, "b") is State.CANCELLED


@pytest.mark.needs(Feature.KEYS)
def test_a_merge_makes_the_job_ready(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job(id="b", task="b.work", key="k")])
    give_back(worker, *worker.await_all(1))
    [merged] = broker.put([job(id="c", task="b.work", key="k", on_conflict="merge")])
    assert merged.id == "b"
    assert state(broker, "b") is State.READY
