"""Moving jobs out of RabbitMQ: each keeps its state, wherever it lay, and none is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from broker_driver import everything
from harness import eventually
from pika.exceptions import ChannelWrongStateError
from rabbitmq_desk import LiveOwner, job, message, open_rabbit
from servers import NETWORK, rabbitmq_url

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.carried_jobs import Taken, carried_jobs
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.rabbitmq import RabbitBroker, transfer
from tidemill.brokers.rabbitmq.amqp import short_connection
from tidemill.brokers.rabbitmq.layout import Names
from tidemill.brokers.rabbitmq.message import Carried
from tidemill.brokers.rabbitmq.transfer_in import cursor_message
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import encode_envelope
from tidemill.core.errors import FeatureMissing, InvalidOption, StoreMoved
from tidemill.core.job import Outcome, Record, State
from tidemill.core.limit_settings import LimitSettings
from tidemill.transfer.store_to_store import move

FAILED = Filter(states=frozenset({State.FAILED}))


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hops where nothing is delayed."""
    monkeypatch.setattr(transfer, "_PAUSE", 0.1)


def _prefix() -> str:
    return f"l{time.time_ns() % 10**15}"


@pytest.fixture
def source() -> Iterator[RabbitBroker]:
    with contextlib.closing(open_rabbit(rabbitmq_url(), _prefix(), patience=60)) as broker:
        yield broker


@pytest.fixture
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Broker]:
    kind = getattr(request, "param", "lmdb")
    url = NETWORK[kind](_prefix()) if kind in NETWORK else f"lmdb://{tmp_path}/target"
    with contextlib.closing(open_broker(url)) as broker:
        yield broker


def found(broker: Broker) -> dict[str, Record]:
    return {record.envelope.id: record for record in everything(broker)}


def order(broker: Broker, queue: str) -> list[str]:
    ready = [r for r in everything(broker) if r.envelope.queue == queue]
    return [r.envelope.id for r in sorted(ready, key=lambda r: (r.rank, r.seq))]


def test_everything_arrives_as_it_stood(source: RabbitBroker, target: Broker) -> None:
    # laws 1, 9, 10
    now = time.time()
    ready = [job("a", priority=p) for p in (0, 5, -5, 0, 90)]
    brief = job("b", expires=500.0)
    sent, once = message("b", ttr=7.0), message("c", ttr=0.0)
    late, at, years = job("b", delay=99.0), job("c", at=now + 1000.1234567), job("d", delay=4e7)
    source.put([*ready, brief, sent, once, late, at, years])
    worker = LiveOwner(source)
    retried, failed, suspect = job("w"), job("w", retries=0), job("w")
    source.put([retried, failed])
    for lease in worker.await_all(2, queues=["w"]):
        wait = {"delay": 300.0} if lease.open().id == retried.id else {}
        worker.settle(lease, Outcome.RETRY, error="why", **wait)
    source.detach(worker.id)
    lost = Carried(suspect, encode_envelope(suspect), losses=2)
    source._publish([source._writer.write(lost)])
    # when
    moved = move(source, target, queues=["unknown"])
    # then
    assert (moved.done, moved.repeated, moved.stayed, moved.remaining) == (14, 0, [], 0)
    records = found(target)
    jobs = [*ready, brief, sent, once, late, at, years, retried, failed, suspect]
    assert {r.envelope.id: r.envelope for r in records.values()} == {
        one.id: (records[one.id].envelope if one is brief else one) for one in jobs
    }
    assert order(target, "a") == [ready[i].id for i in (4, 1, 0, 3, 2)]
    due = {job_id: r.due - now for job_id, r in records.items() if r.state is State.SCHEDULED}
    assert due == {
        late.id: pytest.approx(99, abs=20),
        at.id: pytest.approx(1000.1234567, abs=1e-5),  # what a store keeps of it
        years.id: pytest.approx(4e7, abs=20),
        retried.id: pytest.approx(300, abs=20),
    }
    assert min(due[late.id] - 99, due[years.id] - 4e7) > -0.001
    assert records[at.id].due_by_wall
    assert records[brief.id].expires == pytest.approx(now + 500, abs=20)
    assert (records[retried.id].attempt, records[retried.id].error) == (1, "why")
    gone = records[failed.id]
    assert (gone.state, gone.attempt, gone.error) == (State.FAILED, 1, "why")
    assert gone.finished == pytest.approx(time.time(), abs=60)
    assert records[suspect.id].losses == 2
    assert carried_jobs(source).remains().jobs == 0


def test_jobs_that_hop_during_a_move_are_met_in_a_later_queue(
    source: RabbitBroker, target: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # laws 1, 3: some 2,000 hops while they are taken
    monkeypatch.undo()
    jobs, before = [job("h", delay=0.3 + 0.003 * n) for n in range(600)], time.time()
    jobs.append(job("h", delay=100.0))
    source.put(jobs)
    moved = move(source, target)
    assert (moved.done, moved.remaining) == (601, 0)
    assert found(target).keys() == {one.id for one in jobs}
    now, delays = time.time(), {one.id: one.delay for one in jobs}
    early = [
        job_id
        for job_id, r in found(target).items()
        if (r.due or now) < before + delays[job_id] - 0.01
    ]
    assert not early


def test_jobs_taken_and_not_stored_come_back(source: RabbitBroker) -> None:
    # law 3
    jobs = [job("k", delay=0.8), *[job("k") for _ in range(3)]]
    source.put(jobs)
    for taken in carried_jobs(source).take():
        assert taken.records
        break
    worker = LiveOwner(source)
    leases = worker.await_all(4, queues=["k"])
    assert [lease.open().id for lease in leases] == [one.id for one in [*jobs[1:], jobs[0]]]


def test_moves_that_were_killed_are_no_losses(source: RabbitBroker, target: Broker) -> None:
    # law 6: the server counts what it handed out, to whomever
    now, later = suspects = [job("s", retries=3), job("s", retries=3)]
    known = [Carried(one, encode_envelope(one), losses=2) for one in suspects]
    source.put([job("other")])
    source._make_known(["s"])
    writer = source._writer
    source._publish([writer.write(known[0]), writer.write(known[1], 500.0, time.time())])
    for _ in range(4):
        taken = next(t for t in carried_jobs(source).take() if now.id in found_in(t))
        assert found_in(taken)[now.id].losses == 2
    worker = LiveOwner(source)
    [lease] = worker.await_all(1, queues=["s"], alone=True)
    assert (lease.open().id, lease.losses) == (now.id, 2)
    worker.settle(lease, Outcome.RELEASE)
    source.detach(worker.id)
    moved = move(source, target)
    assert (moved.done, moved.stayed, moved.remaining) == (3, [], 0)
    assert [found(target)[one.id].losses for one in (now, later)] == [2, 2]


def found_in(taken: Taken) -> dict[str, Record]:
    return {record.envelope.id: record for record in taken.records}


def test_at_most_once_is_gone_before_it_is_stored(source: RabbitBroker, target: Broker) -> None:
    # law 2: the store forgets it when it is taken there, and could not tell that it came again
    once, taken_there = message("c", ttr=0.0), message("c", ttr=0.0, id="order-1", body=b"theirs")
    target.put([job(id="order-1", body=b"mine")])
    source.put([once])
    assert next(iter(carried_jobs(source).take())).records[0].envelope.id == once.id
    eventually(lambda: not carried_jobs(source).remains().jobs, "it to be gone")
    source.put([taken_there])
    moved = move(source, target)
    assert (moved.gone, moved.stayed) == (0, ["order-1"])
    worker = LiveOwner(source, kind="consumer")
    [lease] = worker.await_all(1, queues=["c"])
    assert lease.open().body == b"theirs"


def test_of_a_job_that_is_there_twice_what_will_run_counts(
    source: RabbitBroker, target: Broker
) -> None:
    # law 1: somebody was killed who tried a failed one again
    one = job()
    source.put([one])
    source._publish([source._writer.write_failed(Carried(one, encode_envelope(one)), "why")])
    moved = move(source, target)
    assert (moved.done, moved.repeated) == (1, 1)
    assert found(target)[one.id].state is State.READY


@pytest.mark.parametrize("target", ["lmdb", *NETWORK], indirect=True)
def test_jobs_stored_already_are_acknowledged_only(source: RabbitBroker, target: Broker) -> None:
    # law 3: killed after a piece was stored, and before it was acknowledged
    jobs = [job() for _ in range(5)]
    source.put(jobs)
    source.put(jobs[:2])  # and a retry that was published twice
    for taken in carried_jobs(source).take():
        for number, record in enumerate(taken.records, 1):
            record.seq = number
        assert target.adopt(Departure("m", "here", 9), taken.records[:3], "") == [True] * 3
        break
    done = LiveOwner(target)
    done.settle(done.take(1)[0])  # meanwhile one has ended there
    moved = move(source, target)
    assert (moved.done, moved.repeated, moved.stayed, moved.remaining) == (2, 5, [], 0)
    states = [record.state for record in found(target).values()]
    assert sorted(states) == [State.READY] * 4 + [State.SUCCEEDED]


def test_another_job_with_the_same_id_stays(source: RabbitBroker, target: Broker) -> None:
    # law 11
    mine, theirs = job(id="order-1", body=b"mine"), job(id="order-1", body=b"theirs")
    rest = [job() for _ in range(3)]
    target.put([mine])
    source.put([theirs, *rest])
    moved = move(source, target)
    assert (moved.gone, moved.stayed, moved.repeated) == (3, ["order-1"], 0)
    assert found(target)["order-1"].envelope.body == b"mine"
    worker = LiveOwner(source)
    [lease] = worker.await_all(1)
    assert lease.open().body == b"theirs"


def test_more_that_stay_than_it_looks_ahead_keep_nothing_from_going(
    source: RabbitBroker, target: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_AHEAD", 4)
    monkeypatch.setattr(short_connection, "_SILENT", 0.3)
    taken = [job(id=f"order-{n}", body=b"mine") for n in range(10)]
    target.put(taken)
    source.put([job(id=one.id, body=b"theirs") for one in taken])
    last = job()
    source.put([last])
    moved = move(source, target)
    assert (moved.gone, len(moved.stayed)) == (1, 10)
    assert last.id in found(target)


def test_a_message_that_is_no_job_stays_and_is_named(source: RabbitBroker, target: Broker) -> None:
    one = job()
    source.put([one])
    place = Names(source._settings.prefix, classic=False).home(one).name
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url()))) as line:
        channel = line.channel()
        channel.confirm_delivery()
        channel.basic_publish("", place, b"\xc1", pika.BasicProperties(message_id="odd"))
    moved = move(source, target)
    assert (moved.gone, moved.strange, moved.remaining) == (1, ["odd"], 0)


def test_jobs_that_a_worker_holds_stay_with_it(source: RabbitBroker, target: Broker) -> None:
    held, free = job(), job()
    source.put([held])
    worker = LiveOwner(source)
    [lease] = worker.await_all(1)
    source.put([free])
    worker.exchange(want=Want(0))
    moved = move(source, target)
    assert held.id not in found(target)
    assert moved.consumers == 1
    assert worker.settle(lease, Outcome.RELEASE)
    source.detach(worker.id)
    move(source, target)
    assert found(target).keys() == {held.id, free.id}


def test_a_round_trip_keeps_what_can_be_kept(tmp_path: Path, source: RabbitBroker) -> None:
    # laws 9, 10, 11
    with (
        contextlib.closing(open_broker(f"lmdb://{tmp_path}/one")) as one,
        contextlib.closing(open_broker(f"lmdb://{tmp_path}/two")) as two,
    ):
        worker = LiveOwner(one)
        failed, kicked, lost, retried = job(retries=0), job(retries=0), job(), job()
        one.put([failed, kicked, lost, retried])
        leases = worker.take(4)
        worker.settle(leases[0], Outcome.RETRY, error="broken")
        worker.settle(leases[1], Outcome.RETRY, error="once")
        worker.settle(leases[3], Outcome.RETRY, error="later", delay=100.0)
        one.release(worker.id, None)  # nobody saw what ran
        one.kick([kicked.id])
        over = job(expires=0.5)
        own = job(id="order-1", priority=7, expires=1000.0, tags=("t",), headers={"h": "1"})
        one.put([own, over, job(at=time.time() + 500), message("m", delay=50.0)])
        time.sleep(0.6)
        one.tick()
        one.kick([over.id])  # it may run at any time now
        before = found(one)
        # when
        assert move(one, source).left == {}
        moved = move(source, two)
        # then
        assert (moved.done, moved.repeated, moved.remaining) == (len(before), 0, 0)
        after = found(two)
        for job_id, was in before.items():
            now = after[job_id]
            assert (now.state, now.rank, now.losses) == (was.state, was.rank, was.losses)
            assert now.due == pytest.approx(was.due, abs=0.02)
            assert now.finished == pytest.approx(was.finished, abs=1)
            assert now.expires == pytest.approx(was.expires, abs=0.01)
            assert now.envelope.body == was.envelope.body
            assert now.envelope.tags == was.envelope.tags
            assert now.envelope.headers == was.envelope.headers
        counted = {lost.id: 0, retried.id: 1, failed.id: 1, kicked.id: 0, own.id: 0}
        assert {job_id: after[job_id].attempt for job_id in counted} == counted
        assert [after[j.id].error for j in (failed, kicked, retried)] == ["broken", "once", "later"]
        assert after[lost.id].losses == 1
        with pytest.raises(StoreMoved, match="itself, and runs nothing"):
            move(two, one)
        assert "moves_to" not in two.info()


def test_jobs_that_the_server_cannot_hold_are_counted_by_kind(
    tmp_path: Path, source: RabbitBroker
) -> None:
    with contextlib.closing(open_broker(f"lmdb://{tmp_path}/one")) as one:
        worker = LiveOwner(one)
        one.put([job("f", key="k", retries=0)])
        worker.settle(worker.take(1)[0], Outcome.FAIL, error="no")
        one.put([job(), job(key="k"), job("a#b"), job("a*b")])
        said = "2 jobs of a queue with [*] or # in its name, 1 jobs with a key; finish"
        with pytest.raises(InvalidOption, match=said):
            move(one, source)
        moved = move(one, source, leave=True)
        assert moved.gone == 1
        place = cursor_message("p", "m", "1").home
        assert "x-expires" not in place.arguments  # given again after months it does nothing, too
        assert move(one, source, leave=True).gone == 0
        assert moved.left == {
            "failed jobs with a key": 1,
            "jobs with a key": 1,
            "jobs of a queue with * or # in its name": 2,
        }


def test_pauses_and_bounds_of_queues_are_not_dropped_in_silence(
    tmp_path: Path, source: RabbitBroker
) -> None:
    with contextlib.closing(open_broker(f"lmdb://{tmp_path}/one")) as one:
        held, free = job("held"), job("free")
        one.put([held, free])
        one.set_queue("held", paused=True)
        one.set_queue("free", max_size=10)
        with_limits(one, "limits").set_limit("free", LimitSettings(concurrency=1), queue=True)
        said = "1 limits of queues, 1 paused queues, 1 queues with max_size; finish"
        with pytest.raises(InvalidOption, match=said):
            move(one, source)
        moved = move(one, source, leave=True)
        assert moved.gone == 1
        assert moved.left == {
            "jobs of a paused queue": 1,
            "limits of queues": 1,
            "queues with max_size": 1,
        }
    assert {r.envelope.id for t in carried_jobs(source).take() for r in t.records} == {free.id}


def test_between_two_servers_or_prefixes(source: RabbitBroker) -> None:
    jobs = [job(), job(delay=60.0), message("m")]
    source.put(jobs)
    with contextlib.closing(open_rabbit(rabbitmq_url(), _prefix(), queues="classic")) as other:
        moved = move(source, other)
        assert (moved.done, moved.remaining) == (3, 0)
        assert carried_jobs(other).remains().jobs == 3
        by_name = rabbitmq_url().replace("127.0.0.1", "localhost")
        same = open_rabbit(by_name, source._settings.prefix, queues="classic")
        with contextlib.closing(same), pytest.raises(InvalidOption, match="the same"):
            move(source, same)
        quorum = open_rabbit(rabbitmq_url(), other._settings.prefix)
        with contextlib.closing(quorum):  # the url says other queues than those that are there
            back = move(quorum, source)
        assert (back.done, back.remaining) == (3, 0)


def test_nothing_goes_where_it_would_end_with_this_process(source: RabbitBroker) -> None:
    with pytest.raises(FeatureMissing, match="a move from amqp:// needs the feature durable"):
        move(source, open_broker("memory://"))


def test_a_visit_leaves_no_socket_when_pika_cannot_close_its_connection(
    source: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ChannelWrongStateError

    with short_connection.short_connection(source._settings) as server:
        connection: Any = server._connection
        sock = connection._impl._transport._sock
        monkeypatch.setattr(connection, "close", refuse)
    assert sock.fileno() == -1


def test_a_walk_returns_messages_that_arrive_after_a_silence(source: RabbitBroker) -> None:
    # given three failed jobs, and a connection that brings no message for three seconds
    source.put([job(id=f"j{n}") for n in range(3)])
    worker = LiveOwner(source)
    for lease in worker.await_all(3):
        assert worker.settle(lease, Outcome.FAIL, error="no")
    eventually(lambda: len(source.find(FAILED, 10).records) == 3, "the failed jobs")
    with short_connection.short_connection(source._settings) as server:
        hear, silent_until = server._hear, time.monotonic() + 3

        def hear_later(left: float) -> None:
            if left and time.monotonic() < silent_until:
                time.sleep(left)
            else:
                hear(left)

        server._hear = hear_later
        # then a walk still returns all of them
        assert len(server.take(source._writer.failed, 10)) == 3
