"""Watching many jobs in one thread, on every broker that a job server serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from broker_driver import LiveOwner, ids_of, job

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.shared.job_watch import Alarm, Ends, Watched


@pytest.fixture
def ends(broker: Broker) -> Ends:
    if not isinstance(broker, Watched):
        pytest.skip("it watches no jobs")
    return broker.waits


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    yield alarm
    alarm.close()


def later(function: object, *args: object) -> threading.Timer:
    timer = threading.Timer(0.3, function, args)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_a_watch_tells_which_jobs_have_ended(
    broker: Broker, worker: LiveOwner, ends: Ends, alarm: Alarm
) -> None:
    # given two jobs that run
    jobs = [job(), job()]
    broker.put(jobs)
    leases = worker.await_all(2)
    ids = ids_of(jobs)
    assert ends.ended(ids, 0.05, alarm) == [False, False]
    # when one of them ends
    timer = later(worker.settle, leases[1])
    expected = [lease is leases[1] for lease in leases]
    order = {lease.open().id: over for lease, over in zip(leases, expected, strict=True)}
    # then the watch ends with it, and the next one at once
    for _ in range(2):
        assert ends.ended(ids, 30, alarm) == [order[job_id] for job_id in ids]
    timer.join()
    # and a job that is not there has ended
    assert ends.ended([ids_of([job()])[0]], 30, alarm) == [True]


def test_an_alarm_ends_a_watch(broker: Broker, ends: Ends, alarm: Alarm) -> None:
    given = job(delay=600)
    broker.put([given])
    begun = time.monotonic()
    timer = later(alarm.ring)
    assert ends.ended([given.id], 60, alarm) == [False]
    timer.join()
    # one that rings already ends the next, until it is cleared
    assert ends.ended([given.id], 60, alarm) == [False]
    assert time.monotonic() - begun < 30
    alarm.clear()
    begun = time.monotonic()
    assert ends.ended([given.id], 0.2, alarm) == [False]
    assert time.monotonic() - begun > 0.1


def test_a_job_that_a_watch_waits_for_may_be_deleted(
    broker: Broker, ends: Ends, alarm: Alarm
) -> None:
    given = job(delay=600)
    broker.put([given])
    timer = later(broker.delete, [given.id])
    assert ends.ended([given.id], 60, alarm) == [True]
    timer.join()
