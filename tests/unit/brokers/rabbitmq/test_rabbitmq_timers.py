"""Timer queues of RabbitMQ: workers keep the time of delayed jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pika
import pytest
from harness import eventually
from rabbitmq_desk import LiveOwner, job, open_rabbit
from servers import Proxy, rabbitmq_url

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.rabbitmq import RabbitBroker, timekeeper
from tidemill.brokers.rabbitmq import message as rabbitmq_message
from tidemill.core.envelope import encode_envelope
from tidemill.core.job import Outcome, State

Open = Callable[..., RabbitBroker]

LATE = 15.0
"""Seconds that a job may come after its time on a busy machine; a lost job never comes."""


@pytest.fixture
def prefix() -> str:
    return f"k{time.time_ns() % 10**12}"


@pytest.fixture
def open_one(prefix: str) -> Iterator[Open]:
    """Open brokers."""
    brokers: list[RabbitBroker] = []

    def opened(url: str = "", **options: Any) -> RabbitBroker:
        brokers.append(open_rabbit(url or rabbitmq_url(), prefix, **options))
        return brokers[-1]

    yield opened
    for broker in brokers:
        broker.close()


def lateness(worker: LiveOwner, due: dict[str, float]) -> dict[str, float]:
    """Seconds that each job comes after its time."""
    late: dict[str, float] = {}
    while len(late) < len(due):
        for lease in worker.await_all(1):
            late[lease.open().id] = time.monotonic() - due[lease.open().id]
            assert worker.settle(lease)
    return late


def put(broker: RabbitBroker, delay: float) -> tuple[str, float]:
    """Put a delayed job: its id, and when it is due."""
    delayed, due = job(delay=delay), time.monotonic() + delay
    broker.put([delayed])
    return delayed.id, due


# -- on time --------------------------------------------------------------------------------------


def test_delayed_jobs_come_when_they_are_due(open_one: Open) -> None:
    # law 9
    producer, worker = open_one(), LiveOwner(open_one())
    worker.take()
    late = lateness(worker, dict(put(producer, d) for d in (0.05, 0.5, 0.7, 1.1, 2.1, 0.3)))
    assert min(late.values()) >= 0
    assert max(late.values()) < LATE


def test_a_worker_that_comes_later_finds_delayed_jobs(open_one: Open) -> None:
    producer = open_one()
    due = dict(put(producer, delay) for delay in (0.05, 0.6, 1.2))
    assert producer.info()["delayed"] == 3
    time.sleep(1.3)
    assert len(lateness(LiveOwner(open_one()), due)) == 3


def test_a_delay_longer_than_a_timer_queue_goes_round_again(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 9: as if a timer queue held no more than 0.3 s
    monkeypatch.setattr(rabbitmq_message, "LONGEST", 0.3)
    broker = open_one()
    given_job, began = job(delay=1.0), time.monotonic()
    broker.put([given_job])
    worker = LiveOwner(broker)
    [lease] = worker.await_all(1)
    assert 1.0 <= time.monotonic() - began < LATE
    assert (lease.open().id, lease.attempt) == (given_job.id, 1)
    assert lease.envelope == encode_envelope(given_job)


def test_a_retry_waits_and_keeps_what_is_known_of_its_job(open_one: Open) -> None:
    # laws 7, 9
    broker = open_one()
    worker = LiveOwner(broker)
    given_job = job(delay=0.05)
    broker.put([given_job])
    (lease,) = worker.await_all(1)
    ended = time.monotonic()
    assert worker.settle(lease, Outcome.RETRY, delay=0.6, error="broken")
    (lease,) = worker.await_all(1)
    assert time.monotonic() - ended >= 0.6
    assert (lease.open().id, lease.attempt) == (given_job.id, 2)


def test_a_delayed_job_held_for_long_comes_again_and_runs_once(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 2: as if the server took back what is held for more than half a second
    monkeypatch.setattr(timekeeper, "_HOLD_MOST", 0.1)
    monkeypatch.setattr(timekeeper, "_LOOK_EVERY", 0.05)
    producer, worker = open_one(), LiveOwner(open_one())
    worker.take()
    due = dict(put(producer, delay) for delay in (0.9, 1.5))
    late: dict[str, float] = {}
    for _ in due:
        (lease,) = worker.await_all(1)
        late[lease.open().id] = time.monotonic() - due[lease.open().id]
        assert (lease.attempt, lease.losses) == (1, 0)
        assert worker.settle(lease)
    assert min(late.values()) >= 0
    assert worker.take() == []


# -- when something breaks ------------------------------------------------------------------------


def test_a_cut_line_loses_and_doubles_nothing(open_one: Open) -> None:
    # laws 1, 2
    with contextlib.closing(Proxy(int(pika.URLParameters(rabbitmq_url()).port))) as proxy:
        url = f"amqp://guest:guest@127.0.0.1:{proxy.port}/%2F"
        producer, worker = open_one(), LiveOwner(open_one(url))
        worker.take()
        due = dict(put(producer, 0.9 + n / 50) for n in range(60))
        seen: list[str] = []
        for _ in range(4):
            proxy.cut()
            proxy.mend()
            time.sleep(0.4)
        while len(set(seen)) < len(due):
            for lease in worker.await_all(1):
                assert time.monotonic() >= due[lease.open().id]
                seen.append(lease.open().id)
                worker.settle(lease)


def test_an_unreadable_delayed_message_is_kept_with_the_failed_jobs(
    open_one: Open, prefix: str
) -> None:
    # law 16
    broker = open_one()
    worker = LiveOwner(broker)
    worker.take()
    put(broker, 0.05)
    (lease,) = worker.await_all(1)
    assert worker.settle(lease)
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url()))) as line:
        line.channel().basic_publish("", f"{prefix}.timer.0", b"who are you?")
    what = Filter(states=frozenset({State.FAILED}))
    (record,) = eventually(lambda: broker.find(what).records, "it is put aside")
    assert "does not say when it is due" in record.error
