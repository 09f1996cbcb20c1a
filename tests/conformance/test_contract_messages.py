"""Messages of an app: their attributes, several at a time, and settling by id."""

from __future__ import annotations

import threading
import time

import pytest
from broker_driver import LiveOwner, message

from tidemill import Message, Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.core.envelope import Envelope


def taken(mill: Tidemill, count: int, queue: str = "q") -> list[Message]:
    """So many messages; a broker that pushes may bring them one after the other."""
    messages: list[Message] = []
    while len(messages) < count:
        more = mill.queue(queue).get_many(count - len(messages), timeout=30)
        assert more, f"{len(messages)} of {count}"
        messages += more
    return messages


def test_a_message_tells_its_priority_and_its_hand_out(mill: Tidemill) -> None:
    queue = mill.queue("q")
    queue.put("a", priority=7)
    first = queue.get(30)
    assert (first.priority, first.attempt, first.redelivered) == (7, 1, False)
    # when it is released, the delivery does not count
    assert first.release()
    second = queue.get(30)
    assert (second.priority, second.attempt, second.redelivered) == (7, 1, False)
    # when its consumer fails
    with pytest.raises(KeyError), second:
        raise KeyError
    third = queue.get(30)
    # then
    assert (third.priority, third.attempt, third.redelivered) == (7, 2, True)
    assert third.ack()


def test_get_many_takes_up_to_n_messages_in_order(mill: Tidemill) -> None:
    queue = mill.queue("q")
    queue.put_many(range(5))
    # when
    first = taken(mill, 3)
    rest = taken(mill, 2)
    # then
    assert [message.body for message in first + rest] == list(range(5))
    assert queue.get_many(9, timeout=0) == []
    assert all(message.ack() for message in first + rest)


def test_get_many_empties_an_earlier_queue_first(mill: Tidemill) -> None:
    mill.queue("late").put_many(["c", "d"])
    mill.queue("early").put_many(["a", "b"])
    found = []
    while len(found) < 4:
        more = mill.get_many(["early", "late"], 4 - len(found), timeout=30)
        assert more
        found += more
    assert [message.body for message in found] == ["a", "b", "c", "d"]
    assert all(message.ack() for message in found)


def test_get_many_returns_as_soon_as_there_is_one(mill: Tidemill) -> None:
    waits, found = threading.Event(), list[Message]()

    def consume() -> None:
        waits.set()
        found.extend(mill.queue("q").get_many(10, timeout=60))

    thread = threading.Thread(target=consume)
    thread.start()
    assert waits.wait(60)
    # when
    mill.queue("q").put("a")
    thread.join(60)
    # then
    assert [message.body for message in found] == ["a"]
    assert found[0].ack()


def test_a_call_that_took_fewer_messages_than_it_wanted_gets_no_wake_up(
    mill: Tidemill, broker: Broker
) -> None:
    # given a consumer that has returned with fewer messages than it wanted
    mill.queue("q").put("a")
    (first,) = mill.queue("q").get_many(10, timeout=30)
    # and another that waits, and has no more hints
    waiter = LiveOwner(broker, "c2", "consumer")
    wait_for(waiter, "q")
    # when
    mill.queue("q").put("b")
    # then
    assert is_hinted(waiter)
    (second,) = waiter.await_all(1, queues=("q",))
    assert waiter.settle(second)
    assert first.ack()


def test_a_consumer_that_now_waits_for_another_queue_takes_no_wake_up_of_the_first_queue(
    broker: Broker, consumer: LiveOwner
) -> None:
    # given a consumer that has waited for "a" before it waits for "b"
    other = LiveOwner(broker, "c2", "consumer")
    wait_for(other, "a")
    wait_for(consumer, "a")
    wait_for(other, "b")
    # when
    broker.put([message("a")])
    # then
    assert is_hinted(consumer)
    (lease,) = consumer.await_all(1, queues=("a",))
    assert consumer.settle(lease)


def wait_for(consumer: LiveOwner, queue: str) -> None:
    """Have a consumer wait for a message, until earlier hints no longer end the wait."""
    want = Want(1, (queue,), Mode.STRICT, tasks=False, messages=True)
    while not consumer.exchange(want=want).leases and slept(consumer, 0.1) < 0.1:
        pass


def is_hinted(owner: LiveOwner) -> bool:
    """Whether a hint ends the owner's wait. After 10 s some brokers end it without a hint."""
    return slept(owner, 8) < 7


def slept(owner: LiveOwner, seconds: float) -> float:
    """Wait for a hint, and return how long that took."""
    begun = time.monotonic()
    owner.broker.wait(owner.id, seconds)
    return time.monotonic() - begun


def test_get_many_hands_out_messages_with_ttr_0_once(mill: Tidemill) -> None:
    # law 2
    queue = mill.queue("q")
    queue.put_many(["a", "b"], ttr=0)
    queue.put("c")
    messages = taken(mill, 3)
    assert [message.body for message in messages] == ["a", "b", "c"]
    assert [message.ack() for message in messages] == [False, False, True]


def test_get_many_refuses_messages_that_cannot_be_read_one_by_one(mill: Tidemill) -> None:
    mill.runtime.keys = [b"secret"]
    queue = mill.queue("q")
    queue.put("a")
    mill.broker.put([Envelope(id="bare", queue="q", body=b"\x01")])
    queue.put("b")
    messages = taken(mill, 2)
    assert [message.body for message in messages] == ["a", "b"]
    assert queue.get_many(9, timeout=0) == []
    assert all(message.ack() for message in messages)


@pytest.mark.moving_clock
def test_each_message_of_a_batch_is_settled_by_itself(mill: Tidemill) -> None:
    queue = mill.queue("q")
    queue.put_many(range(4))
    first, second, third, fourth = taken(mill, 4)
    # when
    assert first.touch(100)
    assert first.ack()
    assert second.release()
    assert third.release(delay=0.1)
    assert fourth.bury("cannot be read")
    # then
    again = taken(mill, 2)
    assert sorted(message.body for message in again) == [1, 2]
    assert all(message.ack() for message in again)
    assert queue.get_many(9, timeout=0) == []
