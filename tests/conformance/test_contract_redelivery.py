"""A message whose delivery fails: it returns once, then backs off, and ends as failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, message, shown, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Lease, Outcome, Record, State
from tidemill.core.retry import ENDLESS, MESSAGE, RetryPolicy, backoff

POLICIES = (
    RetryPolicy(19, delay=1000.0, factor=2.0, cap=300_000.0, jitter=False, immediate=1),
    RetryPolicy(5, delay=200, factor=3, cap=20_000, jitter=False),  # whole numbers
    RetryPolicy(6, delay=250.25, factor=1.5, cap=1000.5, jitter=False),
    RetryPolicy(300, delay=1e-3, factor=4, cap=86_400, jitter=False, immediate=3),
    RetryPolicy(2, delay=0, jitter=False),
    RetryPolicy(40_000, delay=70_000, factor=1, cap=3e9, jitter=False),
)
SMALL = RetryPolicy(3, delay=0.05, factor=2, cap=1, jitter=False)


def take_one(consumer: LiveOwner, queue: str = "default") -> Lease:
    (lease,) = consumer.take(1, [queue])
    return lease


def fail(consumer: LiveOwner, lease: Lease, **fields: object) -> None:
    error = fields.pop("error", "ValueError: bad")
    assert consumer.settle(lease, Outcome.RETRY, error=error, **fields)


@pytest.mark.needs("a retry keeps its place")
def test_the_first_failed_hand_out_returns_a_message_to_its_place(
    broker: Broker, consumer: LiveOwner
) -> None:
    # law 7
    poison, good = message(retries=MESSAGE), message(retries=MESSAGE)
    broker.put([poison, good])

    fail(consumer, take_one(consumer))

    again = take_one(consumer)
    assert (again.open().id, again.attempt) == (poison.id, 2)


@pytest.mark.still_clock
def test_from_the_second_failed_hand_out_on_others_go_first(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    poison = message(retries=MESSAGE)
    broker.put([poison])
    for _ in range(2):
        fail(consumer, take_one(consumer))
    good = message(retries=MESSAGE)
    broker.put([good])

    assert consumer.take_ids() == [good.id]

    clock.advance(1.5)
    (again,) = consumer.await_all(1, queues=("default",))
    assert (again.open().id, again.attempt) == (poison.id, 3)


@pytest.mark.still_clock
def test_a_message_that_backs_off_is_scheduled_and_keeps_its_sequence(
    broker: Broker, consumer: LiveOwner
) -> None:
    poison = message(retries=MESSAGE)
    broker.put([poison])
    before = shown(broker, poison.id).seq

    for _ in range(2):
        fail(consumer, take_one(consumer))

    record = shown(broker, poison.id)
    assert (record.state, record.seq, record.attempt) == (State.SCHEDULED, before, 2)
    assert [attempt.error for attempt in record.attempts] == ["ValueError: bad"] * 2


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_broker_computes_the_delays_of_the_policy(
    broker: Broker, consumer: LiveOwner, clock: Clock, policy: RetryPolicy
) -> None:
    """The broker's arithmetic, in Lua and SQL, equals the function in Python."""
    broker.put([message(id="m" * 40, body=b"x" * 300, key="k", retries=policy)])
    delays = []
    for attempt in range(1, min(policy.limit, 14) + 1):
        before = shown(broker, "m" * 40)
        if before.state is State.SCHEDULED:
            broker.retry([before.envelope.id])
        lease = take_one(consumer)
        now = clock_of(broker, consumer, clock)
        fail(consumer, lease)
        after = shown(broker, "m" * 40)
        delays.append(after.due - now if after.due else 0.0)
        assert after.attempt == attempt

    expected = [backoff(policy, n) for n in range(1, len(delays) + 1)]
    assert delays == pytest.approx(expected, rel=1e-6, abs=SLACK)


SLACK = 5.0
"""Seconds that a call may take on a busy machine."""


def clock_of(broker: Broker, consumer: LiveOwner, clock: Clock) -> float:
    """The wall time of the store, by a message that is put with a delay."""
    probe = message("probe", delay=1000.0)
    broker.put([probe])
    due = shown(broker, probe.id).due
    broker.delete([probe.id])
    return due - 1000.0


def test_jitter_draws_a_delay_up_to_the_bound(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    policy = RetryPolicy(2, delay=1000.0, factor=1, cap=1000.0)
    given = [message(retries=policy) for _ in range(8)]
    broker.put(given)

    now = clock_of(broker, consumer, clock)
    for lease in consumer.take(8, ["default"]):
        fail(consumer, lease)

    delays = [shown(broker, each.id).due - now for each in given]
    assert all(0 < delay < 1000 + SLACK for delay in delays)
    assert len({round(delay, 3) for delay in delays}) > 4


def test_a_message_fails_for_good_after_twenty_hand_outs(
    broker: Broker, consumer: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.INSPECT)
    poison = message(retries=MESSAGE)
    broker.put([poison])

    handed = 0
    while state(broker, poison.id) is not State.FAILED:
        if state(broker, poison.id) is State.SCHEDULED:
            broker.retry([poison.id])
        fail(consumer, take_one(consumer), error=f"ValueError: {handed}")
        handed += 1
        assert handed <= 20

    assert handed == 20
    assert shown(broker, poison.id).error == "ValueError: 19"
    (row,) = [row for row in broker.stats() if row.name == "default"]
    assert (row.failed, row.size) == (1, 0)


def test_a_message_fails_for_good_on_every_broker(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    poison = message(retries=SMALL)
    broker.put([poison])

    for attempt in range(1, 5):
        (lease,) = consumer.await_all(1, queues=("default",))
        assert lease.attempt == attempt
        fail(consumer, lease, error="ValueError: the reason")
        clock.advance(0.45)

    (record,) = failed_records(broker)
    assert (record.envelope.id, record.error) == (poison.id, "ValueError: the reason")
    assert consumer.take_ids() == []


def failed_records(broker: Broker) -> list[Record]:
    from tidemill.brokers.contract.inspection import Filter

    what = Filter(states=frozenset({State.FAILED}))
    for _ in range(100):
        records = broker.find(what).records
        if records:
            return list(records)
    return []


def test_a_ttr_that_runs_out_is_a_failed_hand_out(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    policy = RetryPolicy(2, delay=0.3, factor=1, jitter=False, immediate=1)
    poison = message(ttr=0.2, retries=policy)
    broker.put([poison])

    attempts = []
    for _ in range(3):
        (lease,) = consumer.await_all(1, queues=("default",))
        attempts.append(lease.attempt)
        clock.advance(0.25)
        consumer.exchange()
        clock.advance(0.35)

    assert attempts == [1, 2, 3]
    (record,) = failed_records(broker)
    assert record.error == "ttr passed without an ack"


@pytest.mark.still_clock
def test_a_ttr_that_runs_out_twice_delays_the_message(
    broker: Broker, consumer: LiveOwner, clock: Clock, need: Callable[[Feature], None]
) -> None:
    need(Feature.INSPECT)
    poison = message(ttr=20, retries=MESSAGE)
    broker.put([poison])

    for _ in range(2):
        take_one(consumer)
        clock.advance(20.3)
        consumer.exchange()

    assert state(broker, poison.id) is State.SCHEDULED


@pytest.mark.still_clock
def test_a_consumer_that_dies_fails_its_hand_out(
    broker: Broker, need: Callable[[Feature], None]
) -> None:
    need(Feature.INSPECT)
    poison = message(retries=MESSAGE)
    broker.put([poison])

    for number in range(2):
        dying = LiveOwner(broker, f"c{number}", "consumer")
        take_one(dying)
        assert broker.release(dying.id, None) == 1

    record = shown(broker, poison.id)
    assert (record.state, record.attempt, record.losses) == (State.SCHEDULED, 2, 0)
    assert [attempt.error for attempt in record.attempts] == ["its consumer died"] * 2


def test_a_message_whose_consumers_die_ends_as_failed(
    broker: Broker, clock: Clock, need: Callable[[Feature], None]
) -> None:
    need(Feature.INSPECT)
    broker.put([message(id="poison", retries=SMALL)])

    for number in range(4):
        dying = LiveOwner(broker, f"c{number}", "consumer")
        dying.await_all(1, queues=("default",))
        broker.release(dying.id, None)
        clock.advance(0.45)

    record = shown(broker, "poison")
    assert (record.state, record.error) == (State.FAILED, "its consumer died")


@pytest.mark.parametrize("policy", [MESSAGE, SMALL], ids=["default", "explicit"])
def test_a_release_neither_counts_nor_backs_off(
    broker: Broker, consumer: LiveOwner, policy: RetryPolicy
) -> None:
    broker.put([message(id="m", retries=policy)])

    for _ in range(30):
        lease = take_one(consumer)
        assert lease.attempt == 1
        assert consumer.settle(lease, Outcome.RELEASE)

    assert take_one(consumer).attempt == 1


def test_a_release_with_a_delay_does_not_count(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    broker.put([message(id="m", retries=MESSAGE)])
    for _ in range(3):
        (lease,) = consumer.await_all(1, queues=("default",))
        consumer.settle(lease, Outcome.RELEASE, delay=0.1)
        clock.advance(0.15)

    (lease,) = consumer.await_all(1, queues=("default",))
    assert lease.attempt == 1


def test_a_failure_with_a_delay_of_its_own_takes_that(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    broker.put([message(id="m", retries=RetryPolicy(3, delay=1000.0, jitter=False))])

    fail(consumer, take_one(consumer), delay=0.1)

    clock.advance(0.15)
    (lease,) = consumer.await_all(1, queues=("default",))
    assert lease.attempt == 2


def test_a_policy_without_end_returns_a_message_at_once(
    broker: Broker, consumer: LiveOwner
) -> None:
    """Beanstalk jobs have this policy: a job whose time ran out is ready at once."""
    broker.put([message(id="m", retries=ENDLESS)])

    for attempt in itertools.count(1):
        (lease,) = consumer.await_all(1, queues=("default",))
        assert lease.attempt == attempt
        if attempt == 25:
            break
        fail(consumer, lease)


def test_a_retry_begins_the_backoff_anew(
    broker: Broker, consumer: LiveOwner, clock: Clock, need: Callable[[Feature], None]
) -> None:
    need(Feature.INSPECT)
    policy = RetryPolicy(2, delay=100.0, factor=10, cap=10_000, jitter=False)
    poison = message(id="m", retries=policy)
    broker.put([poison])
    assert failing_delays(broker, consumer, clock, 3) == pytest.approx([100, 1000, 0], abs=SLACK)
    assert state(broker, "m") is State.FAILED

    assert broker.retry(["m"]) == [True]

    record = shown(broker, "m")
    assert (record.run, record.attempt, record.max_attempts) == (2, 0, 3)
    assert failing_delays(broker, consumer, clock, 3) == pytest.approx([100, 1000, 0], abs=SLACK)
    attempts = [(attempt.run, attempt.number) for attempt in shown(broker, "m").attempts]
    assert attempts == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]
    assert state(broker, "m") is State.FAILED


def failing_delays(broker: Broker, consumer: LiveOwner, clock: Clock, count: int) -> list[float]:
    """Fail a message some times; the delays it got, 0 where it has none."""
    delays = []
    for attempt in range(1, count + 1):
        if state(broker, "m") is State.SCHEDULED:
            broker.retry(["m"])
        lease = take_one(consumer)
        assert lease.attempt == attempt
        now = clock_of(broker, consumer, clock)
        fail(consumer, lease)
        record = shown(broker, "m")
        delays.append(record.due - now if record.state is State.SCHEDULED else 0.0)
    return delays
