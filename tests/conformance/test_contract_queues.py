"""A queue's counters: a purge is counted, and a queue can be forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, job, message, state

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.core.envelope import LimitSettings
from tidemill.core.job import Outcome, State

pytestmark = pytest.mark.needs(Feature.INSPECT)


def row_of(broker: Broker, queue: str = "q") -> QueueStats | None:
    return next((row for row in broker.stats() if row.name == queue), None)


def test_a_purge_is_counted(broker: Broker) -> None:
    broker.put([message("q"), message("q", delay=1000.0), job("q"), job("other")])
    assert delete_waiting(broker, "q") == 3
    broker.put([message("q")])
    assert delete_waiting(broker, "q") == 1

    row = row_of(broker)
    assert (row.purged, row.accepted, row.size) == (4, 4, 0)
    other = row_of(broker, "other")
    assert (other.purged, other.size) == (0, 1)


def test_a_purge_of_an_unknown_queue_makes_no_queue(broker: Broker) -> None:
    assert delete_waiting(broker, "q") == 0
    assert row_of(broker) is None


def test_an_empty_queue_is_forgotten_with_its_counters_and_settings(
    broker: Broker, consumer: LiveOwner
) -> None:
    broker.put([message("q"), message("other")])
    (lease,) = consumer.take(1, ["q"])
    consumer.settle(lease)
    broker.set_queue("q", paused=True, max_size=5)

    assert broker.forget_queue("q")

    assert row_of(broker) is None
    assert row_of(broker, "other") is not None


def test_a_forgotten_queue_begins_anew_with_the_next_put(
    broker: Broker, consumer: LiveOwner
) -> None:
    broker.put([message("q", id="old")])
    consumer.settle(consumer.take(1, ["q"])[0])
    broker.set_queue("q", paused=True, max_size=1)
    assert broker.forget_queue("q")

    broker.put([message("q", id="one"), message("q", id="two")])

    row = row_of(broker)
    assert (row.accepted, row.succeeded, row.ready, row.paused, row.max_size) == (2, 0, 2, False, 0)
    assert consumer.take_ids(5, ["q"]) == ["one", "two"]


def test_a_queue_with_settings_but_no_jobs_is_forgotten(broker: Broker) -> None:
    broker.set_queue("q", max_size=3)
    assert row_of(broker) is not None

    assert broker.forget_queue("q")
    assert row_of(broker) is None

    broker.set_queue("q", paused=False)
    assert row_of(broker) is not None


@pytest.mark.parametrize("where", ["ready", "scheduled", "running"])
def test_a_queue_with_an_unfinished_job_is_not_forgotten(
    broker: Broker, consumer: LiveOwner, where: str
) -> None:
    broker.put([message("q", id="m", delay=1000.0 if where == "scheduled" else 0.0)])
    if where == "running":
        consumer.take(1, ["q"])

    assert not broker.forget_queue("q")

    row = row_of(broker)
    assert (row.accepted, row.size) == (1, 1)
    assert state(broker, "m") is State(where)


def test_an_unknown_queue_is_forgotten_already(broker: Broker) -> None:
    assert broker.forget_queue("never was")
    assert row_of(broker, "never was") is None


def test_a_finished_job_of_a_forgotten_queue_can_be_retried(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put([job("q", id="j", retries=0)])
    worker.settle(worker.take(1, ["q"])[0], Outcome.FAIL, error="bad")
    assert broker.forget_queue("q")

    assert broker.retry(["j"]) == [True]

    row = row_of(broker)
    assert row.size == 1
    assert worker.take_ids(5, ["q"]) == ["j"]


def test_the_limit_of_a_forgotten_queue_stays(
    broker: Broker, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.LIMITS)
    with_limits(broker, "").set_limit("q", LimitSettings(concurrency=1), queue=True)
    broker.put([job("q", id="first")])
    worker.settle(worker.take(5, ["q"])[0])
    assert broker.forget_queue("q")

    broker.put([job("q", id="one"), job("q", id="two")])

    assert worker.take_ids(5, ["q"]) == ["one"]


def test_running_jobs_are_found_page_by_page_the_newest_first(
    broker: Broker, worker: LiveOwner
) -> None:
    # given running jobs among finished and ready jobs
    broker.put([job("q") for _ in range(12)])
    for lease in worker.take(2, ["q"]):
        worker.settle(lease)
    running = [lease.open().id for lease in worker.take(7, ["q"])]
    assert len(running) == 7
    # when they are listed by 3
    found, cursor = list[str](), ""
    while True:
        page = broker.find(Filter(states=frozenset({State.RUNNING})), 3, cursor)
        assert len(page.records) <= 3
        found += [record.envelope.id for record in page.records]
        if not (cursor := page.cursor):
            break
    # then each is there once
    assert found == sorted(running, reverse=True)
