"""Keys: at most one unfinished job, plus one successor while it runs (law 12)."""

from __future__ import annotations

import pytest
from broker_driver import LiveOwner, everything, job, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.core.envelope import rank_of
from tidemill.core.job import Outcome, Placed, Put, State
from tidemill.errors import DuplicateJob


def put(broker: Broker, id: str, **fields: object) -> Put:
    fields.setdefault("key", "k")
    return broker.put([job(id=id, **fields)])[0]


def unfinished(broker: Broker) -> dict[str, State]:
    return {r.envelope.id: r.state for r in everything(broker) if not r.state.finished}


@pytest.mark.parametrize("delay", [0, 60])
def test_keep_returns_the_job_that_is_there(broker: Broker, delay: float) -> None:
    put(broker, "a", delay=delay)
    assert put(broker, "b", on_conflict="keep") == Put("a", Placed.KEPT)
    assert list(unfinished(broker)) == ["a"]
    assert broker.stats()[0].accepted == 1


def test_keep_while_it_runs(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a")
    worker.take()
    assert put(broker, "b", on_conflict="keep") == Put("a", Placed.KEPT)


def test_reject_raises_while_it_is_unfinished(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a")
    with pytest.raises(DuplicateJob, match="'k'"):
        put(broker, "b", on_conflict="reject")
    [lease] = worker.take()
    with pytest.raises(DuplicateJob):
        put(broker, "b", on_conflict="reject")
    worker.settle(lease)
    assert put(broker, "b", on_conflict="reject").placed is Placed.CREATED


@pytest.mark.parametrize("delay", [0, 60])
def test_replace_takes_the_newest_data_and_time(
    broker: Broker, worker: LiveOwner, delay: float
) -> None:
    put(broker, "a", body=b"old", delay=delay)
    assert put(broker, "b", body=b"new", on_conflict="replace", delay=30) == Put(
        "b", Placed.REPLACED
    )
    assert unfinished(broker) == {"b": State.SCHEDULED}
    record = broker.get("a")
    assert (record.state, record.error) == (State.CANCELLED, "replaced by b")
    assert worker.take() == []


def test_replace_of_a_running_job_becomes_its_successor(broker: Broker, worker: LiveOwner) -> None:
    # case S1
    put(broker, "a")
    [lease] = worker.take()
    assert put(broker, "b", on_conflict="replace") == Put("b", Placed.SUCCESSOR)
    assert unfinished(broker) == {"a": State.RUNNING, "b": State.WAITING}
    assert worker.take() == []
    # a newer successor takes the place of the older one
    assert put(broker, "c", on_conflict="replace") == Put("c", Placed.SUCCESSOR)
    assert unfinished(broker) == {"a": State.RUNNING, "c": State.WAITING}
    assert state(broker, "b") is State.CANCELLED
    # when the first ends, the successor may run
    worker.settle(lease)
    assert worker.take_ids() == ["c"]
    assert put(broker, "d").placed is Placed.KEPT


@pytest.mark.parametrize("end", ["settle", "fail", "delete", "reap"])
def test_a_successor_comes_after_every_end(broker: Broker, worker: LiveOwner, end: str) -> None:
    put(broker, "a", retries=0)
    [lease] = worker.take()
    put(broker, "b", on_conflict="replace", delay=0)
    if end == "settle":
        worker.settle(lease)
    elif end == "fail":
        worker.settle(lease, Outcome.RETRY)
    elif end == "delete":
        broker.delete(["a"])
    else:
        broker.release(worker.id, {lease.token: "killed"})
    assert unfinished(broker) == {"b": State.READY}


def test_a_delayed_successor_waits_for_both(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    put(broker, "a")
    [lease] = worker.take()
    put(broker, "b", on_conflict="replace", delay=10)
    clock.advance(4)
    worker.settle(lease)
    assert state(broker, "b") is State.SCHEDULED
    clock.advance(6.1)
    assert worker.take_ids() == ["b"]


def test_a_retry_runs_before_the_successor(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a")
    [lease] = worker.take()
    put(broker, "b", on_conflict="replace")
    worker.settle(lease, Outcome.RETRY)
    assert unfinished(broker) == {"a": State.READY, "b": State.WAITING}
    [again] = worker.take(9)
    assert again.open().id == "a"
    worker.settle(again)
    assert worker.take_ids() == ["b"]


def test_replace_between_two_runs_leaves_the_newest_alone(
    broker: Broker, worker: LiveOwner
) -> None:
    # law 12: neither the job that goes back nor its successor is the newest any more
    put(broker, "a")
    [lease] = worker.take()
    put(broker, "b", on_conflict="replace")
    worker.settle(lease, Outcome.RETRY, delay=60)
    assert put(broker, "c", on_conflict="replace") == Put("c", Placed.REPLACED)
    assert unfinished(broker) == {"c": State.READY}
    [taken] = worker.take()
    worker.settle(taken)
    assert unfinished(broker) == {}
    assert put(broker, "d").placed is Placed.CREATED


@pytest.mark.parametrize("how", ["cancel", "delete", "expire"])
def test_a_successor_that_goes_leaves_the_first_its_key(
    broker: Broker, worker: LiveOwner, clock: Clock, how: str
) -> None:
    put(broker, "a")
    [lease] = worker.take()
    put(broker, "b", on_conflict="replace", expires=5)
    if how == "expire":
        clock.advance(6)
        broker.tick()
    else:
        assert getattr(broker, how)(["b"]) == [True]
    assert unfinished(broker) == {"a": State.RUNNING}
    assert put(broker, "c").placed is Placed.KEPT
    worker.settle(lease)
    assert put(broker, "c").placed is Placed.CREATED


def test_merge_takes_the_higher_priority_and_the_earlier_time(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case S1
    put(broker, "a", body=b"old", priority=1, delay=100, on_conflict="merge")
    assert put(broker, "b", priority=-5, delay=50, on_conflict="merge") == Put("a", Placed.MERGED)
    put(broker, "c", priority=7, delay=80, on_conflict="merge")
    record = broker.get("a")
    assert record.rank == rank_of(7)
    assert record.envelope.body == b"old"
    assert unfinished(broker) == {"a": State.SCHEDULED}
    clock.advance(50.1)
    assert worker.take_ids() == ["a"]


def test_merge_may_make_a_scheduled_job_ready(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a", delay=100)
    other = job()
    broker.put([other])
    put(broker, "b", on_conflict="merge", priority=1)
    assert worker.take_ids() == ["a", other.id]
    assert broker.stats()[0].size == 2


def test_merge_never_delays_a_ready_job(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a")
    put(broker, "b", on_conflict="merge", delay=100, priority=-9)
    assert worker.take_ids() == ["a"]


def test_merge_changes_nothing_of_a_running_job(broker: Broker, worker: LiveOwner) -> None:
    # case S1
    put(broker, "a")
    [lease] = worker.take()
    before = broker.get("a")
    assert put(broker, "b", on_conflict="merge", priority=50) == Put("a", Placed.KEPT)
    assert broker.get("a") == before
    worker.settle(lease)
    assert unfinished(broker) == {}


def test_keys_within_one_batch(broker: Broker) -> None:
    # law 12
    puts = broker.put(
        [
            job(id="a", key="k"),
            job(id="b", key="k"),
            job(id="c", key="k", on_conflict="replace"),
            job(id="d", key="k", on_conflict="merge", priority=3),
            job(id="e", key="other", on_conflict="reject"),
        ]
    )
    placed = [Placed.CREATED, Placed.KEPT, Placed.REPLACED, Placed.MERGED, Placed.CREATED]
    assert [p.placed for p in puts] == placed
    assert [p.id for p in puts] == ["a", "a", "c", "c", "e"]
    assert unfinished(broker) == {"c": State.READY, "e": State.READY}


def test_keys_are_not_ids_and_span_queues(broker: Broker) -> None:
    put(broker, "a", key="b", queue="one")
    assert put(broker, "b", key="a").placed is Placed.CREATED
    assert put(broker, "c", key="b", queue="two").placed is Placed.KEPT


def test_an_expired_job_gives_up_its_key(broker: Broker, clock: Clock) -> None:
    put(broker, "a", expires=5)
    clock.advance(6)
    assert put(broker, "b").placed is Placed.CREATED
    assert state(broker, "a") is State.EXPIRED
