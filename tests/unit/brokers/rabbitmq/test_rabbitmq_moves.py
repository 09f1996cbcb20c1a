"""``tidemill move`` and RabbitMQ: jobs move there by puts, and do not move away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from broker_driver import everything
from rabbitmq_desk import LiveOwner, job, message, open_rabbit
from servers import rabbitmq_url

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import LimitSettings
from tidemill.core.job import Lease, Outcome, State
from tidemill.errors import FeatureMissing, InvalidOption
from tidemill.transfer.store_to_store import cancel_move, move


@pytest.fixture
def target() -> Iterator[RabbitBroker]:
    prefix = f"l{time.time_ns() % 10**15}"
    with contextlib.closing(open_rabbit(rabbitmq_url(), prefix, patience=60)) as broker:
        yield broker


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Broker]:
    with contextlib.closing(open_broker(f"lmdb://{tmp_path}/one")) as broker:
        yield broker


def ids_of(leases: Sequence[Lease]) -> list[str]:
    return [lease.open().id for lease in leases]


def test_ready_and_scheduled_jobs_move_in_order(source: Broker, target: RabbitBroker) -> None:
    worker = LiveOwner(source)
    failed, retried = job(retries=0), job(retries=3)
    source.put([failed, retried])
    leases = worker.take(2)
    worker.settle(leases[0], Outcome.RETRY, error="broken")
    worker.settle(leases[1], Outcome.RETRY, error="later", delay=1.0)
    jobs = [job(id=f"j{n}", tags=("t",), expires=1000.0) for n in range(3)]
    urgent, at = job(priority=7), job(at=time.time() + 1.5)
    source.put([*jobs, urgent, at, message("m")])
    moved = move(source, target)
    assert (moved.gone, moved.left) == (7, {})
    assert {record.state for record in everything(source)} == {State.FAILED}
    there = LiveOwner(target)
    leases = there.await_all(4)
    assert ids_of(leases) == [urgent.id, "j0", "j1", "j2"]
    got = leases[1].open()
    assert (got.tags, got.body) == (("t",), jobs[0].body)
    assert got.expires == pytest.approx(1000.0, abs=1)
    late = {lease.open().id: lease for lease in there.await_all(2)}
    assert set(late) == {retried.id, at.id}
    assert late[retried.id].open().retries.max_attempts == 3  # one of four is used
    assert at.at <= time.time()


def test_a_move_is_cancelled_and_the_moved_jobs_stay_there(
    source: Broker, target: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.put([job()])
    source.depart(target.url)
    cancel_move(source, target)
    source.put([job()])
    assert move(source, target).gone == 2


def test_jobs_do_not_move_out_of_rabbitmq(source: Broker, target: RabbitBroker) -> None:
    with pytest.raises(FeatureMissing, match=r"cannot move: let its workers empty it.*lmdb://"):
        move(target, source)


def test_jobs_that_the_server_cannot_hold_are_counted_by_kind(
    source: Broker, target: RabbitBroker
) -> None:
    source.put([job(), job(key="k"), job("a#b"), job("a*b")])
    said = "2 jobs of a queue with [*] or # in its name, 1 jobs with a key; finish"
    with pytest.raises(InvalidOption, match=said):
        move(source, target)
    moved = move(source, target, leave=True)
    assert moved.gone == 1
    assert move(source, target, leave=True).gone == 0
    assert moved.left == {"jobs with a key": 1, "jobs of a queue with * or # in its name": 2}


def test_pauses_and_bounds_of_queues_are_not_dropped_in_silence(
    source: Broker, target: RabbitBroker
) -> None:
    held, free = job("held"), job("free")
    source.put([held, free])
    source.set_queue("held", paused=True)
    source.set_queue("free", max_size=10)
    with_limits(source, "limits").set_limit("free", LimitSettings(concurrency=1), queue=True)
    said = "1 limits of queues, 1 paused queues, 1 queues with max_size; finish"
    with pytest.raises(InvalidOption, match=said):
        move(source, target)
    moved = move(source, target, leave=True)
    assert moved.gone == 1
    assert moved.left == {
        "jobs of a paused queue": 1,
        "limits of queues": 1,
        "queues with max_size": 1,
    }
    assert ids_of(LiveOwner(target).await_all(1)) == [free.id]
