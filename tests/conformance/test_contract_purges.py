"""A purge that keeps its jobs, and the way back: in their old places, and only once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, everything, ids_of, job, message, state
from kinds import Clock

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic import purges
from tidemill.brokers.generic.purges import Purged, Restored, delete_waiting, purge, restore
from tidemill.core.envelope import JobLimit, LimitSettings, Links
from tidemill.core.job import Outcome, Placed, Put, RunOn, State, is_of_purge, purged
from tidemill.errors import InvalidOption

pytestmark = pytest.mark.needs(Feature.INSPECT)

READY, SCHEDULED, WAITING = State.READY, State.SCHEDULED, State.WAITING
CANCELLED, RUNNING = State.CANCELLED, State.RUNNING


def row_of(broker: Store, queue: str = "q") -> QueueStats:
    return next(row for row in broker.stats() if row.name == queue)


def purged_ids(broker: Store, purge_id: str) -> list[str]:
    """The jobs of a purge, as a restore finds them."""
    found = everything(broker, Filter(states=frozenset({CANCELLED})))
    return [r.envelope.id for r in found if is_of_purge(r.error, purge_id)]


def in_state(broker: Store, *ids: str) -> list[State]:
    return [state(broker, job_id) for job_id in ids]


def test_a_purge_takes_all_jobs_out_of_the_queue_and_a_restore_brings_them_back(
    broker: Store, worker: LiveOwner, consumer: LiveOwner
) -> None:
    given = [job("q"), job("q", delay=1000.0), message("q"), message("q", delay=1000.0), job("a")]
    broker.put(given)
    running = job("q")
    broker.put([running])
    ids = ids_of(given)

    worker.take(1, ["a"])
    assert purge(broker, "q").kept == 5
    assert in_state(broker, *ids[:4]) == [CANCELLED] * 4
    assert worker.take(5, ["q"]) == consumer.take(5, ["q"]) == []

    assert restore(broker, "q") == Restored(jobs=5, left=0)
    assert in_state(broker, *ids[:4]) == [READY, SCHEDULED, READY, SCHEDULED]
    assert worker.take_ids(5, ["q"]) == [ids[0], running.id]
    assert consumer.take_ids(5, ["q"]) == [ids[2]]


def test_a_purge_leaves_running_and_finished_jobs(broker: Store, worker: LiveOwner) -> None:
    broker.put([job("q", id="done"), job("q", id="runs"), job("q", id="ready")])
    done, runs = worker.take(2)
    worker.settle(done, result=b"x")
    assert broker.cancel(["done", "runs", "unknown", ""], purge="p1") == [False] * 4
    assert purge(broker, "q").jobs == 1
    assert in_state(broker, "done", "runs", "ready") == [State.SUCCEEDED, RUNNING, CANCELLED]
    assert not broker.get("runs").cancelling
    assert worker.settle(runs)
    assert purge(broker, "q") == purge(broker, "never seen") == Purged(jobs=0)


def test_a_purge_in_pieces_leaves_jobs_that_were_put_after_it_began(
    broker: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a producer that puts jobs all the time
    broker.put([job("q", id=f"{n}") for n in range(7)])
    monkeypatch.setattr(purges, "_PIECE", 3)
    real = broker.cancel

    def and_put(ids: list[str], **more: str) -> list[bool]:
        broker.put([job("q") for _ in range(4)])
        return real(ids, **more)

    monkeypatch.setattr(broker, "cancel", and_put)
    # then the purge ends
    assert purge(broker, "q").kept == 7
    assert row_of(broker).ready == 12
    # and all its jobs come back, in pieces
    assert restore(broker, "q") == Restored(jobs=7, left=0)
    assert row_of(broker).ready == 19


@pytest.mark.needs("a retry keeps its place")
def test_restored_jobs_keep_priority_and_order_and_begin_anew(
    broker: Store, worker: LiveOwner
) -> None:
    broker.put([job("q", id="low", priority=-5), job("q", id="tried", priority=9)])
    broker.put([job("q", id=f"{n}") for n in range(3)])
    [lease] = worker.take(1, ["q"])
    assert worker.settle(lease, Outcome.RETRY, error="no", delay=0.0)
    before = {r.envelope.id: (r.seq, r.rank, len(r.attempts)) for r in everything(broker)}

    purge(broker, "q")
    broker.put([job("q", id="new")])
    assert restore(broker, "q").jobs == 5

    after = {r.envelope.id: (r.seq, r.rank, len(r.attempts)) for r in everything(broker)}
    assert {name: after[name] for name in before} == before
    leases = worker.take(6, ["q"])
    assert [(lease.open().id, lease.attempt) for lease in leases] == [
        *[("tried", 1), ("0", 1), ("1", 1), ("2", 1), ("new", 1), ("low", 1)]
    ]


def test_a_scheduled_job_keeps_its_due_time(broker: Store, worker: LiveOwner, clock: Clock) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker.put([job("q", id="soon", delay=10.0), job("q", id="later", delay=1000.0)])
    due = broker.get("later").due
    purge(broker, "q")
    clock.advance(20.0)
    broker.tick()
    assert worker.take_ids(5, ["q"]) == []

    assert restore(broker, "q").jobs == 2

    assert broker.get("later").due == pytest.approx(due, abs=0.01)
    assert worker.take_ids(5, ["q"]) == ["soon"]
    clock.advance(981.0)
    assert worker.take_ids(5, ["q"]) == ["later"]


def test_a_retry_with_a_due_time_schedules_the_job(
    broker: Store, worker: LiveOwner, clock: Clock
) -> None:
    broker.put([job("q", id="failed"), job("q", id="cancelled"), job("q", id="later", delay=9e5)])
    [lease] = worker.take(1)
    worker.settle(lease, Outcome.FAIL, error="no")
    broker.cancel(["cancelled"])
    ids, due = ["failed", "cancelled", "later"], broker.wall() + 1000.0

    assert broker.retry(ids, due=due) == [True] * 3

    assert in_state(broker, *ids) == [SCHEDULED] * 3
    assert [broker.get(i).due for i in ids] == pytest.approx([due] * 3, abs=0.01)
    if clock.fake:
        clock.advance(1001.0)
        assert sorted(worker.take_ids(5)) == sorted(ids)


def test_a_job_that_expired_while_it_was_purged_stays_purged(broker: Store, clock: Clock) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker.put([job("q", id="first", expires=30.0), job("q", id="second", expires=3000.0)])
    purge(broker, "q")
    clock.advance(60.0)
    broker.tick()
    assert in_state(broker, "first", "second") == [CANCELLED, CANCELLED]
    assert restore(broker, "q") == Restored(jobs=1, left=1)
    assert in_state(broker, "first", "second") == [CANCELLED, READY]


def test_only_the_jobs_of_this_purge_come_back(broker: Store) -> None:
    broker.put([job("q", id="one"), job("q", id="cancelled")])
    broker.cancel(["cancelled"])
    first = purge(broker, "q")
    broker.put([job("q", id="two")])
    second = purge(broker, "q")
    assert broker.get("two").error == purged(second.id)

    assert restore(broker, "q", second.id).jobs == 1
    assert in_state(broker, "one", "two", "cancelled") == [CANCELLED, READY, CANCELLED]
    for no_id in ("p", "no id", "\0"):
        with pytest.raises(InvalidOption, match="not the id of a purge"):
            restore(broker, "q", no_id)
    assert restore(broker, "q", first.id).jobs == 1
    assert in_state(broker, "one", "two", "cancelled") == [READY, READY, CANCELLED]


@pytest.mark.needs(Feature.KEYS)
def test_a_key_that_another_job_has_taken_stays_with_it(broker: Store, worker: LiveOwner) -> None:
    # law 12
    broker.put([job("q", id="a", key="k"), job("q", id="b", key="free"), job("q", id="c")])
    purge(broker, "q")
    assert broker.put([job("q", id="new", key="k")]) == [Put("new", Placed.CREATED)]

    assert restore(broker, "q") == Restored(jobs=2, left=1)

    assert in_state(broker, "a", "b", "c") == [CANCELLED, READY, READY]
    assert broker.put([job("q", key="free")]) == [Put("b", Placed.KEPT)]
    # once the key is free again, the job can come back
    assert broker.cancel(["new"]) == [True]
    assert restore(broker, "q") == Restored(jobs=1, left=0)
    assert broker.put([job("q", key="k")]) == [Put("a", Placed.KEPT)]
    assert sorted(worker.take_ids(5)) == ["a", "b", "c"]


@pytest.mark.needs(Feature.LIMITS)
def test_jobs_that_wait_for_a_limit_are_purged(broker: Store, worker: LiveOwner) -> None:
    claim = JobLimit("api", "k", 1.0, LimitSettings(concurrency=1))
    broker.put([job("q", id=f"{n}", limit=claim) for n in range(3)])
    [lease] = worker.take(3)
    assert purge(broker, "q").kept == 2
    assert restore(broker, "q") == Restored(jobs=2, left=0)
    assert worker.settle(lease)
    assert worker.take_ids() == ["1"]


@pytest.mark.needs(Feature.KEYS)
def test_a_successor_comes_back_once_its_key_is_free(broker: Store, worker: LiveOwner) -> None:
    broker.put([job("q", id="runs", key="k")])
    [lease] = worker.take()
    assert broker.put([job("q", id="next", key="k", on_conflict="replace")])[0].id == "next"
    assert state(broker, "next") is WAITING
    assert purge(broker, "q").kept == 1
    assert restore(broker, "q") == Restored(jobs=0, left=1)
    assert worker.settle(lease)
    assert restore(broker, "q") == Restored(jobs=1, left=0)
    assert worker.take_ids() == ["next"]


def put_flow(broker: Store, first: str, last: str) -> None:
    """Put a chain of two jobs, into two queues."""
    behind = job(last, id="last", links=Links((), waits=RunOn.SUCCESS, inputs=("first",)))
    broker.put([behind, job(first, id="first", links=Links(("last",)))])


@pytest.mark.needs(Feature.FLOWS)
def test_a_restore_leaves_the_jobs_of_a_flow(broker: Store) -> None:
    put_flow(broker, "q", "q")
    broker.put([job("q", id="alone")])
    assert purge(broker, "q").kept == 3  # the purge of a job does not end the job behind it
    assert restore(broker, "q") == Restored(jobs=1, left=2)
    assert in_state(broker, "first", "last", "alone") == [CANCELLED, CANCELLED, READY]


@pytest.mark.needs(Feature.FLOWS)
@pytest.mark.parametrize("piece", [1, 500])
def test_a_flow_is_deleted_whole(
    broker: Store, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(purges, "_PIECE", piece)
    put_flow(broker, "q", "q")
    broker.put([job("q", id="alone")])
    assert delete_waiting(broker, "q") == 3
    assert everything(broker) == []


@pytest.mark.needs(Feature.FLOWS)
def test_a_purge_ends_the_jobs_behind_a_purged_job(broker: Store) -> None:
    put_flow(broker, "q", "other")
    assert purge(broker, "q").kept == 1
    assert in_state(broker, "first", "last") == [CANCELLED, CANCELLED]
    assert "job first was cancelled" in broker.get("last").error
    # and a retry of the purged job brings both back
    assert broker.retry(["first"]) == [True]
    assert in_state(broker, "first", "last") == [READY, WAITING]


def test_a_purge_that_keeps_is_counted_as_purged(broker: Store) -> None:
    broker.put([message("q"), message("q", delay=1000.0), job("q"), job("other")])
    broker.cancel([r.envelope.id for r in everything(broker, Filter(queue="other"))])
    purge(broker, "q")
    row = row_of(broker)
    assert (row.purged, row.cancelled, row.accepted, row.size) == (3, 0, 3, 0)
    restore(broker, "q")
    row = row_of(broker)
    assert (row.purged, row.ready, row.scheduled, row.size) == (3, 2, 1, 3)
    assert delete_waiting(broker, "q") == 3
    row = row_of(broker)
    assert (row.purged, row.cancelled, row.size) == (6, 0, 0)


def test_purged_jobs_are_kept_as_long_as_failed_jobs(
    open_store: Callable[..., Store], clock: Clock
) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker = open_store(keep=100, keep_count=2, keep_failed=10000)
    broker.put([job("q", id=f"{n}") for n in range(5)])
    broker.put([job("a", id="cancelled")])
    broker.cancel(["cancelled"])
    purge_id = purge(broker, "q").id

    clock.advance(5000.0)
    broker.tick()
    assert broker.get("cancelled") is None
    assert len(purged_ids(broker, purge_id)) == 5  # no number bounds them

    clock.advance(6000.0)
    broker.tick()
    assert purged_ids(broker, purge_id) == []


@pytest.mark.needs(Feature.RESULTS)
def test_purged_jobs_take_no_place_of_jobs_kept_by_number(
    open_store: Callable[..., Store], clock: Clock
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
    purge(broker, "q")
    # when the store is tidied
    clock.advance(100.0)
    broker.tick()
    # then all are there
    assert row_of(broker, "a").succeeded == 3
    assert len(everything(broker)) == 8


def test_purged_jobs_can_be_retried_and_deleted_like_cancelled_jobs(
    broker: Store, worker: LiveOwner
) -> None:
    broker.put([job("q", id="again"), job("q", id="gone"), job("q", id="stays")])
    purge(broker, "q")
    assert broker.retry(["again"]) == [True]
    assert broker.delete(["gone"]) == [True]
    assert restore(broker, "q") == Restored(jobs=1, left=0)
    assert worker.take_ids(5) == ["again", "stays"]
