"""Races of the direct hand-off on Redis; ``unit/brokers/test_handoff.py`` shows the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from handoff_desk import Sleeper, named, states
from moved_clock import MovedClock
from redis import ConnectionError as RedisConnectionError
from redis import Redis as Client
from servers import Redis, redis_url

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.errors import BrokerUnavailable

pytestmark = pytest.mark.full

READY, RUNNING = State.READY, State.RUNNING


@pytest.fixture
def broker(open_one: Callable[..., RedisBroker]) -> RedisBroker:
    """A broker with the queue "default", whose jobs can be put by ``put_one``."""
    broker = open_one()
    broker.tick()  # or the first wait would end at once for it
    broker.set_queue("default", paused=False)
    return broker


def test_a_step_after_a_hand_off_finds_the_store_not_behind(broker: RedisBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    assert worker.take() == ["one"]
    assert not broker.exchange(Step("w", want=Want(3))).behind


@pytest.mark.everyday
def test_a_step_brings_the_lease_when_no_hint_brought_it(broker: RedisBroker) -> None:
    """The sleeper's connection was cut after the put."""
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    worker.attached.sleeper.close()
    (lease,) = worker.exchange(want=Want(4))
    assert lease.open().id == "one"
    assert worker.take() == []
    assert worker.settle(lease)


def test_a_step_without_a_want_gives_the_task_back(broker: RedisBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    assert worker.exchange() == []
    assert states(broker, "one") == [READY]
    assert worker.take() == ["one"]


def test_a_late_hint_leases_no_job_a_second_time(broker: RedisBroker) -> None:
    # law 4
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    late = list(worker.attached.sleeper.texts)
    worker.attached.sleeper.texts.clear()
    assert worker.take() == ["one"]  # by a step
    worker.attached.sleeper.texts += late
    assert worker.take() == []


def test_a_repeated_step_brings_the_lease_once(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 4: its first reply was lost
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one"), named("two")])
    assert worker.take(1) == ["one"]
    worker.broker.wait("w", 0.0)
    worker.take(4)
    worker.sleep()
    broker.put([named("three")])
    broker.put([named("four")])
    real = ServerConnection._send

    def lose(line: ServerConnection, command: tuple[Any, ...]) -> Any:
        real(line, command)
        line.close()
        raise RedisConnectionError("cut")

    monkeypatch.setattr(ServerConnection, "_send", lose)
    with pytest.raises(BrokerUnavailable):
        worker.exchange(touch=[(1, 1.0)], want=Want(4))
    monkeypatch.undo()
    assert worker.take() == ["three", "four"]
    assert worker.take() == []


def test_no_task_is_handed_over_before_a_task_that_is_ready(broker: RedisBroker) -> None:
    # law 10
    first, second = Sleeper(broker, "v"), Sleeper(broker)
    first.sleep()
    second.sleep()
    broker.put([named("keyed", key="k")])  # this put only hints
    broker.put([named("two")])
    assert states(broker, "keyed", "two") == [READY, READY]
    assert second.take(1) == ["keyed"]
    assert first.take(1) == ["two"]


def test_a_worker_is_handed_one_task_until_its_next_step(broker: RedisBroker) -> None:
    # law 10: the later tasks wait in order
    worker = Sleeper(broker)
    worker.sleep(2)
    broker.put([named("one")])
    broker.put([named("two")])
    broker.put([named("three", priority=5)])
    assert states(broker, "one", "two", "three") == [RUNNING, READY, READY]
    worker.hear()
    assert worker.take(2) == ["one"]
    assert worker.take(1) == ["three"]


def test_a_large_job_is_not_handed_over(broker: RedisBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one", body=b"x" * 100_000)])
    assert states(broker, "one") == [READY]


def test_a_worker_that_slept_for_another_queue_before_is_handed_no_job_of_that_queue(
    broker: RedisBroker,
) -> None:
    broker.set_queue("other", paused=False)
    worker = Sleeper(broker)
    worker.sleep(queues=["other"])
    worker.sleep(queues=["default"])
    broker.put([named("one", queue="other")])
    assert states(broker, "one") == [READY]


def test_consumers_and_remote_owners_are_handed_nothing(broker: RedisBroker) -> None:
    Sleeper(broker, "c", kind="consumer").sleep()
    broker.attach(Owner(id="r", name="r", lease=60.0))
    broker.wait("r", 0.0)
    broker.exchange(Step("r", want=Want(4), serial=1))
    broker.put([named("one")])
    assert states(broker, "one") == [READY]


def test_an_owner_that_never_waits_is_handed_nothing(broker: RedisBroker) -> None:
    worker = Sleeper(broker)
    assert worker.take() == []
    broker.put([named("one")])
    assert states(broker, "one") == [READY]
    assert worker.take() == ["one"]


def test_an_owner_that_also_takes_messages_is_handed_nothing(broker: RedisBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    worker.sleep(messages=True)
    broker.put([named("one")])
    assert states(broker, "one") == [READY]


def test_a_step_right_after_a_hand_off_lets_the_next_put_hand_over(broker: RedisBroker) -> None:
    """A worker with news does not wait before its next step."""
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    (lease,) = worker.exchange(want=Want(4))
    verdicts = [Verdict(lease.token, Outcome.SUCCESS)]
    assert worker.exchange(verdicts=verdicts, want=Want(4)) == []
    broker.put([named("two")])
    assert states(broker, "two") == [RUNNING]


def test_a_worker_whose_lease_is_not_renewed_is_handed_nothing(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped worker keeps one job at most."""
    worker = Sleeper(broker)
    worker.sleep()
    MovedClock(monkeypatch).advance(15.0)
    broker.put([named("one")])
    assert states(broker, "one") == [READY]


@pytest.mark.parametrize("others", [1, 0])
def test_a_hint_that_nobody_receives_leases_to_the_next_sleeper(
    broker: RedisBroker, others: int
) -> None:
    gone, worker = Sleeper(broker, "gone"), Sleeper(broker)
    gone.sleep()
    if others:
        worker.sleep()
    gone.attached.sleeper.close()
    with Client.from_url(redis_url()) as client:
        channel = worker.attached._lines.key + b":w:gone"
        while client.pubsub_numsub(channel)[0][1]:  # the server has not read the end yet
            time.sleep(0.001)
    broker.put([named("one")])
    assert states(broker, "one") == [RUNNING if others else READY]
    assert worker.take() == ["one"]


def test_a_task_of_a_queue_that_the_worker_no_longer_serves_goes_back(broker: RedisBroker) -> None:
    broker.set_queue("other", paused=False)
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    assert worker.take(queues=["other"]) == []
    assert states(broker, "one") == [READY]


def test_a_put_whose_reply_was_lost_hands_over_once(
    broker: RedisBroker, lose_replies: Callable[[int], None]
) -> None:
    # law 4
    worker = Sleeper(broker)
    worker.sleep()
    lose_replies(1)
    broker.put([named("one")])
    worker.hear()
    assert worker.take() == ["one"]
    assert worker.take() == []
    assert broker.stats()[0].accepted == 1


def test_a_lease_that_the_worker_has_not_heard_of_is_no_stray(broker: RedisBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    reply = broker.exchange(Step("w", want=Want(4), held=[]))
    assert [lease.open().id for lease in reply.leases] == ["one"]
    assert reply.strays == []


# -- a server that has lost its last writes -------------------------------------------------------


@pytest.mark.everyday
def test_a_late_verdict_settles_no_task_that_drew_its_token_again(broker: RedisBroker) -> None:
    # laws 3, 4: the server has lost the steps that gave the higher tokens
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    (record,) = broker.get_many(["one"])
    worker.attached.told = record.token + 100
    reply = broker.exchange(Step("w", [Verdict(record.token, Outcome.SUCCESS)], Want(4)))
    assert (reply.settled, reply.leases) == ([False], [])
    (lease,) = worker.exchange(want=Want(4))
    assert lease.open().id == "one"
    assert lease.token > record.token + 100


def test_a_server_that_takes_over_hands_nothing_over_before_the_next_step(
    open_one: Callable[..., RedisBroker], durable: Redis
) -> None:
    # law 4: it does not know the highest token of the worker
    broker = open_one(durable.url)
    broker.tick()
    broker.set_queue("default", paused=False)
    worker = Sleeper(broker)
    worker.sleep()
    durable.run("FUNCTION", "FLUSH")  # its memory is that of a new server
    broker.put([named("one")])
    assert states(broker, "one") == [READY]
    assert worker.take() == ["one"]
    worker.sleep()
    broker.put([named("two")])
    assert states(broker, "two") == [RUNNING]


def test_a_handed_token_is_higher_than_all_tokens_of_the_worker(broker: RedisBroker) -> None:
    # law 4
    worker = Sleeper(broker)
    worker.attached.told = highest = 1_000_000
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    (lease,) = worker.exchange(want=Want(4))
    assert lease.token > highest
