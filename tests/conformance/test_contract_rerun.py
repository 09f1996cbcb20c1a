"""A job that succeeded runs again on request, also while it holds its key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, job, message, state, whole
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.memory.broker import MemoryBroker
from tidemill.core.envelope import Links, Unique
from tidemill.core.job import Outcome, Placed, RunOn, State, Verdict

pytestmark = pytest.mark.needs(Feature.INSPECT)


def run_one(worker: LiveOwner, outcome: Outcome = Outcome.SUCCESS, **fields: object) -> str:
    (lease,) = worker.take()
    assert worker.settle(lease, outcome, **fields)
    return lease.open().id


def test_a_success_is_not_run_again_by_a_plain_retry(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job(id="j")])
    run_one(worker)

    assert broker.retry(["j"]) == [False]
    assert state(broker, "j") is State.SUCCEEDED


@pytest.mark.parametrize("result", [b"", b"\x01"], ids=["plain", "with a result"])
def test_a_forced_retry_runs_a_success_again(
    broker: Broker, worker: LiveOwner, result: bytes
) -> None:
    broker.put([job(id="j", retries=2)])
    run_one(worker, Outcome.RETRY, error="bad")
    run_one(worker, result=result)

    assert broker.retry(["j"], force=True) == [True]

    record = broker.get("j")
    assert (record.state, record.run, record.attempt, record.raw_result) == (State.READY, 2, 0, b"")
    assert run_one(worker, result=b"\x02") == "j"
    record = broker.get("j")
    assert (record.state, record.raw_result) == (State.SUCCEEDED, b"\x02")
    shown = [(a.run, a.number, a.outcome) for a in record.attempts]
    assert shown == [(1, 1, Outcome.RETRY), (1, 2, Outcome.SUCCESS), (2, 1, Outcome.SUCCESS)]


def test_the_first_attempt_of_a_success_stays_in_the_trail(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put([job(id="j")])
    run_one(worker)
    broker.retry(["j"], force=True)
    run_one(worker, Outcome.RETRY, error="bad")

    record = broker.get("j")
    assert [(a.run, a.number) for a in record.attempts] == [(1, 1), (2, 1)]


def test_a_success_that_holds_its_key_runs_again_by_force(
    broker: Broker, worker: LiveOwner, clock: Clock, need: Callable[[Feature], None]
) -> None:
    need(Feature.UNIQUE)
    unique = {"key": "k", "unique": Unique(1000.0)}
    broker.put([job(id="first", **unique)])
    run_one(worker)
    assert broker.retry(["first"]) == [False]

    assert broker.retry(["first"], force=True) == [True]

    # the key is held while it runs, and after that up to the same time as before
    assert [put.placed for put in broker.put([job(id="second", **unique)])] == [Placed.KEPT]
    assert run_one(worker) == "first"
    (put,) = broker.put([job(id="third", **unique)])
    assert (put.id, put.placed) == ("first", Placed.KEPT)
    if clock.fake:
        clock.advance(1001)
        assert [put.placed for put in broker.put([job(id="fourth", **unique)])] == [Placed.CREATED]


def test_a_failure_whose_key_another_success_holds_runs_again_by_force(
    broker: Broker, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.UNIQUE)
    unique = {"key": "k", "unique": Unique(1000.0)}
    broker.put([job(id="failed", **unique)])
    run_one(worker, Outcome.FAIL, error="bad")
    broker.put([job(id="done", **unique)])
    run_one(worker)
    assert broker.retry(["failed"]) == [False]

    assert broker.retry(["failed"], force=True) == [True]

    assert run_one(worker) == "failed"
    (put,) = broker.put([job(id="late", **unique)])
    assert put.placed is Placed.KEPT


def test_force_never_makes_two_unfinished_jobs_of_one_key(
    broker: Broker, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.KEYS)
    broker.put([job(id="done", key="k")])
    run_one(worker)
    broker.put([job(id="waits", key="k")])

    assert broker.retry(["done"], force=True) == [False]
    assert state(broker, "done") is State.SUCCEEDED


def test_force_runs_no_part_of_a_flow_again(
    broker: Broker, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.FLOWS)
    after = job(id="after", links=Links(waits=RunOn.SUCCESS, inputs=("before",)))
    broker.put([after, job(id="before", links=Links(next=("after",)))])
    run_one(worker)

    assert broker.retry(["before"], force=True) == [False]


def test_force_retries_jobs_that_a_plain_retry_does(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job(id="bad"), message(id="later", delay=1000.0)])
    run_one(worker, Outcome.FAIL, error="bad")

    assert broker.retry(["bad", "later", "nowhere"], force=True) == [True, True, False]
    assert state(broker, "bad") is state(broker, "later") is State.READY


def test_a_running_job_is_not_run_again(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job(id="j")])
    (lease,) = worker.take()

    assert broker.retry(["j"], force=True) == [False]
    reply = worker.exchange(verdicts=[Verdict(lease.token, Outcome.SUCCESS)])
    assert reply.settled == [True]


def test_the_runs_of_a_job_move_to_another_store(broker: Broker, worker: LiveOwner) -> None:
    source = MemoryBroker()
    source.put([job(id="j", retries=1)])
    there = LiveOwner(source)
    for _ in range(2):
        run_one(there, Outcome.RETRY, error="bad")
    source.retry(["j"])
    run_one(there, Outcome.RETRY, error="bad")
    departure = source.depart("elsewhere", seal=True)

    assert broker.adopt(departure, whole(source, source.find(Filter()).records), "") == [True]

    run_one(worker, Outcome.RETRY, error="bad again")
    record = broker.get("j")
    shown = [(a.run, a.number) for a in record.attempts]
    assert shown == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert (record.state, record.run) == (State.FAILED, 2)
    source.close()
