"""Keys for a time: throttled, debounced with an end, and the last while one runs (law 12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from broker_driver import LiveOwner, job, message, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.core.envelope import Unique, rank_of
from tidemill.core.job import Outcome, Placed, Put, State
from tidemill.errors import DuplicateJob


@pytest.fixture(autouse=True)
def _keys_for_a_time(need: Callable[[Feature], None]) -> None:
    need(Feature.UNIQUE)


def put(broker: Broker, id: str, period: float = 0.0, max_wait: float = 0.0, **fields: Any) -> Put:
    unique = Unique(period, max_wait) if period or max_wait else None
    fields.setdefault("key", "k")
    return broker.put([job(id=id, unique=unique, **fields)])[0]


def run(broker: Broker, worker: LiveOwner, outcome: Outcome = Outcome.SUCCESS) -> None:
    [lease] = worker.take(9)
    assert worker.settle(lease, outcome)


# -- throttled -----------------------------------------------------------------------------------


def test_a_key_is_held_for_a_period_by_a_job_that_has_succeeded(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # law 12
    put(broker, "a", period=60)
    clock.advance(15)
    run(broker, worker)
    # the period runs from the first put, and whoever comes meanwhile does not lengthen it
    clock.advance(15)
    assert put(broker, "b", period=60) == Put("a", Placed.KEPT)
    assert put(broker, "c") == Put("a", Placed.KEPT)
    with pytest.raises(DuplicateJob, match=r"has the key 'k' already: .* hold="):
        put(broker, "d", on_conflict="reject")
    assert worker.take(9) == []
    clock.advance(31)
    assert put(broker, "e", period=60) == Put("e", Placed.CREATED)
    assert broker.get("b") is None


def test_a_put_merges_while_the_job_waits_and_changes_nothing_after_its_success(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    merging: dict[str, Any] = {"period": 60, "on_conflict": "merge"}
    put(broker, "a", priority=1, **merging)
    assert put(broker, "b", priority=5, **merging) == Put("a", Placed.MERGED)
    [lease] = worker.take(9)
    assert (lease.open().id, lease.rank) == ("a", rank_of(5))
    assert put(broker, "c", priority=9, **merging) == Put("a", Placed.KEPT)
    assert worker.settle(lease)
    assert put(broker, "d", **merging) == Put("a", Placed.KEPT)
    clock.advance(61)
    assert put(broker, "e", **merging) == Put("e", Placed.CREATED)


def test_an_unfinished_job_has_its_key_beyond_the_period(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    put(broker, "a", period=10)
    clock.advance(11)
    assert put(broker, "b", period=10) == Put("a", Placed.KEPT)
    run(broker, worker)
    assert put(broker, "c", period=10) == Put("c", Placed.CREATED)


@pytest.mark.parametrize("end", ["fail", "cancel", "expire", "delete", "delete later"])
def test_only_a_success_holds_the_key(
    broker: Broker, worker: LiveOwner, clock: Clock, end: str
) -> None:
    put(broker, "a", period=60, expires=5 if end == "expire" else 0)
    if end == "fail":
        run(broker, worker, Outcome.FAIL)
    elif end == "expire":
        clock.advance(6)
        broker.tick()
    elif end == "delete later":
        run(broker, worker)
        assert broker.delete(["a"]) == [True]
    else:
        assert getattr(broker, end)(["a"]) == [True]
    assert put(broker, "b", period=60) == Put("b", Placed.CREATED)


def test_a_failed_job_gets_its_key_back_only_when_it_is_free(
    broker: Broker, worker: LiveOwner
) -> None:
    put(broker, "a", period=60)
    run(broker, worker, Outcome.FAIL)
    put(broker, "b", period=60)
    run(broker, worker)
    assert broker.retry(["a"]) == [False]
    broker.delete(["b"])
    assert broker.retry(["a"]) == [True]
    run(broker, worker)
    assert put(broker, "c") == Put("c", Placed.CREATED)  # the period was that of its first life


def test_a_key_is_held_though_the_job_is_no_longer_kept(broker: Broker, clock: Clock) -> None:
    consumer = LiveOwner(broker, "c", kind="consumer")
    unique = Unique(period=60)
    first = message(id="a", key="k", unique=unique)
    broker.put([first])
    run(broker, consumer)  # acknowledged: forgotten
    assert broker.get("a") is None
    assert broker.put([message(id="a", key="k")]) == [Put("a", Placed.KEPT)]
    assert broker.get("a") is None
    clock.advance(61)
    broker.tick()
    assert broker.put([message(id="a", key="k")]) == [Put("a", Placed.CREATED)]


def test_held_keys_go_in_their_time(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    # law 15
    for number in range(30):
        put(broker, f"a{number}", period=[10, 20, 4000][number % 3], key=f"k{number}")
    for lease in worker.take(30):
        worker.settle(lease)
    assert worker.exchange().next_due == float("inf")  # nobody wakes for that
    clock.advance(400)
    broker.tick()
    kept = [put(broker, f"b{n}", key=f"k{n}").placed is Placed.KEPT for n in range(30)]
    assert kept == [number % 3 == 2 for number in range(30)]


def test_a_held_key_and_others_of_one_batch(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a", period=60)
    run(broker, worker)
    broker.set_queue("default", max_size=1)
    fields: dict[str, Any] = {"on_conflict": "replace"}
    puts = broker.put([job(id="b", key="k"), job(id="c", key="k", **fields), job(id="d")])
    assert [(p.id, p.placed) for p in puts] == [
        ("a", Placed.KEPT),
        ("a", Placed.KEPT),  # there is nothing to replace
        ("d", Placed.CREATED),
    ]
    with pytest.raises(DuplicateJob):
        broker.put([job(id="e", key="k", on_conflict="reject")])


def test_a_follower_is_kept_off_too(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a", period=60)
    run(broker, worker)
    put(broker, "other", key="")
    [lease] = worker.take(1)
    followers = [job(id="b", key="k"), job(id="c", key="k", on_conflict="reject")]
    assert worker.settle(lease, followers=tuple(followers))
    assert worker.take(9) == []
    assert broker.get("b") is broker.get("c") is None


def test_the_next_in_line_takes_a_key_over_at_once(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a", period=60)
    [lease] = worker.take(1)
    assert put(broker, "b", on_conflict="replace").placed is Placed.SUCCESSOR
    worker.settle(lease)
    assert state(broker, "b") is State.READY
    run(broker, worker)
    assert put(broker, "c").placed is Placed.CREATED


def test_a_period_goes_over_to_the_next_in_line(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a", period=60)
    [lease] = worker.take(1)
    assert put(broker, "b", period=60, on_conflict="replace").placed is Placed.SUCCESSOR
    worker.settle(lease)
    run(broker, worker)
    assert put(broker, "c") == Put("b", Placed.KEPT)


# -- debounced -----------------------------------------------------------------------------------


def debounce(broker: Broker, id: str, delay: float, max_wait: float = 250.0) -> Placed:
    return put(broker, id, max_wait=max_wait, delay=delay, on_conflict="replace").placed


def test_a_put_moves_the_time_on_but_not_for_ever(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # law 12
    assert debounce(broker, "a", 100) is Placed.CREATED
    clock.advance(80)
    assert debounce(broker, "b", 100) is Placed.REPLACED
    clock.advance(80)
    assert worker.take(1) == []
    assert debounce(broker, "c", 100) is Placed.REPLACED  # at 160 s: due at 250, not at 260
    clock.advance(80)
    assert worker.take(1) == []
    clock.advance(10.1)
    assert worker.take_ids(1) == ["c"]


def test_the_next_burst_has_its_own_time(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    debounce(broker, "a", 100, max_wait=120)
    clock.advance(101)
    [lease] = worker.take(1)
    assert debounce(broker, "b", 100, max_wait=120) is Placed.SUCCESSOR
    clock.advance(50)
    assert debounce(broker, "c", 100, max_wait=120) is Placed.SUCCESSOR
    worker.settle(lease)
    clock.advance(60)
    assert worker.take(1) == []
    clock.advance(10.1)
    [lease] = worker.take(1)
    assert lease.open().id == "c"
    worker.settle(lease)
    assert debounce(broker, "d", 100, max_wait=120) is Placed.CREATED
    clock.advance(90)
    assert worker.take(1) == []
    clock.advance(10.1)
    assert worker.take_ids(1) == ["d"]


def test_a_replacement_after_max_wait_is_ready_at_once(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    debounce(broker, "a", 100, max_wait=50)
    assert state(broker, "a") is State.SCHEDULED
    clock.advance(40)
    debounce(broker, "b", 100, max_wait=30)
    assert worker.take_ids(1) == ["b"]


# -- the last while one runs ---------------------------------------------------------------------


def test_of_all_successors_during_a_run_the_last_runs(broker: Broker, worker: LiveOwner) -> None:
    put(broker, "a", on_conflict="replace")
    [lease] = worker.take(1)
    for name in "bcd":
        assert put(broker, name, on_conflict="replace").placed is Placed.SUCCESSOR
    worker.settle(lease)
    assert worker.take_ids(9) == ["d"]
    assert [state(broker, name) for name in "bc"] == [State.CANCELLED] * 2
