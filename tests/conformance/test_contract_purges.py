"""A purge that keeps its jobs, and the way back: as they were, and only once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, everything, ids_of, job, message, state
from kinds import Clock

from tidemill.brokers.contract.admin import KeptPurge
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.core.envelope import Links
from tidemill.core.errors import InvalidOption
from tidemill.core.job import Outcome, Placed, Put, RunOn, State
from tidemill.core.purge_mark import is_of_purge

READY, SCHEDULED, WAITING = State.READY, State.SCHEDULED, State.WAITING
CANCELLED, RUNNING = State.CANCELLED, State.RUNNING


@pytest.fixture(autouse=True)
def keeps(need: Callable[[Feature], None]) -> None:
    need(Feature.RESTORE)


def row_of(broker: Broker, queue: str = "q") -> QueueStats:
    return next(row for row in broker.stats() if row.name == queue)


def purged_ids(broker: Broker, purge_id: str = "p1") -> list[str]:
    """The jobs of a purge, as a restore finds them."""
    found = everything(broker, Filter(states=frozenset({CANCELLED})))
    return [r.envelope.id for r in found if is_of_purge(r.error, purge_id)]


def restore_all(broker: Broker, purge_id: str = "p1") -> list[bool]:
    return broker.restore(purged_ids(broker, purge_id), purge_id)


def in_state(broker: Broker, *ids: str) -> list[State]:
    return [state(broker, job_id) for job_id in ids]


def test_a_purge_takes_all_jobs_out_of_the_queue_and_a_restore_brings_them_back(
    broker: Broker, worker: LiveOwner, consumer: LiveOwner
) -> None:
    given = [job("q"), job("q", delay=1000.0), message("q"), message("q", delay=1000.0), job("a")]
    broker.put(given)
    running = job("q")
    broker.put([running])
    ids = ids_of(given)

    worker.take(1, ["a"])
    assert broker.purge_kept("q", "p1") == KeptPurge(5)
    assert in_state(broker, *ids[:4]) == [CANCELLED] * 4
    assert worker.take(5, ["q"]) == consumer.take(5, ["q"]) == []

    assert restore_all(broker) == [True] * 5
    assert in_state(broker, *ids[:4]) == [READY, SCHEDULED, READY, SCHEDULED]
    assert worker.take_ids(5, ["q"]) == [ids[0], running.id]
    assert consumer.take_ids(5, ["q"]) == [ids[2]]
    assert restore_all(broker) == []


def test_a_purge_that_keeps_leaves_running_and_finished_jobs(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put([job("q", id="done"), job("q", id="runs"), job("q", id="ready")])
    done, runs = worker.take(2)
    worker.settle(done, result=b"x")
    assert broker.purge_kept("q", "p1") == KeptPurge(1)
    assert in_state(broker, "done", "runs", "ready") == [State.SUCCEEDED, RUNNING, CANCELLED]
    assert worker.settle(runs)
    assert broker.purge_kept("q", "p2") == KeptPurge(0)
    assert broker.purge_kept("never seen", "p2") == KeptPurge(0)


@pytest.mark.needs("a retry keeps its place")
def test_restored_jobs_keep_priority_order_and_attempts(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job("q", id="low", priority=-5), job("q", id="tried", priority=9)])
    broker.put([job("q", id=f"{n}") for n in range(3)])
    [lease] = worker.take(1, ["q"])
    assert worker.settle(lease, Outcome.RETRY, error="no", delay=0.0)
    before = {
        r.envelope.id: (r.seq, r.rank, r.attempt, len(r.attempts)) for r in everything(broker)
    }

    broker.purge_kept("q", "p1")
    broker.put([job("q", id="new")])
    assert restore_all(broker) == [True] * 5

    after = {r.envelope.id: (r.seq, r.rank, r.attempt, len(r.attempts)) for r in everything(broker)}
    assert {name: after[name] for name in before} == before
    leases = worker.take(6, ["q"])
    assert [(lease.open().id, lease.attempt) for lease in leases] == [
        *[("tried", 2), ("0", 1), ("1", 1), ("2", 1), ("new", 1), ("low", 1)]
    ]


def test_a_scheduled_job_keeps_its_due_time(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker.put([job("q", id="soon", delay=10.0), job("q", id="later", delay=1000.0)])
    due = broker.get("later").due
    broker.purge_kept("q", "p1")
    clock.advance(20.0)
    broker.tick()
    assert worker.take_ids(5, ["q"]) == []

    assert restore_all(broker) == [True, True]

    assert broker.get("later").due == pytest.approx(due, abs=0.01)
    assert worker.take_ids(5, ["q"]) == ["soon"]
    clock.advance(981.0)
    assert worker.take_ids(5, ["q"]) == ["later"]


def test_a_restored_job_still_expires(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker.put([job("q", id="first", expires=30.0), job("q", id="second", expires=3000.0)])
    broker.purge_kept("q", "p1")
    clock.advance(60.0)
    broker.tick()
    assert in_state(broker, "first", "second") == [CANCELLED, CANCELLED]
    assert restore_all(broker) == [True, True]
    broker.tick()
    assert in_state(broker, "first", "second") == [State.EXPIRED, READY]
    clock.advance(3000.0)
    broker.tick()
    assert state(broker, "second") is State.EXPIRED


def test_only_the_jobs_of_this_purge_come_back(broker: Broker) -> None:
    broker.put([job("q", id="one"), job("q", id="cancelled")])
    broker.cancel(["cancelled"])
    broker.purge_kept("q", "p1")
    broker.put([job("q", id="two")])
    broker.purge_kept("q", "p2")

    ids = ["one", "two", "cancelled", "unknown", ""]
    assert broker.restore(ids, "p2") == [False, True, False, False, False]
    assert in_state(broker, "one", "two", "cancelled") == [CANCELLED, READY, CANCELLED]
    assert broker.restore(ids, "p") == broker.restore(ids, "") == [False] * 5
    assert broker.restore(["two", "one", "one"], "p1") == [False, True, False]
    with pytest.raises(InvalidOption, match="the id of a purge"):
        broker.purge_kept("q", "no id")
    assert in_state(broker, "one", "two") == [READY, READY]


@pytest.mark.needs(Feature.KEYS)
def test_a_key_that_another_job_has_taken_stays_with_it(broker: Broker, worker: LiveOwner) -> None:
    # law 12
    broker.put([job("q", id="a", key="k"), job("q", id="b", key="free"), job("q", id="c")])
    broker.purge_kept("q", "p1")
    assert broker.put([job("q", id="new", key="k")]) == [Put("new", Placed.CREATED)]

    assert broker.restore(["a", "b", "c"], "p1") == [False, True, True]

    assert in_state(broker, "a", "b", "c") == [CANCELLED, READY, READY]
    assert broker.put([job("q", key="free")]) == [Put("b", Placed.KEPT)]
    # once the key is free again, the job can come back
    assert broker.cancel(["new"]) == [True]
    assert broker.restore(["a"], "p1") == [True]
    assert broker.put([job("q", key="k")]) == [Put("a", Placed.KEPT)]
    assert sorted(worker.take_ids(5)) == ["a", "b", "c"]


@pytest.mark.needs(Feature.KEYS)
def test_a_successor_comes_back_once_its_key_is_free(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job("q", id="runs", key="k")])
    [lease] = worker.take()
    assert broker.put([job("q", id="next", key="k", on_conflict="replace")])[0].id == "next"
    assert state(broker, "next") is WAITING
    assert broker.purge_kept("q", "p1") == KeptPurge(1)
    assert broker.restore(["next"], "p1") == [False]
    assert worker.settle(lease)
    assert broker.restore(["next"], "p1") == [True]
    assert worker.take_ids() == ["next"]


def put_flow(broker: Broker, first: str, last: str, waits: RunOn = RunOn.SUCCESS) -> None:
    """Put a chain of two jobs, into two queues."""
    behind = job(last, id="last", links=Links((), waits=waits, inputs=("first",)))
    broker.put([behind, job(first, id="first", links=Links(("last",)))])


@pytest.mark.needs(Feature.FLOWS)
def test_a_purged_flow_comes_back_as_a_flow(broker: Broker, worker: LiveOwner) -> None:
    put_flow(broker, "q", "q")
    assert broker.purge_kept("q", "p1") == KeptPurge(2)
    assert in_state(broker, "first", "last") == [CANCELLED, CANCELLED]
    assert len(purged_ids(broker)) == 2  # the purge of a job does not drop the jobs behind it
    # when the job that was put last is restored first
    assert purged_ids(broker) == ["first", "last"]
    assert restore_all(broker) == [True, True]
    # then
    assert in_state(broker, "first", "last") == [READY, WAITING]
    [lease] = worker.take()
    assert worker.settle(lease, result=b"one")
    [lease] = worker.take()
    assert [(one.id, one.result) for one in lease.inputs] == [("first", b"one")]


@pytest.mark.needs(Feature.FLOWS)
def test_jobs_behind_a_purged_job_wait_again_when_it_is_restored(
    broker: Broker, worker: LiveOwner
) -> None:
    # given a chain whose head alone is purged
    put_flow(broker, "q", "other")
    assert broker.purge_kept("q", "p1") == KeptPurge(1)
    assert in_state(broker, "first", "last") == [CANCELLED, CANCELLED]
    assert "job first was cancelled" in broker.get("last").error
    # when
    assert restore_all(broker) == [True]
    # then
    assert in_state(broker, "first", "last") == [READY, WAITING]
    for name in ("first", "last"):
        [lease] = worker.take()
        assert lease.open().id == name
        assert worker.settle(lease)


@pytest.mark.needs(Feature.FLOWS)
@pytest.mark.parametrize("well", [True, False])
@pytest.mark.parametrize("waits", [RunOn.SUCCESS, RunOn.ANY])
def test_a_purged_job_that_waited_finds_how_the_jobs_before_it_ended(
    broker: Broker, worker: LiveOwner, well: bool, waits: RunOn
) -> None:
    # given a chain whose last job alone is purged, and whose head ends meanwhile
    put_flow(broker, "a", "q", waits)
    assert broker.purge_kept("q", "p1") == KeptPurge(1)
    [lease] = worker.take(1, ["a"])
    assert worker.settle(lease, Outcome.SUCCESS if well else Outcome.FAIL, error="no")
    assert state(broker, "last") is CANCELLED
    # when
    starts = well or waits is RunOn.ANY
    assert broker.restore(["last"], "p1") == [starts]
    # then
    assert state(broker, "last") is (READY if starts else CANCELLED)
    assert worker.take_ids() == ["last"] * starts


@pytest.mark.needs(Feature.FLOWS)
def test_a_purged_barrier_ends_when_it_is_restored_late(broker: Broker, worker: LiveOwner) -> None:
    put_flow(broker, "a", "q", RunOn.BARRIER)
    broker.purge_kept("q", "p1")
    [lease] = worker.take(1, ["a"])
    assert worker.settle(lease)
    assert broker.restore(["last"], "p1") == [True]
    assert state(broker, "last") is State.SUCCEEDED


def test_a_purge_that_keeps_is_counted_as_purged(broker: Broker) -> None:
    broker.put([message("q"), message("q", delay=1000.0), job("q"), job("other")])
    broker.cancel([r.envelope.id for r in everything(broker, Filter(queue="other"))])
    broker.purge_kept("q", "p1")
    row = row_of(broker)
    assert (row.purged, row.cancelled, row.accepted, row.size) == (3, 0, 3, 0)
    restore_all(broker)
    row = row_of(broker)
    assert (row.purged, row.ready, row.scheduled, row.size) == (3, 2, 1, 3)
    assert broker.purge("q") == 3
    row = row_of(broker)
    assert (row.purged, row.cancelled, row.size) == (6, 0, 0)


def test_purged_jobs_are_kept_as_long_as_failed_jobs(
    open_store: Callable[..., Broker], clock: Clock
) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker = open_store(keep=100, keep_count=2, keep_failed=10000)
    broker.put([job("q", id=f"{n}") for n in range(5)])
    broker.put([job("a", id="cancelled")])
    broker.cancel(["cancelled"])
    broker.purge_kept("q", "p1")

    clock.advance(5000.0)
    broker.tick()
    assert broker.get("cancelled") is None
    assert len(purged_ids(broker)) == 5  # no number bounds them

    clock.advance(6000.0)
    broker.tick()
    assert purged_ids(broker) == []


@pytest.mark.needs(Feature.RESULTS)
def test_purged_jobs_take_no_place_of_jobs_kept_by_number(
    open_store: Callable[..., Broker], clock: Clock
) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    # given as many succeeded jobs as are kept, and more purged jobs
    broker = open_store(keep_count=3)
    owner = LiveOwner(broker)
    broker.put([job("a") for _ in range(3)])
    for lease in owner.take(3):
        owner.settle(lease)
    broker.put([job("q") for _ in range(5)])
    broker.purge_kept("q", "p1")
    # when the store is tidied
    clock.advance(100.0)
    broker.tick()
    # then all are there
    assert row_of(broker, "a").succeeded == 3
    assert len(everything(broker)) == 8


def test_purged_jobs_can_be_retried_and_deleted_like_cancelled_jobs(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put([job("q", id="again"), job("q", id="gone"), job("q", id="stays")])
    broker.purge_kept("q", "p1")
    assert broker.kick(["again"]) == [True]
    assert broker.delete(["gone"]) == [True]
    assert broker.restore(["again", "gone", "stays"], "p1") == [False, False, True]
    assert worker.take_ids(5) == ["again", "stays"]
