"""Direct hand-off on Redis and PostgreSQL: a put leases to a worker that sleeps for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from handoff_desk import Sleeper, count_steps, named, states
from servers import NETWORK

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import rank_of
from tidemill.core.job import State

pytestmark = pytest.mark.full

READY, RUNNING, SUCCEEDED = State.READY, State.RUNNING, State.SUCCEEDED


@pytest.fixture(params=["redis", "postgresql"])
def broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A broker with the queues "default" and "other"."""
    with contextlib.closing(open_broker(NETWORK[request.param](f"t{new_id()}"))) as broker:
        broker.tick()  # or the first wait would end at once for it
        for queue in ("default", "other"):
            broker.set_queue(queue, paused=False)
        yield broker


@pytest.fixture
def worker(broker: Any) -> Sleeper:
    """A worker that sleeps."""
    worker = Sleeper(broker)
    worker.sleep()
    return worker


@pytest.mark.everyday
def test_a_put_leases_to_a_sleeping_worker_and_the_hint_brings_the_lease(
    broker: Any, worker: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.put([named("one", timeout=7.0, priority=3)])
    record = broker.get("one")
    assert (record.state, record.worker) == (RUNNING, "w")
    worker.hear()
    steps = count_steps(broker, monkeypatch)
    before = steps()
    (lease,) = worker.exchange(want=Want(4))
    assert steps() == before  # nobody was asked
    assert (lease.open().id, lease.attempt, lease.losses) == ("one", 1, 0)
    assert (lease.timeout, lease.rank, lease.seq) == (7.0, rank_of(3), record.seq)
    assert lease.leased == pytest.approx(record.leased)
    assert worker.take() == []  # no second lease
    assert worker.settle(lease)
    assert states(broker, "one") == [SUCCEEDED]
    row = broker.stats()[0]
    assert (row.ready, row.running, row.accepted, row.succeeded) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"delay": 30.0},
        {"expires": 30.0},
        {"key": "k"},
        {"task": "", "ttr": 60.0},
        {"queue": "paused"},
        {"queue": "bounded"},
        {"queue": "other"},
    ],
    ids=str,
)
def test_jobs_with_conditions_are_not_handed_over(broker: Any, fields: dict[str, Any]) -> None:
    broker.set_queue("paused", paused=True)
    broker.set_queue("bounded", max_size=10)
    Sleeper(broker).sleep(queues=["default", "paused", "bounded"])
    broker.put([named("one", **fields)])
    assert states(broker, "one") != [RUNNING]


def test_a_task_that_the_worker_no_longer_wants_goes_back(broker: Any, worker: Sleeper) -> None:
    broker.put([named("one")])
    worker.hear()
    assert worker.take(0) == []
    record = broker.get("one")
    assert (record.state, record.attempt) == (READY, 0)
    assert worker.take(1) == ["one"]


def test_a_task_cancelled_before_the_worker_heard_never_starts(
    broker: Any, worker: Sleeper
) -> None:
    # law 14
    broker.put([named("one", body=b"x" * 6000)])
    assert broker.cancel(["one"]) == [True]
    assert worker.take() == []
    record = broker.get("one")
    assert (record.state, record.error) == (State.CANCELLED, "cancelled before it started")


def test_a_worker_that_dies_before_it_heard_has_used_no_attempt(
    broker: Any, worker: Sleeper
) -> None:
    # law 6
    broker.put([named("one")])
    assert broker.release("w", {}) == 1
    record = broker.get("one")
    assert (record.state, record.attempt, record.losses) == (READY, 0, 0)
