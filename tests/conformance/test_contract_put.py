"""Putting: order, all or none, ids, sizes, delays, expiry."""

from __future__ import annotations

import threading

import pytest
from broker_driver import LiveOwner, check_counts, everything, ids_of, job, message, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode
from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Outcome, Placed, State
from tidemill.errors import DuplicateJob, QueueFull


def test_the_first_job_put_is_leased_first(broker: Broker, worker: LiveOwner) -> None:
    # case Q1, law 10
    jobs = [job(body=str(n).encode()) for n in (2, 3, 1)]
    # when
    puts = broker.put(jobs)
    # then
    assert [(p.id, p.placed) for p in puts] == [(j.id, Placed.CREATED) for j in jobs]
    leases = worker.take(10)
    assert [lease.open().body for lease in leases] == [b"2", b"3", b"1"]
    assert worker.take(1) == []


def test_an_envelope_comes_back_as_it_was_put(broker: Broker, worker: LiveOwner) -> None:
    # case Q6 (types of bodies: unit/core/test_codec.py)
    given = job(
        "images",
        body=bytes(range(256)),
        timeout=2.5,
        key="k",
        tags=("a", "b"),
        headers={"trace": "1"},
        text="find me",
        created=1.5,
        result_ttl=9.0,
        signature=b"s",
    )
    broker.put([given])
    record = broker.get(given.id)
    assert record.envelope == given
    [lease] = worker.take()
    assert lease.open() == given
    assert (lease.attempt, lease.losses, lease.timeout) == (1, 0, 2.5)


def test_large_envelopes_that_are_put_together_come_back_whole(
    broker: Broker, worker: LiveOwner
) -> None:
    # given envelopes on both sides of 64 KiB
    given = [job(body=bytes([n]) * size) for n, size in enumerate((10, 70_000, 140_000))]
    # when
    broker.put(given)
    # then
    assert [lease.open() for lease in worker.take(3)] == given


def test_priority_comes_before_age(broker: Broker, worker: LiveOwner) -> None:
    # law 10, case T13
    low, high, middle = job(priority=-5), job(priority=100), job(priority=0)
    low_too = job(priority=-5)
    broker.put([low, high, middle, low_too])
    assert worker.take_ids() == ids_of([high, middle, low, low_too])


def test_queues_with_similar_names_stay_apart(broker: Broker, worker: LiveOwner) -> None:
    # case Q5
    names = ["q", "queue2", "a", "a.b", "a/b", "A"]
    for _ in range(3):
        broker.put([job(name) for name in names])
    for name in names:
        leases = worker.take(10, [name])
        assert [lease.open().queue for lease in leases] == [name] * 3
    assert sorted(row.name for row in broker.stats()) == sorted(names)


@pytest.mark.needs(Feature.IDS)
def test_an_id_is_unique_while_its_job_is_kept(broker: Broker, worker: LiveOwner) -> None:
    # case Q13, law 11
    broker.put([job(id="17")])
    with pytest.raises(DuplicateJob, match="'17'") as caught:
        broker.put([job(id="17")])
    assert caught.value.job_id == "17"
    worker.settle(worker.take()[0])
    with pytest.raises(DuplicateJob):  # a finished task keeps its id until it is pruned
        broker.put([job(id="17")])
    assert broker.delete(["17"]) == [True]
    assert broker.put([job(id="17")])[0].placed is Placed.CREATED


@pytest.mark.needs(Feature.IDS)
def test_the_id_of_a_message_is_free_after_its_ack(broker: Broker, consumer: LiveOwner) -> None:
    # case Q13, law 11
    broker.put([message(id="17")])
    with pytest.raises(DuplicateJob):
        broker.put([message(id="17")])
    assert consumer.settle(consumer.take()[0])
    assert broker.get("17") is None
    assert broker.put([message(id="17")])[0].placed is Placed.CREATED


@pytest.mark.parametrize("culprit", ["taken id", "twice in the batch", "rejected key", "full"])
def test_all_are_stored_or_none(broker: Broker, worker: LiveOwner, culprit: str) -> None:
    # law 3
    broker.put([job(id="taken"), job("other", id="keyed", key="k")])
    broker.set_queue("small", max_size=1)
    good = [job("new", id="one"), job("other", id="two", key="k", on_conflict="replace")]
    bad = {
        "taken id": [job(id="taken")],
        "twice in the batch": [job(id="one")],
        "rejected key": [job(key="k", on_conflict="reject")],
        "full": [job("small"), job("small")],
    }[culprit]
    # when
    with pytest.raises(QueueFull if culprit == "full" else DuplicateJob):
        broker.put([*good, *bad, job("new")])
    # then
    assert {r.envelope.id: r.state for r in everything(broker)} == {
        "taken": State.READY,
        "keyed": State.READY,
    }
    accepted = {row.name: row.accepted for row in broker.stats()}
    assert {name: n for name, n in accepted.items() if n} == {"default": 1, "other": 1}
    assert worker.take_ids(9, ["new", "small"]) == []


def test_the_sixth_of_five_is_refused_until_there_is_space(
    broker: Broker, worker: LiveOwner
) -> None:
    # case Q19, law 15
    broker.set_queue("default", max_size=5)
    broker.put([job(delay=60), *(job() for _ in range(4))])
    with pytest.raises(QueueFull, match="max_size=5"):
        broker.put([job()])
    [lease] = worker.take()  # a running job is still in the queue
    with pytest.raises(QueueFull):
        broker.put([job()])
    worker.settle(lease)
    assert broker.put([job()])[0].placed is Placed.CREATED
    broker.set_queue("default", max_size=0)
    broker.put([job() for _ in range(10)])


def test_in_a_full_queue_a_taken_id_is_named_first_and_replacing_needs_no_space(
    broker: Broker,
) -> None:
    broker.set_queue("default", max_size=2)
    broker.put([job(id="a", key="k"), job(id="b")])
    with pytest.raises(DuplicateJob):
        broker.put([job(id="b")])
    assert broker.put([job(id="c", key="k", on_conflict="replace")])[0].placed is Placed.REPLACED
    assert broker.put([job(id="d", key="k", on_conflict="merge")])[0].placed is Placed.MERGED


def test_wait_space_returns_when_a_job_ends(broker: Broker, worker: LiveOwner) -> None:
    # case Q19
    broker.set_queue("default", max_size=1)
    broker.put([job()])
    [lease] = worker.take()
    assert broker.wait_space("default", 0.05) is False
    assert broker.wait_space("never seen", 0) is True
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(broker.wait_space("default", 30)))
    thread.start()
    # when
    worker.settle(lease)
    thread.join(10)
    # then
    assert answers == [True]
    assert "never seen" not in [row.name for row in broker.stats()]


def test_a_delayed_job_becomes_ready_when_it_is_due_and_never_before(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case Q14, law 9
    late, soon = job(delay=200), job(delay=100)
    broker.put([late, soon])
    assert state(broker, late.id) is State.SCHEDULED
    reply = worker.exchange()
    assert 90 < reply.next_due < 101
    clock.advance(90)
    assert worker.take_ids() == []
    clock.advance(11)
    assert worker.take_ids() == [soon.id]
    clock.advance(100)
    assert worker.take_ids() == [late.id]
    assert worker.exchange().next_due == float("inf")


def test_at_is_wall_time_and_the_past_is_now(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case Q14
    past, future = job(at=clock.wall() - 5), job(at=clock.wall() + 100)
    broker.put([future, past])
    assert worker.take_ids() == [past.id]
    record = broker.get(future.id)
    assert record.due == pytest.approx(future.at, abs=0.01)
    clock.advance(101)
    assert worker.take_ids() == [future.id]


def test_a_thousand_due_at_one_instant_come_by_priority_then_age(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case Q14, case S2
    at = clock.wall() + 10
    jobs = [job(at=at, priority=n % 3) for n in range(1000)]
    broker.put(jobs)
    clock.advance(11)
    expected = sorted(range(1000), key=lambda n: (-(n % 3), n))
    assert worker.take_ids(1000) == [jobs[n].id for n in expected]


def test_a_job_that_becomes_due_takes_its_place_by_priority(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case S2: its sequence is from acceptance
    scheduled, urgent = job(delay=5), job(delay=5, priority=9)
    broker.put([scheduled, urgent])
    ready = job()
    broker.put([ready])
    clock.advance(6)
    assert worker.take_ids() == ids_of([urgent, scheduled, ready])


def test_a_job_not_started_in_time_expires(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    # case T14
    ready, scheduled, started = job(expires=10), job(expires=10, delay=20), job("now", expires=10)
    broker.put([ready, scheduled, started])
    [lease] = worker.take(1, ["now"])
    clock.advance(11)
    broker.tick()
    assert state(broker, ready.id) is State.EXPIRED
    assert state(broker, scheduled.id) is State.EXPIRED
    assert state(broker, started.id) is State.RUNNING  # it was started in time
    assert worker.settle(lease)
    assert state(broker, started.id) is State.SUCCEEDED
    assert worker.take_ids() == []
    assert sum(row.expired for row in broker.stats()) == 2


def test_a_job_given_back_after_its_time_expires(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case T14
    given = job(expires=10)
    broker.put([given])
    [lease] = worker.take()
    clock.advance(11)
    worker.settle(lease, Outcome.RELEASE)
    assert state(broker, given.id) is State.EXPIRED


def test_expiry_makes_space_for_a_put_with_no_worker_there(broker: Broker, clock: Clock) -> None:
    broker.set_queue("default", max_size=1)
    broker.put([job(expires=5, key="k")])
    clock.advance(6)
    assert broker.put([job(key="k")])[0].placed is Placed.CREATED
    check_counts(broker)


def test_setting_the_wall_clock_moves_nothing_but_at(
    broker: Broker, worker: LiveOwner, consumer: LiveOwner, clock: Clock
) -> None:
    # case Q9, law 19
    held, delayed, dated = message(ttr=30), job(delay=60), job(at=clock.wall() + 60)
    broker.put([held, delayed, dated])
    [lease] = consumer.take()
    for jump in (-3600, 1800):
        older = job()
        broker.put([older])
        clock.set_wall(jump)
        newer = job()
        broker.put([newer])
        broker.tick()
        # then: order holds, nothing fires early, no lease is lost, nobody is dead
        assert state(broker, delayed.id) is State.SCHEDULED
        assert state(broker, held.id) is State.RUNNING
        assert len(broker.owners()) == 2
        assert worker.take_ids() == ids_of([older, newer])
    assert consumer.settle(lease)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_want_of_nothing_takes_nothing(broker: Broker, worker: LiveOwner, mode: Mode) -> None:
    broker.put([job()])
    assert worker.take(0, mode=mode) == []
