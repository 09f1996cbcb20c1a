"""Schedules in the store: kept, handed out to one at a time, changed by compare-and-set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest
from broker_driver import LiveOwner, job, state
from kinds import Clock

from tidemill import Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.schedules import (
    DECLARATION,
    LAST_OWN,
    Change,
    Changed,
    LeftOut,
    Schedule,
)
from tidemill.brokers.contract.store import Store
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, Planned, rank_of
from tidemill.core.job import Conflict, State
from tidemill.errors import StoreMoved, TaskNotFound
from tidemill.worker.child_protocol import Hello
from tidemill.worker.declarations import TaskDeclarations
from tidemill.worker.scheduling import Scheduling

NEVER = float("inf")

pytestmark = pytest.mark.still_clock


@pytest.fixture(autouse=True)
def schedules(need: Callable[[Feature], None]) -> None:
    need(Feature.SCHEDULES)


def add(broker: Broker, name: str, due: float = 0.0, body: bytes = b"rule") -> int:
    (changed,) = broker.change_schedules([Change(name, 0, due, body)])
    assert changed.done
    assert changed.version
    return changed.version


def one(broker: Broker, name: str) -> Schedule | None:
    return broker.schedules([name])[0]


def names(worker: LiveOwner, fires: int = 100) -> list[str]:
    return [schedule.name for schedule in worker.exchange(fires=fires).schedules]


def hinted(broker: Broker, worker: LiveOwner) -> None:
    """Its wait ends, long before the time it was given."""
    began = time.monotonic()
    broker.wait(worker.id, 60.0)
    assert time.monotonic() - began < 30


def put(broker: Broker, name: str, *jobs: Envelope) -> tuple[str, ...]:
    """Fire it as it stands; why jobs were left out."""
    record = one(broker, name)
    change = Change(name, record.version, record.due, record.body, jobs=jobs)
    (changed,) = broker.change_schedules([change])
    assert changed.done
    return changed.left_out


# -- records -------------------------------------------------------------------------------------


def test_a_record_is_kept_as_it_was_given(broker: Broker) -> None:
    due = clock.wall() + 3600.123456
    version = add(broker, "nightly", due, b"\0any\xffbytes")
    (found, missing) = broker.schedules(["nightly", "other"])
    assert missing is None
    assert (found.name, found.version, found.body) == ("nightly", version, b"\0any\xffbytes")
    assert found.due == pytest.approx(due, abs=2e-6)


def test_schedules_are_listed_by_name_in_pages(broker: Broker) -> None:
    for name in ("b", "a", "ä", "a.b", "a b", "c"):
        add(broker, name)
    listed, after = [], ""
    while page := broker.list_schedules(after, 2):
        assert len(page) <= 2
        listed += [schedule.name for schedule in page]
        after = page[-1].name
    assert listed == ["a", "a b", "a.b", "b", "c", "ä"]


def test_a_change_needs_the_version_it_expects(broker: Broker) -> None:
    first = add(broker, "s")
    assert broker.change_schedules([Change("s", 0, 5.0)]) == [Changed()]  # there is one
    assert broker.change_schedules([Change("s", first + 1000, 5.0)]) == [Changed()]
    assert broker.change_schedules([Change("t", first, 5.0)]) == [Changed()]  # there is none
    (changed,) = broker.change_schedules([Change("s", first, 0.0, b"new")])
    assert changed.done
    assert changed.version not in (0, first)
    assert broker.change_schedules([Change("s", first, 5.0)]) == [Changed()]
    found = one(broker, "s")
    assert (found.due, found.body) == (0.0, b"new")


def test_a_removed_and_added_schedule_has_a_new_version(broker: Broker) -> None:
    first = add(broker, "s")
    assert broker.change_schedules([Change("s", first, gone=True)]) == [Changed(True)]
    assert one(broker, "s") is None
    assert broker.change_schedules([Change("s", first, gone=True)]) == [Changed()]
    assert add(broker, "s") != first
    assert broker.change_schedules([Change("s", first, 5.0)]) == [Changed()]


def test_each_change_of_a_call_stands_by_itself(broker: Broker) -> None:
    version = add(broker, "s")
    jobs = [job() for _ in range(3)]
    lost, done, again = broker.change_schedules(
        [
            Change("s", version + 1000, jobs=(jobs[0],)),
            Change("s", version, jobs=(jobs[1],)),
            Change("s", version, jobs=(jobs[2],)),
        ]
    )
    assert (lost.done, done.done, again.done) == (False, True, False)
    assert [broker.get(j.id) is not None for j in jobs] == [False, True, False]


# -- coming due ----------------------------------------------------------------------------------


def test_a_schedule_is_handed_out_when_due_and_never_before(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    add(broker, "soon", clock.wall() + 200)
    add(broker, "paused", 0.0)
    reply = worker.exchange(fires=100)
    assert reply.schedules == []
    assert 190 < reply.next_due < 201
    clock.advance(201)
    assert names(worker) == ["soon"]


def test_only_owners_that_fire_schedules_get_them(
    broker: Broker, worker: LiveOwner, consumer: LiveOwner
) -> None:
    add(broker, "due", clock.wall() - 1)
    add(broker, "soon", clock.wall() + 60)
    for hand in (worker, consumer):
        reply = hand.exchange(want=Want(1))
        assert reply.schedules == []
        assert reply.next_due == NEVER
    assert names(worker) == ["due"]


def test_the_earliest_come_first_and_no_more_than_asked_for(
    broker: Broker, worker: LiveOwner
) -> None:
    now = clock.wall()
    for name, ago in (("b", 2), ("a", 1), ("c", 3)):
        add(broker, name, now - ago)
    assert names(worker, 2) == ["c", "b"]
    assert worker.exchange(fires=0).next_due == NEVER
    assert names(worker, 2) == ["a"]


def test_two_workers_never_get_the_same_schedule(
    broker: Broker, worker: LiveOwner
) -> None:  # case C7
    other = LiveOwner(broker, "w2")
    due = clock.wall() - 1
    for n in range(20):
        add(broker, f"s{n:02}", due)
    got = [name for hand in (worker, other, worker, other) for name in names(hand, 7)]
    assert sorted(got) == [f"s{n:02}" for n in range(20)]


def test_an_unfired_schedule_is_handed_out_again(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # Who had it died: another gets it a second later, as it was.
    due = clock.wall() - 1
    version = add(broker, "s", due)
    other = LiveOwner(broker, "w2")
    assert names(worker) == ["s"]
    reply = other.exchange(fires=1)
    assert reply.schedules == []
    assert 0 < reply.next_due < 1.3
    clock.advance(1.5)
    (again,) = other.exchange(fires=1).schedules
    assert again.version == version
    assert again.due == pytest.approx(due, abs=2e-6)


def test_a_change_that_fails_leaves_a_claim_as_it_is(broker: Broker, worker: LiveOwner) -> None:
    version = add(broker, "s", clock.wall() - 1)
    assert names(worker) == ["s"]
    assert broker.change_schedules([Change("s", version + 1000, 1.0)]) == [Changed()]
    assert names(worker) == []


def test_of_two_changes_to_one_version_one_succeeds(broker: Broker, clock: Clock) -> None:
    # case C7: the first was slow, and the second was handed it as well
    version = add(broker, "s", clock.wall() - 1)
    first, second = job(id="first"), job(id="second")
    next_due = clock.wall() + 60
    for put_job, done in ((first, True), (second, False)):
        (changed,) = broker.change_schedules(
            [Change("s", version, next_due, b"rule", jobs=(put_job,))]
        )
        assert changed.done is done
    assert state(broker, "first") is State.READY
    assert broker.get("second") is None


def test_a_changed_schedule_comes_at_its_new_time(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    add(broker, "s", clock.wall() - 1)
    (schedule,) = worker.exchange(fires=5).schedules
    change = Change("s", schedule.version, clock.wall() + 300, jobs=(job(),))
    broker.change_schedules([change])
    reply = worker.exchange(fires=5)
    assert reply.schedules == []
    assert 290 < reply.next_due < 301
    clock.advance(2)  # the claim is over, and means nothing
    assert names(worker) == []
    clock.advance(299)
    assert names(worker) == ["s"]


def test_a_claimed_schedule_that_is_paused_or_removed_does_not_come_again(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    for name in ("paused", "removed"):
        add(broker, name, clock.wall() - 1)
    paused, removed = sorted(worker.exchange(fires=5).schedules, key=lambda s: s.name)
    broker.change_schedules(
        [Change("paused", paused.version), Change("removed", removed.version, gone=True)]
    )
    clock.advance(5)
    reply = worker.exchange(fires=5)
    assert reply.schedules == []
    assert reply.next_due == NEVER


def test_a_wall_clock_that_is_set_fires_nothing_twice(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:  # law 19
    version = add(broker, "s", clock.wall() + 1800)
    clock.set_wall(3600)
    if clock.of_server:  # which nobody has set
        assert names(worker) == []
        clock.advance(1801)
    (schedule,) = worker.exchange(fires=5).schedules
    changed = broker.change_schedules([Change("s", version, schedule.due + 86400)])
    clock.set_wall(-3600)
    assert changed[0].done
    assert names(worker) == []
    clock.set_wall(3600)
    assert names(worker) == []


def test_a_claim_does_not_hang_on_the_wall_clock(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:  # law 19
    add(broker, "s", clock.wall() - 1)
    assert names(worker) == ["s"]
    clock.set_wall(-3600)
    clock.advance(1.5)
    assert names(worker) == ["s"]


# -- waking --------------------------------------------------------------------------------------


def test_an_earlier_due_time_wakes_a_sleeper(broker: Broker, worker: LiveOwner) -> None:
    worker.exchange(want=Want(1), fires=5)
    broker.wait(worker.id, 0.0)  # whatever was before
    worker.exchange(want=Want(1), fires=5)
    add(broker, "s", clock.wall() + 3600)
    hinted(broker, worker)
    assert 3500 < worker.exchange(want=Want(1), fires=5).next_due < 3601
    add(broker, "sooner", clock.wall() + 5)
    hinted(broker, worker)
    assert worker.exchange(want=Want(1), fires=5).next_due < 6


def test_a_worker_without_room_gets_due_schedules_too(broker: Broker, worker: LiveOwner) -> None:
    worker.exchange(want=Want(0), fires=5)
    broker.wait(worker.id, 0.0)
    worker.exchange(want=Want(0), fires=5)
    add(broker, "s", clock.wall() - 1)
    hinted(broker, worker)
    assert names(worker) == ["s"]


def test_a_fired_job_wakes_a_sleeping_owner(broker: Broker, worker: LiveOwner) -> None:
    add(broker, "s")
    worker.take()
    broker.wait(worker.id, 0.0)
    worker.take()
    put(broker, "s", job(id="fired"))
    hinted(broker, worker)
    assert worker.take_ids() == ["fired"]


# -- jobs ----------------------------------------------------------------------------------------


def test_jobs_of_a_change_are_put_in_order(broker: Broker, worker: LiveOwner) -> None:
    add(broker, "s")
    assert put(broker, "s", *[job(id=f"j{n}") for n in range(5)]) == ()
    assert worker.take_ids() == [f"j{n}" for n in range(5)]


def test_jobs_that_cannot_be_put_are_left_out_of_a_change(broker: Broker) -> None:
    add(broker, "s")
    broker.put([job(id="taken"), job("q", id="holder", key="k")])
    broker.set_queue("full", max_size=1)
    left_out = put(
        broker,
        "s",
        job(id="taken"),
        job("q", id="rejected", key="k", on_conflict=Conflict.REJECT),
        job("full", id="fits"),
        job("full", id="too-many"),
        job(id="last"),
    )
    assert left_out == (LeftOut.ID, LeftOut.KEY, LeftOut.FULL)
    assert broker.get("rejected") is None
    assert broker.get("too-many") is None
    assert state(broker, "fits") is State.READY
    assert state(broker, "last") is State.READY


def test_keys_work_as_in_any_put(broker: Broker, worker: LiveOwner) -> None:
    # Overlap is what a key is for: at most one unfinished, whatever max_size says.
    add(broker, "s")
    broker.set_queue("q", max_size=1)
    for n in range(3):
        left_out = put(broker, "s", job("q", id=f"j{n}", key="k", on_conflict="keep"))
        assert left_out == (("key",) if n else ())
    merged = job("q", id="merged", key="k", on_conflict="merge", priority=5)
    assert put(broker, "s", merged) == ("key",)
    assert worker.take_ids(queues=["q"]) == ["j0"]
    assert put(broker, "s", job("q", id="j3", key="k", on_conflict="replace")) == ()
    assert state(broker, "j3") is State.WAITING
    assert broker.get("j1") is None


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("conflict", ["keep", "reject", "replace"])
def test_a_change_may_be_another_when_all_its_jobs_are_left_out(
    broker: Broker, worker: LiveOwner, conflict: str, gone: bool
) -> None:
    # case C7: what repeats count
    broker.put([job(id="holder", key="k")])
    due = clock.wall() + 3600
    for name, ids in (("none", ["a"]), ("some", ["b", "c"]), ("all", ["d"])):
        version, jobs = add(broker, name, clock.wall() - 1), []
        for n, job_id in enumerate(ids):
            key = "k" if name == "none" or n else ""
            jobs.append(job(id=job_id, key=key, on_conflict=conflict))
        change = Change(name, version, due, b"new", gone, tuple(jobs), (due + 60, b"instead"))
        (changed,) = broker.change_schedules([change])
        left_out = name == "none" and conflict != "replace"
        found = one(broker, name)
        assert changed.done
        if gone and not left_out:
            assert (changed.version, found) == (0, None)
        else:
            assert found.version == changed.version
            assert found.body == (b"instead" if left_out else b"new")
            assert found.due == pytest.approx(due + 60 * left_out, abs=2e-6)
    assert names(worker) == []


def test_a_change_that_fails_is_none_instead_either(broker: Broker) -> None:
    version = add(broker, "s")
    broker.put([job(id="taken")])
    change = Change("s", version + 1000, jobs=(job(id="taken"),), instead=(0.0, b"instead"))
    assert broker.change_schedules([change]) == [Changed()]
    found = one(broker, "s")
    assert (found.version, found.body) == (version, b"rule")


def test_many_that_are_known_are_changed_and_struck_at_once(
    broker: Broker, worker: LiveOwner
) -> None:
    now = clock.wall()
    versions = {name: add(broker, name, now + 600) for name in "abcd"}
    changes = [
        Change("a", versions["a"], now - 1, b"sooner", jobs=(job(id="ja"),)),
        Change("b", versions["b"] + 1000, now - 1, jobs=(job(id="jb"),)),
        Change("c", versions["c"], gone=True, jobs=(job(id="jc"), job(id="ja"))),
        Change("nobody", versions["d"], now - 1, jobs=(job(id="jn"),)),
        Change("d", versions["d"], 0.0, b"paused"),
    ]
    worker.exchange(want=Want(0), fires=5)
    broker.wait(worker.id, 0.0)
    worker.exchange(want=Want(0), fires=5)
    done = broker.change_schedules(changes)
    hinted(broker, worker)
    assert [changed.done for changed in done] == [True, False, True, False, True]
    assert [changed.left_out for changed in done] == [(), (), ("id",), (), ()]
    assert [bool(changed.version) for changed in done] == [True, False, False, False, True]
    assert [broker.get(f"j{name}") is not None for name in "abcn"] == [True, False, True, False]
    assert names(worker) == ["a"]
    assert [s.name for s in broker.list_schedules()] == ["a", "b", "d"]


def test_a_job_names_its_schedule(broker: Broker, worker: LiveOwner) -> None:
    add(broker, "s")
    put(broker, "s", job(id="j", planned=Planned("s", 1750000000.5)))
    (lease,) = worker.take()
    record = broker.get("j")
    assert record.envelope.planned == lease.open().planned == Planned("s", 1750000000.5)
    assert record.public()["schedule"] == "s"
    assert record.public()["planned"] == 1750000000.5


# -- leaving -------------------------------------------------------------------------------------


def test_a_store_that_is_left_fires_nothing(broker: Broker, worker: LiveOwner) -> None:
    version = add(broker, "s", clock.wall() - 1)
    broker.depart("redis://elsewhere")
    reply = worker.exchange(fires=5)
    assert reply.schedules == []
    with pytest.raises(StoreMoved):
        broker.change_schedules([Change("s", version, 5.0)])
    assert [s.name for s in broker.list_schedules()] == ["s"]
    broker.stay()
    assert names(worker) == ["s"]


def test_schedules_are_adopted_unchanged(broker: Broker, worker: LiveOwner) -> None:
    add(broker, "taken", body=b"here")
    there = open_broker("memory://")
    now = clock.wall()
    for name, due in (("due", now - 1), ("later", now + 600), ("paused", 0.0), ("taken", 5.0)):
        add(there, name, due, name.encode())
    departure = there.depart(broker.url, seal=True)
    page = there.list_schedules()
    assert broker.adopt(departure, [], "4:x", page) == [True, True, True, False]
    assert broker.adopted(departure.mark) == "4:x"
    for theirs, ours in zip(page[:3], broker.list_schedules(), strict=False):
        assert (ours.name, ours.body) == (theirs.name, theirs.body)
        assert ours.due == pytest.approx(theirs.due, abs=2e-6)
    taken = one(broker, "taken")
    assert taken.body == b"here"
    assert names(worker) == ["due"]
    there.close()


@pytest.mark.parametrize("wrong", [-120.0, 120.0])
def test_the_first_time_of_a_schedule_goes_by_the_clock_of_the_store(
    broker: Broker, worker: LiveOwner, clock: Clock, wrong: float
) -> None:
    # case M5, law 19
    # given a store whose time does not follow the clock of this machine
    store, began = cast(Store, broker), cast(Store, broker).wall()
    clock.set_wall(wrong)
    expected = began if clock.of_server else began + wrong
    assert store.wall() == pytest.approx(expected, abs=60)
    # when a worker declares a schedule, and a program adds one
    with Tidemill("memory://") as app:
        app.runtime._broker = store
        task = app.task(name="tick")(max)
        app.schedule("declared", task.call(), every=600)
        Scheduling().declare(store, Hello(schedules=app.runtime.code_schedules.bodies()))
        app.schedules.add("added", task.call(), every=600)
        app.schedules.retime("added", 900)
        # then they fire for the first time after their interval
        assert names(worker) == []
        first = {record.name: record.due - expected for record in broker.list_schedules()}
        close = pytest.approx
        assert first == {"declared": close(600, abs=60), "added": close(900, abs=60)}
        # and later the next time is counted by the same clock
        clock.advance(670)
        Scheduling().fire(store, worker.exchange(fires=1).schedules)
        record = one(broker, "declared")
        assert record.due - expected == pytest.approx(1200, abs=60)
        app.runtime._broker = None


# -- declarations of tasks -----------------------------------------------------------------------


def test_declarations_are_kept_and_listed_before_schedules(
    broker: Broker, worker: LiveOwner
) -> None:
    # given declarations, one with the longest name, and schedules
    longest = DECLARATION + "t" * 200
    due = clock.wall() + 3600
    for name in ("  ", longest, f"{DECLARATION}app.send", "a"):
        add(broker, name, due)
    # then
    assert one(broker, longest) is not None
    both = [schedule.name for schedule in broker.list_schedules(DECLARATION, 10)]
    assert both == [f"{DECLARATION}app.send", longest, "  ", "a"]
    alone = [schedule.name for schedule in broker.list_schedules(LAST_OWN, 10)]
    assert alone == ["  ", "a"]


def test_a_worker_declares_and_a_producer_reads(broker: Broker) -> None:
    # given a worker that has declared its tasks
    with Tidemill("memory://", retries=5) as app:
        app.task(name="app.send", queue="mail", priority=7)(max)
        declared = Hello(declared=app.runtime.declarations.own())
    TaskDeclarations().declare(cast(Store, broker), declared)
    # when a producer on the same store calls the task by name
    producer = Tidemill("memory://")
    producer.runtime._broker = cast(Store, broker)
    envelope = producer.runtime.envelope(producer.call("app.send", 1, 2))
    # then
    assert (envelope.queue, envelope.rank) == ("mail", rank_of(7))
    assert envelope.retries.limit == 5
    with pytest.raises(TaskNotFound):
        producer.runtime.envelope(producer.call("app.other"))
