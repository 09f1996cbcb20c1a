"""Jobs by number and by place: drawing numbers, the first jobs, leasing by id, another rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, job, message, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.job_numbers import JobNumbers, with_job_numbers
from tidemill.core.clock import clock
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.core.job import Lease, Outcome, State

pytestmark = pytest.mark.needs(Feature.NAMED)


@pytest.fixture
def named(broker: Broker) -> JobNumbers:
    return with_job_numbers(broker, "a test")


def lease_one(named: JobNumbers, owner: LiveOwner, job_id: str) -> Lease | None:
    [lease] = named.lease_named(owner.id, [job_id])
    return lease


def head_ids(named: JobNumbers, queue: str, state: State, count: int = 10) -> list[str]:
    return [record.envelope.id for record in named.head(queue, state, count)]


def test_numbers_are_given_away_once(
    named: JobNumbers, open_store: Callable[..., Broker], broker: Broker
) -> None:
    assert named.numbers(3) == 1
    assert named.numbers(1) == 4
    if Feature.PROCESSES in broker.features:
        assert with_job_numbers(open_store(), "a test").numbers(1000) == 5
        assert named.numbers(1) == 1005


def test_head_lists_the_first_jobs_of_each_state(
    broker: Broker, consumer: LiveOwner, named: JobNumbers, clock: Clock
) -> None:
    # given: jobs of both kinds in two queues, put in another order than they come in
    broker.put(
        [message("a", id="late", rank=9), job("a", id="task"), message("a", id="first", rank=0)]
    )
    broker.put([message("a", id=f"in{s}", delay=s) for s in (30, 10, 20)])
    broker.put([message("b", id="other"), message("b", id="other-in", delay=5)])
    broker.put([message("c", id=f"bad{n}") for n in range(3)])
    for n in (1, 2, 0):
        lease = lease_one(named, consumer, f"bad{n}")
        consumer.settle(lease, Outcome.FAIL)
        clock.advance(1)  # jobs that fail in the same microsecond are listed by number
    # then
    assert head_ids(named, "a", State.READY) == ["first", "late", "task"]
    assert head_ids(named, "a", State.READY, 1) == ["first"]
    assert head_ids(named, "a", State.SCHEDULED) == ["in10", "in20", "in30"]
    assert head_ids(named, "a", State.SCHEDULED, 2) == ["in10", "in20"]
    assert head_ids(named, "c", State.FAILED) == ["bad1", "bad2", "bad0"]
    assert head_ids(named, "a", State.FAILED) == head_ids(named, "none", State.READY) == []
    record = named.head("a", State.READY, 1)[0]
    assert (record.state, record.rank, record.envelope.queue) == (State.READY, 0, "a")


def test_due_by_either_clock_is_one_order(broker: Broker, named: JobNumbers) -> None:
    given = message(id="at", at=clock.wall() + 20)
    broker.put([message(id="in30", delay=30), given, message(id="in10", delay=10)])
    assert head_ids(named, "default", State.SCHEDULED) == ["in10", "at", "in30"]


def test_leasing_by_id_in_every_state(
    broker: Broker, consumer: LiveOwner, named: JobNumbers
) -> None:
    # given
    broker.put([message(id="ready"), message(id="in", delay=1000), message(id="bad")])
    bad = lease_one(named, consumer, "bad")
    consumer.settle(bad, Outcome.FAIL, error="buried")
    broker.put([job(id="task"), job(id="done")])
    done = lease_one(named, consumer, "done")
    consumer.settle(done)
    # when
    leases = named.lease_named(consumer.id, ["ready", "unknown", "in", "bad", "task", "done", ""])
    # then: each that waited is leased, under a fresh token, and no other
    assert [lease and lease.open().id for lease in leases] == [
        *("ready", None, "in", "bad", "task", None, None)
    ]
    found = [lease for lease in leases if lease]
    assert len({lease.token for lease in found}) == 4
    assert all(lease.deadline == 60 for lease in found)
    assert {state(broker, lease.open().id) for lease in found} == {State.RUNNING}
    # and what runs is leased to nobody else
    other = LiveOwner(broker, "c2", "consumer")
    assert lease_one(named, other, "ready") is None
    assert other.take(5, kinds="both") == LiveOwner(broker).take(5) == []
    # and they can be settled like any other, by their owner alone
    assert not other.settle(found[0])
    assert all(consumer.settle(lease) for lease in found)
    assert broker.get("ready") is None
    assert not consumer.settle(found[0])


def test_a_lease_by_id_ends_with_its_ttr(
    broker: Broker, consumer: LiveOwner, clock: Clock, named: JobNumbers
) -> None:
    broker.put([message(id="m", ttr=5)])
    lease = lease_one(named, consumer, "m")
    assert lease.deadline == 5
    assert consumer.touch(lease)
    clock.advance(6)
    broker.tick()
    assert state(broker, "m") is State.READY
    assert not consumer.settle(lease)


def test_pauses_and_limits_of_queues_do_not_hold_for_a_lease_by_id(
    broker: Broker, consumer: LiveOwner, named: JobNumbers
) -> None:
    broker.set_queue("a", paused=True)
    limit = JobLimit("slow", "", 1.0, LimitSettings(concurrency=1))
    broker.put([message("a", id="paused"), message("a", id="limited", limit=limit)])
    assert lease_one(named, consumer, "paused") is not None
    assert lease_one(named, consumer, "limited") is None
    assert state(broker, "limited") is State.READY


def test_a_message_with_ttr_0_is_leased_and_an_expired_message_is_not(
    broker: Broker, consumer: LiveOwner, clock: Clock, named: JobNumbers
) -> None:
    broker.put([message(id="once", ttr=0), message(id="old", expires=5)])
    lease = lease_one(named, consumer, "once")
    assert state(broker, "once") is State.RUNNING
    assert consumer.settle(lease)
    assert broker.get("once") is None
    clock.advance(6)
    assert lease_one(named, consumer, "old") is None
    assert state(broker, "old") is State.EXPIRED


def test_no_job_is_leased_to_a_detached_owner(broker: Broker, named: JobNumbers) -> None:
    broker.put([message(id="m")])
    gone = LiveOwner(broker, "c2", "consumer")
    broker.release(gone.id, {})
    assert lease_one(named, gone, "m") is None
    assert state(broker, "m") is State.READY


def test_a_verdict_may_change_the_rank(
    broker: Broker, consumer: LiveOwner, named: JobNumbers
) -> None:
    # given
    broker.put([message(id=name, rank=5) for name in ("a", "b", "c", "d")])
    a, b, c, _ = consumer.take(4)
    # when: one comes back later in order, one earlier, one fails and is retried
    consumer.settle(a, Outcome.RELEASE, rank=2**32 - 1)
    consumer.settle(b, Outcome.RELEASE, rank=0, delay=1000)
    consumer.settle(c, Outcome.FAIL, rank=1)
    # then
    ranks = {name: record.rank for name in "abc" if (record := broker.get(name))}
    assert ranks == {"a": 2**32 - 1, "b": 0, "c": 1}
    assert broker.retry(["b", "c"]) == [True, True]
    assert head_ids(named, "default", State.READY) == ["b", "c", "a"]
    assert consumer.take_ids(3) == ["b", "c", "a"]


def test_a_late_verdict_changes_no_rank(broker: Broker, consumer: LiveOwner) -> None:
    broker.put([message(id="m", rank=5)])
    [lease] = consumer.take()
    assert consumer.settle(lease, Outcome.RELEASE)
    assert not consumer.settle(lease, Outcome.RELEASE, rank=1)
    record = broker.get("m")
    assert record.rank == 5
