"""Tasks with a consumer: leased for a time, renewed by a touch, and back when the time is over."""

from __future__ import annotations

import pytest
from broker_driver import LiveOwner, job
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.core.job import DEFAULT_TTR, Note, Outcome, Owner, State, Verdict
from tidemill.core.retry import RetryPolicy, backoff

pytestmark = pytest.mark.needs(Feature.RESULTS)

WANT = Want(10, queues=("default",))
POLICIES = (
    RetryPolicy(2, delay=1000.0, factor=3.0, cap=2000.0, jitter=False),
    RetryPolicy(1, delay=1000.0, jitter=False, immediate=1),
    RetryPolicy(1, delay=0),
)


def test_a_consumer_has_a_task_for_a_time(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    # law 5: whoever holds a job and is silent loses it, as an attempt
    broker.put([job(task="js.work", id="a")])
    [lease] = consumer.take_all(WANT)
    assert lease.deadline == DEFAULT_TTR
    clock.advance(DEFAULT_TTR - 20)
    assert consumer.touch(lease, 100)
    clock.advance(80)
    assert consumer.touch(lease)
    clock.advance(DEFAULT_TTR + 1)
    assert not consumer.touch(lease)
    assert broker.retry(["a"]) == [True]  # it backs off
    [again] = consumer.take_all(WANT)
    assert (again.open().id, again.attempt, again.losses) == ("a", 2, 0)
    assert consumer.settle(again)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_task_whose_ttr_runs_out_backs_off_as_its_policy_says(
    broker: Broker, consumer: LiveOwner, clock: Clock, policy: RetryPolicy
) -> None:
    # law 7: given a task in the hands of a worker elsewhere
    given = job(task="js.work", id="a")
    given.retries = policy
    broker.put([given])
    for attempt in range(1, policy.max_attempts + 1):
        [lease] = consumer.take_all(WANT)
        assert lease.attempt == attempt
        # when it is silent for its ttr
        clock.advance(DEFAULT_TTR + 1)
        assert consumer.exchange().leases == []
        # then the attempt has failed, and the next one waits for the backoff
        record = broker.get("a")
        assert (record.attempt, record.attempts[-1].error) == (attempt, "ttr passed without an ack")
        if attempt == policy.max_attempts:
            break
        delay = backoff(policy, attempt)
        assert record.state is (State.SCHEDULED if delay else State.READY)
        if delay:
            assert consumer.take_all(WANT) == []
            clock.advance(delay - 30)
            assert consumer.take_all(WANT) == []
            clock.advance(31)
    assert record.state is State.FAILED


def test_a_worker_that_dies_costs_its_task_no_delay(broker: Broker, clock: Clock) -> None:
    # law 5: what a dead worker ran is runnable at once
    broker.put([job(task="js.work", id="a")])
    dying = LiveOwner(broker, "w1", "worker")
    [lease] = dying.take()
    broker.release(dying.id, {lease.token: "it died"})
    assert [it.attempt for it in LiveOwner(broker, "w2", "worker").take()] == [2]


def test_a_consumer_that_sleeps_has_a_task_for_a_time(broker: Broker, consumer: LiveOwner) -> None:
    # given one that has waited, and may be handed a job by its put
    for _ in range(2):
        assert consumer.take_all(WANT) == []
        broker.wait(consumer.id, 0.05)
    # when
    broker.put([job(task="js.work")])
    broker.wait(consumer.id, 10)
    # then
    [lease] = consumer.take_all(WANT)
    assert lease.deadline == DEFAULT_TTR


@pytest.mark.needs(Feature.REMOTE_OWNERS)
def test_notes_may_be_said_on_behalf_of_an_owner_elsewhere(broker: Broker) -> None:
    # given
    broker.put([job(task="js.work", id="a")])
    owner = Owner(id="elsewhere", kind="consumer", name="server", lease=30.0)
    broker.attach(owner)
    [lease] = broker.exchange(Step(owner.id, want=WANT)).leases
    notes = [Note(lease.token, 1.0, 2.0, text="half"), Note(lease.token, line="half way", time=5.0)]
    # when
    step = Step(owner.id, notes=notes, touch=[(lease.token, 90.0)], behalf=True)
    assert broker.exchange(step).touched == [True]
    # then
    record = broker.get("a")
    assert (record.progress, record.progress_text) == ((1.0, 2.0), "half")
    assert record.log == [(5.0, "half way")]
    done = Step(owner.id, [Verdict(lease.token, Outcome.SUCCESS)], behalf=True)
    assert broker.exchange(done).settled == [True]
