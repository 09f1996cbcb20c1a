"""Another priority or queue for jobs that wait: ready, scheduled or waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from broker_driver import LiveOwner, ids_of, job, message, shown, state
from kinds import Clock
from test_contract_admin import in_every_state

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.core.envelope import JobLimit, LimitSettings, Links, rank_of
from tidemill.core.job import Outcome, State
from tidemill.core.retry import RetryPolicy
from tidemill.errors import QueueFull, StoreMoved

WAITS = (State.WAITING, State.SCHEDULED, State.READY)
URGENT = rank_of(9)

pytestmark = pytest.mark.needs(Feature.ALTER)


def sizes(broker: Broker) -> dict[str, int]:
    return {row.name: row.size for row in broker.stats()}


@pytest.fixture(params=["rank", "queue", "both"])
def change(request: pytest.FixtureRequest) -> dict[str, Any]:
    whole = {"rank": URGENT, "queue": "other"}
    return whole if request.param == "both" else {request.param: whole[request.param]}


def test_only_a_job_that_waits_is_altered(
    broker: Broker, worker: LiveOwner, clock: Clock, change: dict[str, Any]
) -> None:
    # law 3
    ids = in_every_state(broker, worker, clock)
    before = {s: shown(broker, ids[s]) for s in State}
    for s in State:
        assert broker.alter([ids[s]], **change) == [s in WAITS], s
        record, old = shown(broker, ids[s]), before[s]
        assert record.state is s
        assert record.seq == old.seq  # law 10
        assert record.due == pytest.approx(old.due)
        altered = change if s in WAITS else {}
        assert record.rank == altered.get("rank", old.rank), s
        assert record.envelope.queue == altered.get("queue", "default"), s
    assert broker.alter(["unknown", ""], **change) == [False, False]


def test_a_job_keeps_its_place_among_jobs_of_its_new_priority_and_queue(broker: Broker) -> None:
    # law 10
    a, b, c = job("one"), job("two"), job("two", priority=3)
    d, e = job("one"), job("two", priority=3)
    broker.put([a, b, c, d, e])
    # when: the first goes to the other queue, and the second last becomes as urgent as the last
    assert broker.alter([a.id], queue="two") == [True]
    assert broker.alter([d.id], rank=rank_of(3), queue="two") == [True]
    # then
    worker = LiveOwner(broker)
    assert worker.take_ids(9, ["one"]) == []
    assert worker.take_ids(9, ["two"]) == ids_of([c, d, e, a, b])


@pytest.mark.parametrize("queue", ["b", "é" * 16, "q" * 31, "q" * 32, "q" * 200])
def test_all_else_in_the_envelope_stays(broker: Broker, worker: LiveOwner, queue: str) -> None:
    given = job(
        "a" * 40,
        id="i" * 120,
        body=bytes(range(256)),
        created=12.5,
        timeout=3.25,
        tags=("x", "y"),
        headers={"h": "é"},
        text="args",
        signature=b"\xc1\x00",
        retries=0,
    )
    given.retries = RetryPolicy(limit=2, delay=0.5)
    broker.put([given])
    assert broker.alter([given.id], queue=queue) == [True]
    [lease] = worker.take(1, [queue])
    assert lease.open() == msgspec.structs.replace(given, queue=queue)
    assert sizes(broker) == {"a" * 40: 0, queue: 1}


def test_a_job_leased_meanwhile_is_refused(broker: Broker, worker: LiveOwner) -> None:
    # law 4
    given = job("a")
    broker.put([given])
    [lease] = worker.take()
    assert broker.alter([given.id], rank=URGENT, queue="b") == [False]
    assert worker.settle(lease, Outcome.RETRY, delay=0)
    assert shown(broker, given.id).envelope.queue == "a"
    # but between two attempts it waits
    assert broker.alter([given.id], queue="b") == [True]
    [again] = worker.take(1, ["b"])
    assert (again.open().id, again.attempt) == (given.id, 2)
    assert [a.number for a in shown(broker, given.id).attempts] == [1]


def test_a_change_of_nothing_succeeds_and_leaves_no_trace(broker: Broker) -> None:
    given = job("a")
    broker.put([given])
    assert broker.alter([given.id, given.id], rank=URGENT) == [True, True]
    assert broker.alter([given.id], rank=URGENT, queue="a") == [True]
    assert [line for _, line in shown(broker, given.id).log] == ["altered: priority 9"]
    assert broker.alter([given.id], rank=rank_of(-2.5), queue="b") == [True]
    assert shown(broker, given.id).log[-1][1] == "altered: queue b, priority -2.5"


def test_a_full_queue_takes_no_more_and_a_job_that_leaves_makes_room(
    broker: Broker, worker: LiveOwner
) -> None:
    # law 15
    broker.set_queue("small", max_size=2)
    jobs = [job("large") for _ in range(3)]
    broker.put(jobs)
    # when
    assert broker.alter(ids_of(jobs), rank=URGENT, queue="small") == [True, True, False]
    # then the last is unchanged, in both respects
    record = shown(broker, jobs[2].id)
    assert (record.envelope.queue, record.rank) == ("large", jobs[2].rank)
    assert sizes(broker) == {"large": 1, "small": 2}
    assert broker.alter([jobs[0].id], rank=0) == [True]  # within a full queue
    with pytest.raises(QueueFull):
        broker.put([job("small")])
    # and when one leaves
    assert broker.alter([jobs[0].id], queue="large") == [True]
    assert broker.wait_space("small", 0)
    broker.put([job("small")])


@pytest.mark.needs(Feature.FLOWS)
def test_a_job_that_waits_for_others_needs_no_room(broker: Broker, worker: LiveOwner) -> None:
    # law 15, as for a put
    broker.set_queue("small", max_size=1)
    last = job("large", id="z", links=Links(waits="success"))
    broker.put([last, job("large", id="a", links=Links(next=("z",))), job("small")])
    assert broker.alter(["a", "z"], queue="small") == [False, True]
    assert sizes(broker) == {"large": 1, "small": 2}
    # when the job before it has ended
    [lease] = worker.take(1, ["large"])
    assert worker.settle(lease)
    assert state(broker, "z") is State.READY
    assert len(worker.take_ids(9, ["small"])) == 2


def test_a_paused_queue_holds_what_comes(broker: Broker, worker: LiveOwner) -> None:
    broker.set_queue("paused", paused=True)
    given = job("a")
    broker.put([given])
    assert broker.alter([given.id], queue="paused") == [True]
    assert worker.take_ids() == []
    assert broker.alter([given.id], queue="a") == [True]
    assert worker.take_ids() == [given.id]


def test_a_scheduled_job_keeps_its_time_and_its_expiry(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # law 9
    late, gone = job("a", delay=100), job("a", delay=1000, expires=200)
    broker.put([late, gone])
    assert broker.alter([late.id, gone.id], rank=URGENT, queue="b") == [True, True]
    assert worker.take_ids() == []
    clock.advance(101)
    assert worker.take_ids(9, ["b"]) == [late.id]
    clock.advance(100)
    broker.tick()
    assert state(broker, gone.id) is State.EXPIRED
    assert {row.name: row.expired for row in broker.stats()} == {"a": 0, "b": 1}


def test_a_successor_stays_behind_its_key(broker: Broker, worker: LiveOwner) -> None:
    # law 12
    broker.put([job("a", id="first", key="k")])
    [lease] = worker.take()
    broker.put([job("a", id="second", key="k", on_conflict="replace")])
    assert broker.alter(["second"], queue="b") == [True]
    assert state(broker, "second") is State.WAITING
    assert broker.put([job("a", key="k")])[0].id == "first"
    assert worker.settle(lease)
    assert worker.take_ids(9, ["b"]) == ["second"]
    # and a ready job with a key keeps it
    broker.put([job("a", id="third", key="l")])
    assert broker.alter(["third"], queue="b") == [True]
    assert broker.put([job("a", key="l")])[0].id == "third"


def test_messages_move_as_tasks_do(broker: Broker, consumer: LiveOwner) -> None:
    first, second = message("a"), message("b")
    broker.put([first, second])
    assert broker.alter([second.id], rank=URGENT, queue="a") == [True]
    assert consumer.take_ids(9, ["a"]) == [second.id, first.id]


@pytest.mark.needs("a witness")
def test_a_suspect_stays_alone(broker: Broker) -> None:
    # law 6
    given = [job("a"), job("a")]
    broker.put(given)
    gone = LiveOwner(broker, "gone")
    gone.take(2)
    broker.release(gone.id, None)
    assert broker.alter(ids_of(given), queue="b") == [True, True]
    worker = LiveOwner(broker)
    assert worker.exchange(want=Want(5, ("b",), alone=False)).leases == []
    [lease] = worker.take(5, ["b"])
    assert (lease.open().id, lease.losses) == (given[0].id, 1)


@pytest.mark.needs(Feature.LIMITS)
def test_limits_hold_in_the_new_queue(broker: Broker) -> None:
    # law 13
    one = JobLimit("api", "k", 1.0, LimitSettings(concurrency=1))
    jobs = [job("a", id=f"j{n}", limit=one) for n in range(3)]
    plain = [job("a", id=f"p{n}") for n in range(2)]
    broker.put([*jobs, *plain])
    with_limits(broker, "").set_limit("b", LimitSettings(concurrency=1), queue=True)
    worker = LiveOwner(broker)
    [lease] = worker.take(1, ["a"])
    assert lease.open().id == "j0"
    # when: the key is busy
    assert broker.alter(["j1", "p0", "p1"], queue="b") == [True, True, True]
    assert worker.take_ids(9, ["b"]) == ["p0"]  # the queue has one place
    assert worker.settle(lease)
    # then the key goes on in the queue where its next job is
    assert worker.take_ids(9, ["b"]) == []
    assert worker.take_ids(9, ["a"]) == ["j2"]
    assert broker.alter(["j1"], queue="a") == [True]
    assert worker.take_ids(9, ["a"]) == []


def test_a_purge_finds_what_has_come(broker: Broker, worker: LiveOwner) -> None:
    ready, late, low = job("a"), job("a", delay=1000), job("a", priority=-3)
    broker.put([ready, late, low])
    assert broker.alter(ids_of([ready, late, low]), queue="b") == [True] * 3
    assert delete_waiting(broker, "a") == 0
    assert delete_waiting(broker, "b") == 3
    assert worker.take_ids() == []


@pytest.mark.needs("commands")
def test_a_sleeper_of_the_new_queue_wakes(broker: Broker, worker: LiveOwner) -> None:
    # law 9
    given = job("a")
    broker.put([given])
    assert worker.exchange(want=Want(1, ("b",))).leases == []
    assert broker.alter([given.id], queue="b") == [True]
    began = time.monotonic()
    broker.wait(worker.id, 60)
    assert time.monotonic() - began < 30
    assert worker.take_ids(1, ["b"]) == [given.id]


@pytest.mark.needs(Feature.MOVE)
def test_a_store_that_departs_alters_nothing(
    broker: Broker, need: Callable[[Feature], None]
) -> None:
    given = job("a")
    broker.put([given])
    broker.depart("redis://elsewhere")
    with pytest.raises(StoreMoved):
        broker.alter([given.id], queue="b")
    broker.stay()
    assert broker.alter([given.id], queue="b") == [True]
