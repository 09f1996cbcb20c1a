"""All of a store goes to another: nothing is lost, doubled or changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broker_driver import LiveOwner, check_counts, everything, job, message, state, whole
from kinds import KINDS, Clock, Kind

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope, Links, Unique
from tidemill.core.job import Command, Outcome, Placed, Put, Record, State
from tidemill.errors import StoreMoved
from tidemill.transfer.store_to_store import PASSES

ELSEWHERE = "lmdb://./elsewhere"


@pytest.fixture
def needs_move(need: Callable[[Feature], None]) -> None:
    need(Feature.MOVE)


@pytest.fixture(params=KINDS, ids=lambda kind: f"to-{kind.name}")
def target(
    request: pytest.FixtureRequest, tmp_path: Path, needs_move: None, clock: Clock
) -> Iterator[Broker]:
    kind: Kind = request.param
    broker = open_broker(kind.store_url(tmp_path / "target"))
    if Feature.MOVE not in broker.features:
        broker.close()
        pytest.skip(f"{kind.name} has no move")
    yield broker
    check_counts(broker)
    broker.close()


def fill(broker: Broker, target: Broker, clock: Clock) -> list[Envelope]:
    """Jobs in every state that may be moved."""
    worker, consumer = LiveOwner(broker), LiveOwner(broker, "c1", "consumer")
    done, gone, failed, retried = job(), job(result_ttl=50.0), job(retries=0), job()
    broker.put([done, gone, failed, retried])
    leases = worker.take(4)
    worker.note(leases[0], done=1.0, total=3.0, line="half", time=5.0, text="b.png")
    worker.settle(leases[0], result=b"r", started=1.0, ended=2.0)
    worker.settle(leases[1], started=1.0, ended=2.0)
    worker.settle(leases[2], Outcome.RETRY, error="why", traceback="tb")
    worker.settle(leases[3], Outcome.RETRY, error="once", delay=40.0)
    late = job(expires=100.0, delay=500.0)
    cancelled = job()
    revived = job(retries=0)
    broker.put([revived, cancelled])
    leases = worker.take(1)
    worker.settle(leases[0], Outcome.FAIL, error="retry me")
    broker.retry([revived.id])
    broker.cancel([cancelled.id])
    brief = job(expires=0.01)
    broker.put([brief])
    clock.advance(0.05)
    broker.tick()
    assert state(broker, brief.id) is State.EXPIRED
    rest = [
        job("b", priority=5, tags=("t",), headers={"h": "1"}, text="words"),
        job("b", expires=300.0),
        message("a", ttr=7.0, delay=20.0),
        message("a", ttr=0.0),
        job("b", key="k"),
        late,
        job("b", at=4e9),
    ]
    broker.put(rest)
    broker.put([job("b", key="k", id="other", on_conflict="merge", priority=9.0)])
    # a retried job whose key has a successor already
    broker.put([job("s", key="s", id="s1")])
    [lease] = worker.take(1, ["s"])
    broker.put([job("s", key="s", id="s2", on_conflict="replace")])
    worker.settle(lease, Outcome.RETRY, error="again", delay=30.0)
    if Feature.FLOWS in broker.features & target.features:
        fill_flows(broker, worker)
    broker.detach(worker.id)
    broker.detach(consumer.id)
    return [done, gone, failed, retried, revived, cancelled, brief, *rest]


def fill_flows(broker: Broker, worker: LiveOwner) -> None:
    """A flow in the middle, and one that failed."""
    after = Links(waits="success", inputs=("f1", "f2"))
    first = Links(next=("f3",))
    broker.put(
        [job("f", id="f3", links=after), *[job("f", id=i, links=first) for i in ("f1", "f2")]]
    )
    [lease] = worker.take(1, ["f"])
    worker.settle(lease, result=b"one")
    broker.put(
        [
            job("g", id="g2", links=Links(waits="success")),
            job("g", id="g1", links=Links(next=("g2",))),
        ]
    )
    [lease] = worker.take(1, ["g"])
    worker.settle(lease, Outcome.FAIL, error="no")


def move(source: Broker, target: Broker, limit: int = 4) -> list[bool]:
    """As ``tidemill move`` does it, in small steps."""
    departure = source.depart(ELSEWHERE, seal=True)
    taken: list[bool] = []
    for states, goes in PASSES:
        cursor = ""
        while True:
            page = source.find(Filter(states=states), limit, cursor)
            records = whole(source, [record for record in page.records if goes(record)])
            taken += target.adopt(departure, records, f"{cursor}!")
            assert target.adopted(departure.mark) == f"{cursor}!"
            cursor = page.cursor
            if not cursor:
                break
    return taken


def shown(record: Record, base: int = 0) -> dict[str, object]:
    return {
        **record.public(),
        "sequence": record.seq - base,
        "due": pytest.approx(record.due, abs=0.5),  # each store has a clock of its own
        "expires": pytest.approx(record.expires, abs=0.5),
        "finished": pytest.approx(record.finished, abs=0.5),
        "body": record.envelope,
        "result": record.raw_result,
    }


def same(these: dict[str, Record], those: dict[str, Record], base: int = 0) -> None:
    assert these.keys() == those.keys()
    for job_id, record in these.items():
        plain = shown(record, base)
        for when in ("due", "expires", "finished"):
            plain[when] = getattr(record, when)
        assert plain == shown(those[job_id])


def test_every_job_arrives_unchanged(broker: Broker, target: Broker, clock: Clock) -> None:
    fill(broker, target, clock)
    here = target.put([job("mine"), job("mine")])
    before = {r.envelope.id: r for r in whole(broker, everything(broker))}
    # when
    assert all(move(broker, target))
    # then
    after = {r.envelope.id: r for r in whole(target, everything(target))}
    mine = {put.id: after.pop(put.id) for put in here}
    base = max(record.seq for record in mine.values())
    same(after, before, base)
    assert {r.state for r in after.values()} >= set(State) - {State.RUNNING}
    # and what is put from now on comes behind
    [new] = target.put([job("b")])
    assert target.get(new.id).seq > max(r.seq for r in after.values())


def test_the_order_and_the_times_go_on(broker: Broker, target: Broker, clock: Clock) -> None:
    # laws 9, 10, 12, 15
    jobs = fill(broker, target, clock)
    move(broker, target)
    worker = LiveOwner(target)
    ready = [r for r in everything(broker) if r.state is State.READY and r.envelope.task]
    ready.sort(key=lambda r: (r.rank, r.seq))
    leases = worker.take(100, [], kinds=None)
    assert {lease.open().id for lease in leases} == {r.envelope.id for r in ready}
    in_b = [r.envelope.id for r in ready if r.envelope.queue == "b"]
    assert [lease.open().id for lease in leases if lease.open().queue == "b"] == in_b
    retried = next(lease for lease in leases if lease.open().id == jobs[4].id)
    assert retried.attempt == 1
    record = target.get(jobs[4].id)
    assert record.run == 2
    for lease in leases:
        assert worker.settle(lease)
    # a flow goes on, and one that failed has another chance
    if Feature.FLOWS in broker.features & target.features:
        assert state(target, "f3") is State.READY
        [lease] = worker.take(1, ["f"])
        assert [given.result for given in lease.inputs] == [b"one", b""]
        assert target.retry(["g1"]) == [True]
        assert state(target, "g2") is State.WAITING
    # a key is still held, and its successor follows
    assert state(target, "s2") is State.WAITING
    if clock.fake:
        clock.advance(45.0)
        target.tick()
        assert state(target, jobs[3].id) is State.READY  # retried with a delay
        [lease] = worker.take(1, ["s"])
        assert (lease.open().id, lease.attempt) == ("s1", 2)
        assert worker.settle(lease)
        assert state(target, "s2") is State.READY
        clock.advance(3601.0)
        target.tick()
        assert target.get(jobs[0].id) is None  # pruned in its time


def test_a_short_result_ttl_lasts_until_the_jobs_behind_it_have_arrived(
    broker: Broker, target: Broker, clock: Clock
) -> None:
    # law 15
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    worker = LiveOwner(broker)
    before = Links(next=("b",))
    after = Links(waits="success", inputs=("a",))
    broker.put([job(id="b", links=after), job(id="a", links=before, result_ttl=5.0)])
    [lease] = worker.take(1)
    worker.settle(lease, result=b"x")
    broker.detach(worker.id)
    # when there is some time between the pages of a move
    departure = broker.depart(ELSEWHERE, seal=True)
    for job_id in ("a", "b"):
        assert target.adopt(departure, whole(broker, [broker.get(job_id)]), job_id) == [True]
        clock.advance(10.0)
        target.tick()
    # then
    [lease] = LiveOwner(target).take(1)
    assert [given.result for given in lease.inputs] == [b"x"]


def test_a_wall_clock_due_time_keeps_following_the_wall_clock(
    broker: Broker, target: Broker, clock: Clock
) -> None:
    # law 19; the fraction is none that a store keeps exactly
    at = clock.wall() + 100.1234567
    broker.put([job(id="moved", at=at), job(id="delayed", delay=100.0)])
    assert all(move(broker, target))
    target.put([job(id="put", at=at)])
    clock.set_wall(200.0)
    target.tick()
    assert state(target, "moved") is state(target, "put")  # where a server has two clocks: ready
    assert state(target, "delayed") is State.SCHEDULED


def test_a_job_whose_id_or_key_is_taken_stays_in_the_source(broker: Broker, target: Broker) -> None:
    # laws 11, 12
    twin, keyed = job(), job(key="k")
    broker.put([twin, keyed, job(id="new")])
    target.put([job(id=twin.id), job(key="k")])
    assert sorted(move(broker, target, 100)) == [False, False, True]
    assert state(target, "new") is State.READY


def test_adopting_again_doubles_nothing(broker: Broker, target: Broker, clock: Clock) -> None:
    # killed between a step and the next: the step is done again
    fill(broker, target, clock)
    assert all(move(broker, target))
    before = {r.envelope.id: r for r in whole(target, everything(target))}
    assert not any(move(broker, target))
    same({r.envelope.id: r for r in whole(target, everything(target))}, before)


def test_a_store_that_departs_takes_and_gives_nothing(broker: Broker, needs_move: None) -> None:
    held, ready, soon = job(), job(), job(delay=1000.0)
    broker.put([held, ready, soon])
    worker, consumer = LiveOwner(broker), LiveOwner(broker, "c1", "consumer")
    [lease] = worker.take(1)
    # when
    departure = broker.depart(ELSEWHERE)
    # then
    assert broker.depart(ELSEWHERE).mark == departure.mark
    with pytest.raises(StoreMoved, match=ELSEWHERE):
        broker.depart("redis://other")
    for refused in (
        lambda: broker.put([job()]),
        lambda: broker.retry([ready.id]),
        lambda: broker.cancel([ready.id]),
        lambda: delete_waiting(broker, "default"),
        lambda: broker.set_queue("default", paused=True),
        lambda: consumer.take(),
        lambda: LiveOwner(broker, "w2"),
    ):
        with pytest.raises(StoreMoved, match=ELSEWHERE):
            refused()
    assert worker.take(5) == []
    assert Command("quiet") in worker.exchange(want=Want(1)).commands
    # what runs may end
    assert worker.settle(lease, Outcome.RETRY, error="x", delay=0.0)
    assert state(broker, held.id) is State.READY
    assert state(broker, ready.id) is State.READY
    # what has moved by a put is deleted, until the seal
    assert broker.delete([soon.id]) == [True]
    broker.depart(ELSEWHERE, seal=True)
    with pytest.raises(StoreMoved, match=ELSEWHERE):
        broker.delete([ready.id])
    # and when it is called off all goes on
    broker.stay()
    assert len(worker.take_ids(5)) == 2
    broker.put([job()])


def test_a_sealed_store_does_not_change(broker: Broker, needs_move: None, clock: Clock) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    soon, brief = job(delay=10.0), job(expires=10.0)
    broker.put([soon, brief])
    worker = LiveOwner(broker)
    broker.depart(ELSEWHERE, seal=True)
    before = everything(broker)
    clock.advance(5000.0)
    broker.tick()
    worker.take(5)
    assert [r.state for r in everything(broker)] == [r.state for r in before]
    assert broker.depart(ELSEWHERE).sealed


def test_a_key_that_is_held_is_held_there_too(broker: Broker, target: Broker, clock: Clock) -> None:
    # law 12; the period goes on by the wall clock of the producer
    if not {Feature.UNIQUE} <= broker.features & target.features:
        pytest.skip("one of the two holds no keys")
    worker, now = LiveOwner(broker), clock.wall()
    unique = Unique(period=60)
    broker.put([job(id="a", key="done", unique=unique, created=now)])
    worker.settle(worker.take(1)[0])
    broker.put([job(id="b", key="coming", unique=unique, created=now)])
    move(broker, target)
    assert target.put([job(id="c", key="done")]) == [Put("a", Placed.KEPT)]
    there = LiveOwner(target)
    there.settle(there.take(1)[0])
    assert target.put([job(id="d", key="coming")]) == [Put("b", Placed.KEPT)]
    clock.advance(61)
    puts = target.put([job(key="done"), job(key="coming")])
    assert [put.placed for put in puts] == [Placed.CREATED] * 2
