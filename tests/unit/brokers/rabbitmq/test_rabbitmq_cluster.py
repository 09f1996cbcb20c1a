"""A RabbitMQ cluster of three nodes that loses one: delayed jobs and retries go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from rabbitmq_desk import LiveOwner, job, open_rabbit
from servers import RabbitMQ

from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.core.job import Lease, Outcome

DELAYS = [1 + n / 100 for n in range(31)]

LATE = 60.0
"""Seconds: an election and a new connection take some on a busy machine, the node stays away."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RabbitMQ]]:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(RabbitMQ()))
        others = [RabbitMQ(beside=first) for _ in range(2)]
        for node in others:
            stack.enter_context(contextlib.closing(node))
        yield [first, *others]


def url_of(nodes: list[RabbitMQ]) -> str:
    """The url that names all nodes."""
    return f"amqp://guest:guest@{','.join(f'127.0.0.1:{node.port}' for node in nodes)}/%2F"


def leader(nodes: list[RabbitMQ], queue: str) -> RabbitMQ:
    """The node that leads a queue."""
    name = nodes[0].eval(
        f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>))',
        "io:put_chars(atom_to_list(element(2, amqqueue:get_pid(Q))))",
    )
    return next(node for node in nodes if node.node == name)


def put_all(producer: RabbitBroker) -> dict[str, float]:
    """Put a job of each delay: by id, when each is due."""
    due: dict[str, float] = {}
    for delay in DELAYS:
        delayed = job(delay=delay)
        due[delayed.id] = time.monotonic() + delay
        producer.put([delayed])
    return due


def run_all(worker: LiveOwner, due: dict[str, float]) -> list[Lease]:
    """Lease each job at its time; what a broken line brings twice ends at once."""
    leases: dict[str, Lease] = {}
    until = max(due.values()) + LATE
    while len(leases) < len(due):
        for lease in worker.await_all(1, limit=until - time.monotonic()):
            job_id = lease.open().id
            assert time.monotonic() >= due[job_id]
            if leases.setdefault(job_id, lease) is not lease:
                worker.settle(lease)
    return list(leases.values())


def test_delayed_jobs_run_while_the_node_is_away_that_led_their_queue(
    nodes: list[RabbitMQ],
) -> None:
    # given: one node leads the queue, another the queues of delays
    nodes[0].sync()
    prefix, (first, second, third) = f"c{time.time_ns() % 10**12}", nodes
    with contextlib.ExitStack() as stack:

        def opened(*order: RabbitMQ) -> RabbitBroker:
            broker = open_rabbit(url_of(list(order)), prefix)
            return stack.enter_context(contextlib.closing(broker))

        worker = LiveOwner(opened(first, second, third))
        worker.broker.put([job()])
        assert worker.settle(*worker.await_all(1))
        producer = opened(second, third, first)
        producer.put([job(delay=0.05)])
        assert worker.settle(*worker.await_all(1))
        assert leader(nodes, f"{prefix}.tasks.normal.default") is first
        # when: it dies, jobs come due during the election, and more are put meanwhile
        before, kill = put_all(producer), time.monotonic() + DELAYS[0] - 0.05
        time.sleep(max(0.0, kill - time.monotonic()))
        first.kill()
        due = before | put_all(producer)
        # then
        for lease in run_all(worker, due):
            worker.settle(lease, Outcome.RETRY, delay=0.6)
        again = time.monotonic()
        run_all(worker, dict.fromkeys(due, again))
