"""RabbitMQ killed, alarmed, emptied and cut off in the middle of what we do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from harness import SLACK, eventually
from rabbitmq_desk import LiveOwner, Runner, held, ids_of, job, open_rabbit, put_until
from servers import Proxy, RabbitMQ

from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.core.job import Outcome
from tidemill.errors import BrokerUnavailable, StoreFull

Open = Callable[..., RabbitBroker]


@pytest.fixture
def url(server: RabbitMQ) -> str:
    return server.url


def test_accepted_jobs_run_although_the_server_is_killed(server: RabbitMQ, open_one: Open) -> None:
    # law 1: puts, delays, exchanges and verdicts, all of them under way when it falls
    producer, consumer = open_one(patience=60), open_one()
    producer.put([job("warm"), job("warm", delay=0.3)])
    server.sync()
    runner = Runner(consumer)
    eventually(lambda: len(runner.ran) == 2, "the first two")
    server.sync()
    accepted: list[str] = []
    over = threading.Event()

    def produce() -> None:
        while not over.is_set():
            jobs = [job("warm", delay=0.3 * (n % 2)) for n in range(20)]
            put_until(producer, jobs)
            accepted.extend(ids_of(jobs))

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for _ in range(2):
            before = len(accepted)
            eventually(lambda seen=before: len(accepted) > seen + 200, "work under way")
            server.kill()
            server.start()
    finally:
        over.set()
        thread.join(60)
        server.process or server.start()
    # then
    try:
        eventually(lambda: set(accepted) <= set(runner.ran), "the end of all", limit=60)
    finally:
        runner.stop()
    assert not thread.is_alive()


@pytest.mark.parametrize("ends", ["while it is away", "when it is back"])
def test_a_job_that_runs_when_the_line_breaks_is_not_run_twice(
    server: RabbitMQ, open_one: Open, prefix: str, ends: str
) -> None:
    # law 5
    broker = open_one()
    broker.put([job()])
    worker = LiveOwner(broker)
    [lease] = worker.await_all(1)
    assert worker.take() == []
    server.sync()
    # when
    server.kill()
    eventually(lambda: not broker._in.is_up, "the loss")
    if ends == "while it is away":
        assert not worker.settle(lease)
    server.start()
    assert worker.take() == []
    # then
    if ends == "when it is back":
        eventually(lambda: worker.touch(lease), "its message to come back")
        assert worker.settle(lease)
    eventually(lambda: held(server, prefix) == 0, "the end")
    assert worker.take() == []


def test_a_retry_given_while_the_server_is_away_is_stored_when_it_is_back(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    # law 3: the successor first, then the end of the first
    broker = open_one()
    broker.put([job()])
    worker = LiveOwner(broker)
    [lease] = worker.await_all(1)
    assert worker.take() == []
    server.sync()
    server.kill()
    eventually(lambda: not broker._in.is_up, "the loss")
    worker.settle(lease, Outcome.RETRY, error="no")
    server.start()
    [again] = worker.await_all(1, limit=60)
    assert again.attempt == 2
    assert worker.settle(again)
    eventually(lambda: held(server, prefix) == 0, "the end")


def test_a_queue_that_somebody_deletes_is_made_again(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    broker = open_one()
    worker = LiveOwner(broker)
    broker.put([job()])
    assert worker.settle(worker.await_all(1)[0])
    for name in server.queues():
        if name.startswith(f"{prefix}.tasks."):
            server.delete_queue(name)
    # then: nothing that is put is lost, and who takes goes on
    jobs = [job(), job(delay=0.1)]
    broker.put(jobs)
    assert {one.open().id for one in worker.await_all(2, limit=120)} == set(ids_of(jobs))


def test_while_the_server_is_short_of_memory_puts_are_refused_and_work_ends(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    # law 16
    open_one(patience=60).put([job()])
    broker = open_one(patience=5)
    worker = LiveOwner(broker)
    [lease] = worker.await_all(1)
    server.alarm(True)
    try:
        # The first may pass: it is how the server learns of a publisher.
        with pytest.raises((BrokerUnavailable, StoreFull), match="rabbitmq"):
            eventually(lambda: broker.put([job("other")]) and False, "a refusal")
        began = time.monotonic()
        with pytest.raises(StoreFull, match=r"lets nobody publish: .*; nothing was stored"):
            broker.put([job("other")])
        assert time.monotonic() - began < 5 + SLACK
        # when
        assert worker.settle(lease)
        # then: an end is no publication
        queue = f"{prefix}.tasks.normal.default"
        eventually(lambda: server.queues()[queue]["messages"] == 0, "the end")
    finally:
        server.alarm(False)
    put_until(broker, [job()])
    worker.await_all(1)


def test_a_refused_message_is_reported_and_an_end_waits_for_its_successor(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    # law 3: refused, not lost
    broker = open_one()
    first, second = job(), job()
    broker.put([first])
    worker = LiveOwner(broker)
    [lease] = worker.await_all(1)

    def bound(most: int) -> None:
        says = f'{{"max-length": {most}, "overflow": "reject-publish"}}'
        server.ctl("set_policy", prefix, f"^{prefix}.tasks.normal", says, "--apply-to", "queues")

    bound(1)
    broker.put([second])
    with pytest.raises(BrokerUnavailable, match="refused a message"):
        eventually(lambda: broker.put([job()]) and False, "a refusal")
    # when
    worker.settle(lease, Outcome.RETRY)
    time.sleep(0.5)
    bound(1000)
    # then
    seen: set[str] = set()
    while not {first.id, second.id} <= seen:
        seen |= {lease.open().id for lease in worker.await_all(1)}


def test_a_link_that_is_cut_silently_is_given_up(server: RabbitMQ, open_one: Open) -> None:
    # law 5: after the owner lease, by the missing heartbeats
    proxy = Proxy(server.port)
    near = open_one()
    far = open_one(
        server.url.replace(f":{server.port}/", f":{proxy.port}/"), owner_lease=2, patience=8
    )
    try:
        given = job()
        near.put([given])
        worker, other = LiveOwner(far), LiveOwner(near, "w2")
        [lease] = worker.await_all(1)
        # when
        proxy.cut()
        [again] = other.await_all(1)
        # then
        assert again.open().id == given.id
        with pytest.raises(BrokerUnavailable):
            far.put([job("other")])
        assert other.settle(again)
        proxy.mend()
        eventually(lambda: not worker.settle(lease), "the loss")
        put_until(far, [job("later")])
        assert "later" in {lease.open().queue for lease in worker.await_all(1, queues=("later",))}
    finally:
        proxy.close()


def test_a_server_that_takes_back_what_runs_for_too_long_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # law 5: where nobody else takes it, it goes on; the server's consumer_timeout is 30 min else
    server = RabbitMQ("consumer_timeout = 1000")
    try:
        server.eval("application:set_env(rabbit, channel_tick_interval, 500)")
        broker = open_rabbit(server.url, "timeout")
        broker.put([job()])
        worker = LiveOwner(broker)
        [lease] = worker.await_all(1)
        eventually(lambda: "rabbitmq took back our messages: PRECONDITION" in caplog.text, "that")
        assert worker.take() == []
        eventually(lambda: worker.touch(lease), "its message to come back")
        assert worker.settle(lease)
        assert worker.take() == []
        broker.close()
    finally:
        server.close()
