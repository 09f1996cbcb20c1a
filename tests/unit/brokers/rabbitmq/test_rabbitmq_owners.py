"""Owners on RabbitMQ: new queues, unreadable messages, forks, and what a closed broker leaves."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pika
import pytest
from harness import eventually
from pika.adapters.blocking_connection import BlockingChannel
from rabbitmq_desk import LiveOwner, ids_of, job, message, open_rabbit
from servers import free_port, rabbitmq_url

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.job import State
from tidemill.errors import BrokerUnavailable, InvalidOption

Open = Callable[..., RabbitBroker]


def put_aside(broker: RabbitBroker, prefix: str, channel: BlockingChannel) -> Any:
    """The message that failed, when it is there."""
    eventually(lambda: broker.info()["failed"], "a failure")
    return channel.basic_get(f"{prefix}.failed", auto_ack=True)


def test_a_worker_hears_of_a_new_queue_at_once(open_one: Open) -> None:
    # law 9: also when another process was the first to use it
    worker = LiveOwner(open_one())
    worker.take()
    other = open_one()
    for queue in ("new", "newer"):
        other.put([job(queue)])
        assert worker.await_all(1)[0].open().queue == queue


def test_an_unreadable_message_is_put_aside_with_the_reason(
    open_one: Open, prefix: str, channel: BlockingChannel
) -> None:
    # law 16
    broker = open_one()
    good = job()
    broker.put([job()])
    worker = LiveOwner(broker)
    assert worker.settle(worker.await_all(1)[0])
    bad = pika.BasicProperties(message_id="foreign")
    channel.basic_publish("", f"{prefix}.tasks.normal.default", b"no job", bad)
    broker.put([good])
    assert [lease.open().id for lease in worker.await_all(1)] == [good.id]
    found = put_aside(broker, prefix, channel)
    assert found[2] == b"no job"
    assert found[1].message_id == "foreign"
    assert found[1].headers["error"].startswith("it cannot be read: ")
    assert found[1].headers["queue"] == "default"


def test_an_unreadable_message_is_retried_unchanged(
    open_one: Open, prefix: str, channel: BlockingChannel
) -> None:
    # given: a message that this release cannot read, and another may
    broker, place = open_one(), f"{prefix}.tasks.high.q"
    broker.put([job("q", priority=5)])
    worker = LiveOwner(broker)
    assert worker.settle(worker.await_all(1, queues=("q",))[0])
    strange = pika.BasicProperties(message_id="new", type="t", headers={"a": 1}, expiration="9999")
    channel.basic_publish("", place, b"no job", strange)
    assert worker.take(queues=("q",)) == []
    failed = Filter(states=frozenset({State.FAILED}))
    (shown,) = eventually(lambda: broker.find(failed).records, "it is put aside")
    assert (shown.envelope.id, shown.envelope.queue) == ("new", "q")
    assert shown.error.startswith("it cannot be read: ")
    broker.detach(worker.id)
    # when
    assert broker.retry(["new"]) == [True]
    # then
    _, properties, body = eventually(lambda: first(channel, place), "it is back")
    assert body == b"no job"
    assert (properties.message_id, properties.type) == ("new", "t")
    assert (properties.headers["a"], properties.headers.get("error")) == (1, None)
    assert broker.find(failed).records == []


def first(channel: BlockingChannel, place: str) -> Any:
    """The first message of a place, if there is one."""
    found = channel.basic_get(place)
    return found if found[0] else None


def pushed(mill: Tidemill) -> int:
    """How many messages the server pushed that nobody leased."""
    owners = mill.broker._owners.values()
    return sum(len(state) for attached in owners for state in attached._all())


@pytest.mark.parametrize("timeout", [0, 10])
def test_a_purge_right_after_a_get_deletes_all_that_was_not_handed_out(
    prefix: str, timeout: float
) -> None:
    with contextlib.closing(Tidemill(f"{rabbitmq_url()}?prefix={prefix}")) as mill:
        queue = mill.queue("q")
        queue.put_many(range(8))
        message = queue.get(timeout)
        assert message.body == 0
        assert message.ack()  # and the server pushes the next one
        if timeout:
            eventually(lambda: pushed(mill), "the next one")
        assert queue.purge() == 7
        queue.put("later")
        assert queue.get(timeout=60).body == "later"


def test_classic_queues_have_priorities(open_one: Open) -> None:
    # law 10: ten of ours are one of the server's
    broker = open_one(queues="classic")
    jobs = [job(priority=priority) for priority in (-100, -15, 0, 5, 15, 100)]
    broker.put(jobs)
    worker = LiveOwner(broker)
    taken = [worker.await_all(1)[0].open().id for _ in jobs]
    assert taken == ids_of(reversed(jobs))


def test_a_consumer_that_looks_at_another_queue_keeps_nothing_of_the_first(open_one: Open) -> None:
    broker = open_one()
    consumer, other = (LiveOwner(broker, name, "consumer") for name in ("c1", "c2"))

    def want(queue: str) -> Want:
        return Want(1, (queue,), tasks=False, messages=True)

    consumer.exchange(want=want("a"))
    consumer.exchange(want=want("b"))  # and sleeps there
    given = message("a")
    broker.put([given])
    found = other.await_all(1, queues=("a",))
    assert found[0].open().id == given.id


def test_a_step_that_does_not_wait_gets_ready_messages_in_order(open_one: Open) -> None:
    # case Q15
    broker = open_one()
    given = [message("b"), message("a"), message("a")]
    broker.put(given)
    consumer = LiveOwner(broker, "c1", "consumer")
    want = Want(1, ("a", "b"), Mode.STRICT, tasks=False, messages=True, sleep=False)
    taken = [consumer.exchange(want=want).leases[0].open().id for _ in given]
    assert taken == ids_of([given[1], given[2], given[0]])
    assert consumer.exchange(want=want).leases == []


def test_a_fork_has_lines_of_its_own(open_one: Open) -> None:
    # case Q12
    broker = open_one()
    worker = LiveOwner(broker)
    broker.put([job()])
    [lease] = worker.await_all(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert not [t for t in threading.enumerate() if t.name.startswith("tidemill-")]
            broker.put([job("of the child")])
            child = LiveOwner(broker, "child")
            [mine] = child.await_all(1, queues=("of the child",))
            code = 0 if child.settle(mine) else 2
            broker.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # then the parent's are as they were
    assert worker.settle(lease)
    broker.put([job("again")])
    assert worker.await_all(1)[0].open().queue == "again"


def ours_since(before: set[threading.Thread]) -> list[str]:
    """Threads of ours that have begun since, by name."""
    new = set(threading.enumerate()) - before
    return [thread.name for thread in new if thread.name.startswith("tidemill-")]


def test_a_broker_leaves_nothing_behind(prefix: str) -> None:
    url = rabbitmq_url()
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(3):
        broker = open_rabbit(url, prefix)
        broker.put([job(delay=0.01)])
        LiveOwner(broker).await_all(1)
        broker.close()
    gc.collect()
    assert ours_since(threads) == []
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # that of this look


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("guest:guest@", "guest:wrong@"), "refuses the user 'guest' or its password"),
        (("/%2F", "/nowhere"), "does not let 'guest' in: check the vhost"),
        (None, "cannot reach rabbitmq at 127.0.0.1:"),
    ],
)
def test_a_refused_login_is_one_sentence(
    change: tuple[str, str] | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = rabbitmq_url()
    url = url.replace(*change) if change else f"amqp://127.0.0.1:{free_port()}/"
    began, threads = time.monotonic(), set(threading.enumerate())
    with pytest.raises(BrokerUnavailable, match=said):
        open_broker(f"{url}?patience=1")
    assert time.monotonic() - began < 10
    assert caplog.text == ""
    assert ours_since(threads) == []


def test_a_certificate_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidOption, match="/no/such/file"):
        open_broker("amqps://127.0.0.1/?tls_ca=/no/such/file")
