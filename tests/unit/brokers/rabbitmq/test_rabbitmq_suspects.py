"""Suspects on RabbitMQ, which reports no deaths: they run alone, and fail if they kill workers."""

from __future__ import annotations

import sys
from pathlib import Path

from harness import eventually
from pika.adapters.blocking_connection import BlockingChannel

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.rabbitmq.settle import SUSPECT

sys.path.append(str(Path(__file__).parents[3] / "conformance"))

from broker_driver import LiveOwner, job


def die_of(channel: BlockingChannel, place: str, times: int, count: int = 1) -> None:
    """Take so many messages and never end them: what the server sees of a death."""
    for _ in range(times):
        tags = []
        while len(tags) < count:
            got = eventually(lambda: (found := channel.basic_get(place))[0] and found)
            tags.append(got[0].delivery_tag)
        channel.basic_nack(max(tags), multiple=True, requeue=True)


def test_a_suspect_runs_alone_and_holds_up_nobody(
    broker: Broker, prefix: str, channel: BlockingChannel
) -> None:
    # law 6
    suspects, plain = [job(), job()], [job() for _ in range(5)]
    broker.put(suspects)
    die_of(channel, f"{prefix}.tasks.normal.default", SUSPECT, count=2)
    worker = LiveOwner(broker)
    broker.put(plain)
    # when
    leases = worker.await_all(6, queues=("default",))
    # then one of those that may be why is leased, and all that are not
    alone = [lease for lease in leases if lease.losses]
    assert len(alone) == 1
    assert {lease.open().id for lease in leases} >= {one.id for one in plain}
    # and it is a job as any other when it has ended
    assert worker.settle(alone[0])
    (second,) = worker.await_all(1, queues=("default",))
    assert second.losses
    assert {alone[0].open().id, second.open().id} == {one.id for one in suspects}


def test_a_worker_that_cannot_run_a_job_alone_gets_no_suspect(
    broker: Broker, prefix: str, channel: BlockingChannel
) -> None:
    # law 6
    suspect, plain = job(), job()
    broker.put([suspect])
    die_of(channel, f"{prefix}.tasks.normal.default", SUSPECT)
    worker = LiveOwner(broker)
    broker.put([plain])
    (lease,) = worker.await_all(1, queues=("default",), alone=False)
    assert lease.open().id == plain.id
    reply = worker.exchange(want=Want(1, ("default",), alone=False))
    assert not reply.leases
    (lease,) = worker.await_all(1, queues=("default",), alone=True)
    assert (lease.open().id, lease.losses) == (suspect.id, 1)


def test_a_suspect_that_its_workers_die_of_again_fails(
    broker: Broker, prefix: str, channel: BlockingChannel
) -> None:
    # law 6: no poison loop
    culprit = job(retries=2)
    broker.put([culprit])
    die_of(channel, f"{prefix}.tasks.normal.default", SUSPECT)
    worker = LiveOwner(broker)
    (lease,) = worker.await_all(1)
    assert lease.losses == 1
    broker.detach(worker.id)  # it goes back, which is no death
    die_of(channel, f"{prefix}.tasks.suspect.default", 3)
    # when
    LiveOwner(broker).take()
    # then
    _, properties, _ = eventually(
        lambda: (found := channel.basic_get(f"{prefix}.failed"))[0] and found
    )
    assert properties.message_id == culprit.id
    assert "its worker died 3 times while it had nothing else to run" in properties.headers["error"]
