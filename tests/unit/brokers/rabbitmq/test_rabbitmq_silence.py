"""Queues of RabbitMQ that do not answer: the cost for other queues."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import eventually
from rabbitmq_desk import LiveOwner, job, leaderless, put_until
from servers import RabbitMQ

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.brokers.rabbitmq.amqp import channel, topology

Open = Callable[..., RabbitBroker]


@pytest.fixture
def url(server: RabbitMQ) -> str:
    return server.url


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not begin within a second does not answer."""
    monkeypatch.setattr(topology, "_SILENT", 1.0)
    monkeypatch.setattr(channel, "_PAUSE", 0.2)


@pytest.mark.usefixtures("hasty")
def test_a_queue_without_a_leader_keeps_nothing_of_others_in_its_workers_hands(
    server: RabbitMQ,
    open_one: Open,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # law 5: as one has none for ever whose server was killed while it was made
    producer, broker = open_one(), open_one()
    producer.put([job("mute"), job("well"), job("well")])
    mute = f"{prefix}.tasks.normal.mute"
    with leaderless(server, mute):
        assert mute in server.leaderless()
        worker, other = LiveOwner(broker), LiveOwner(producer, "w2")
        ended, running = worker.await_all(2, queues=("mute", "well"))
        eventually(lambda: f"the queue {mute} does not answer" in caplog.text, "that")
        # what has ended the server hears of, and what was handed out it still knows
        assert worker.settle(ended)
        eventually(lambda: [one.messages for one in server.holders()] == [1], "one of two in hand")
        assert broker._owners[worker.id]._channel.era == 0
        # what the worker held when it vanished is for others at once
        thread = broker._in
        connect = thread._connect
        monkeypatch.setattr(thread, "_connect", lambda: None)  # else it may be back too soon
        thread.do(lambda: thread.cut("it vanished"))
        (again,) = other.await_all(1, queues=("well",))
        assert again.open().id == running.open().id
    thread.do(connect)
    # its log has lost what the producer's channel sent before
    open_one().put([last := job("mute")])
    (lease,) = worker.await_all(1, queues=("mute",))
    assert lease.open().id == last.id


def test_the_line_that_the_server_closes_on_who_has_waited_for_too_long_is_not_that_of_a_worker(
    server: RabbitMQ,
    open_one: Open,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # law 5: all that is held over such a line is the server's again
    producer, broker = open_one(), open_one()
    producer.put([job("mute"), job("well")])
    mute = f"{prefix}.tasks.normal.mute"
    with leaderless(server, mute), waiting(server, 1):
        worker = LiveOwner(broker)
        (lease,) = worker.await_all(1, queues=("mute", "well"))
        eventually(lambda: f"the queue {mute} does not answer" in caplog.text, "that")
        channel = broker._owners[worker.id]._channel
        assert channel.sync(30)
        assert (broker._in.connects, channel.era) == (1, 0)
        assert worker.settle(lease)


@pytest.mark.parametrize(("free", "asked"), [(True, True), (False, False)])
def test_each_queue_is_asked_first_where_that_costs_no_message(
    open_one: Open, monkeypatch: pytest.MonkeyPatch, free: bool, asked: bool
) -> None:
    # law 7: what was handed out ten times is suspect
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.topology._PROMPT", 1e9)
    if not free:
        monkeypatch.setattr(topology, "_KNOW_CREDIT", ())
    broker = open_one()
    broker.put([job()])
    worker = LiveOwner(broker)
    probed = list[str]()
    begun = topology.Declarer._begun

    def note(declarer: topology.Declarer, errand: Any, *said: Any) -> None:
        probed.append(errand.place.name)
        begun(declarer, errand, *said)

    monkeypatch.setattr(topology.Declarer, "_begun", note)
    worker.await_all(1)
    (hold,) = broker._owners[worker.id]._held.values()
    assert (hold.state.place.name in probed) is asked
    assert hold.job.deliveries == 0


@contextlib.contextmanager
def waiting(server: RabbitMQ, seconds: int) -> Iterator[None]:
    """The server lets nobody wait for a queue for longer, instead of 65 s."""
    server.eval(f"application:set_env(kernel, net_ticktime, {seconds - 5})")
    try:
        yield
    finally:
        server.eval("application:unset_env(kernel, net_ticktime)")


def test_a_queue_that_does_not_answer_holds_up_no_other(
    server: RabbitMQ,
    open_one: Open,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # as one does whose log was lost with its server
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.topology._SILENT", 1.0)
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.channel._PAUSE", 0.2)
    producer, broker, urgent, plain = open_one(), open_one(), job(priority=5), job()
    producer.put([urgent, plain, job("other")])
    worker = LiveOwner(broker)
    (running,) = worker.await_all(1, queues=("other",))
    channel = broker._owners[worker.id]._channel
    era = channel.era
    high = f"'%2F_{prefix}.tasks.high.default'"
    server.eval(f"sys:suspend({high})")
    try:
        (lease,) = worker.await_all(1, queues=("default",))
        eventually(lambda: "does not answer" in caplog.text, "the end of patience")
        # law 5: what runs is not the server's meanwhile, which would hand it to others
        assert channel.sync(30)
        assert channel.era == era
        assert worker.settle(running)
    finally:
        server.eval(f"sys:resume({high})")
    assert lease.open().id == plain.id
    assert f"the queue {prefix}.tasks.high.default does not answer" in caplog.text
    assert worker.settle(lease)
    # and when it answers again, its jobs come
    (lease,) = worker.await_all(1, queues=("default",))
    assert lease.open().id == urgent.id


def test_a_late_answer_of_a_queue_breaks_no_connection(
    server: RabbitMQ,
    open_one: Open,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # law 5: else what was taken meanwhile would run twice
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.channel.BEGINS_WITHIN", 1.0)
    near, far = open_one(), open_one()
    worker, other = LiveOwner(near), LiveOwner(far, "w2")
    near.put([job("hangs"), job("well")])
    (first,) = worker.await_all(1, queues=("hangs",))
    assert worker.settle(first)
    near.put([job("hangs") for _ in range(8)])
    hangs = f"{prefix}.tasks.normal.hangs"
    channel, told = near._owners[worker.id]._channel, list[bool]()
    server.eval(f"sys:suspend('%2F_{hangs}')")
    try:
        # given: a channel that waits for a queue, and is asked more until it is left
        left: Any = channel._channel
        here = worker.exchange(want=Want(8, ("hangs",))).leases
        eventually(lambda: not all(one.known for _, one in list(channel._whose.values())), "a wait")
        channel._thread.do(lambda: channel.round_trip(told.append))
        eventually(lambda: f"the queue {hangs} does not answer" in caplog.text, "the end")
        assert told == [False]
        (lease,) = worker.await_all(1, queues=("well",))
        assert not other.take(queues=("well",))
        connects, era = near._in.connects, channel.era
    finally:
        server.eval(f"sys:resume('%2F_{hangs}')")
    # when it has answered
    eventually(lambda: left.is_closed, "the end of the channel")
    # then
    assert channel.sync(30)
    assert (near._in.connects, channel.era) == (connects, era)
    assert worker.touch(lease)
    assert not other.take(queues=("well",))
    assert worker.settle(lease)
    worker.await_all(8 - len(here), queues=("hangs",))


def test_a_queue_that_does_not_say_whether_it_is_there_holds_up_no_other(
    server: RabbitMQ, open_one: Open, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: a classic queue that hangs, and nobody who gives up asking for it
    monkeypatch.setattr("tidemill.brokers.rabbitmq.amqp.topology._SILENT", 1e9)
    first = job(queue="hangs")
    open_one(queues="classic").put([first])
    name = f"{prefix}.tasks.classic.hangs"
    queue = f'{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{name}">>))'
    server.eval(queue, "sys:suspend(amqqueue:get_pid(Q))")
    try:
        # when: somebody who does not know the queues yet takes from both, and puts into both
        broker = open_one(queues="classic")
        worker = LiveOwner(broker)
        assert not worker.exchange(want=Want(1, ("hangs", "well"))).leases
        stuck = threading.Thread(target=put_until, args=(broker, [job(queue="hangs")]))
        stuck.start()
        other = job(queue="well")
        broker.put([other])
        (lease,) = worker.await_all(1, queues=("hangs", "well"))
        assert lease.open().id == other.id
    finally:
        server.eval(queue, "sys:resume(amqqueue:get_pid(Q))")
    stuck.join(30)
    (lease,) = worker.await_all(1, queues=("hangs", "well"))
    assert lease.open().id == first.id
