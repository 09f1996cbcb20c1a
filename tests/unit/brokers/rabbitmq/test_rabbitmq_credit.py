"""The credit of owners on RabbitMQ: an owner gets the messages that it uses, others the rest."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from harness import eventually
from rabbitmq_desk import LiveOwner, ids_of, job, message

from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.rabbitmq import RabbitBroker, claim
from tidemill.brokers.rabbitmq.amqp import topology
from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection import Delivery
from tidemill.brokers.rabbitmq.claim import AttachedOwner
from tidemill.brokers.rabbitmq.queue_state import Consumer, Stage, in_hand, plan
from tidemill.core.job import Outcome, Verdict
from tidemill.errors import BrokerUnavailable

QUEUE = ("default",)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not wanted goes back soon."""
    monkeypatch.setattr(claim, "UNWANTED", 0.05)


def intake_of(broker: RabbitBroker, hand: LiveOwner) -> AttachedOwner:
    return broker._owners[hand.id]


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the messages that consumers brought."""
    tags: list[int] = []
    delivered = ConsumerChannel._delivered

    def heard(channel: ConsumerChannel, deliveries: list[Delivery]) -> None:
        tags.extend(tag for _, tag, *_ in deliveries)
        delivered(channel, deliveries)

    monkeypatch.setattr(ConsumerChannel, "_delivered", heard)
    return tags


def in_hand_of(broker: RabbitBroker, hand: LiveOwner) -> int:
    """How many messages the server has handed to an owner, that are not answered."""
    return len(intake_of(broker, hand)._channel._acknowledgements.open)


def rests(broker: RabbitBroker, hand: LiveOwner) -> bool:
    """Whether no more may come than what it has leased."""
    states = intake_of(broker, hand)._all()
    return all(one.credit == one.held and not len(one) for one in states)


# -- which consumers there are ------------------------------------------------------------------


def consumers_of(*given: tuple[int, int, Stage]) -> list[Consumer]:
    made = []
    for prefetch, hand, stage in given:
        made.append(Consumer(f"c{len(made)}", prefetch, stage))
        made[-1].in_hand = hand
    return made


def test_a_consumer_with_too_much_credit_ends_before_another_begins() -> None:
    roomy, full = consumers_of((8, 1, Stage.BEGUN), (2, 2, Stage.BEGUN))
    assert plan([roomy, full], 4) == ([roomy], 0)
    roomy.stage = Stage.ENDING
    assert plan([roomy, full], 4) == ([], 0)
    roomy.stage = Stage.ENDED
    assert plan([roomy, full], 4) == ([], 1)


@pytest.mark.parametrize("seed", range(5))
def test_in_the_end_the_server_may_push_what_there_is_credit_for(seed: int) -> None:
    # law 10: whatever came before; and there are not too many consumers
    chance = random.Random(seed)
    consumers: list[Consumer] = []
    for _ in range(300):
        credit = chance.choice([1, 3, 8, 60, 900, 4096])
        for _ in range(chance.randrange(40)):  # jobs end
            if holding := [one for one in consumers if one.in_hand]:
                chance.choice(holding).in_hand -= 1
        for step in range(100):
            ends, begins = plan(consumers, credit, trim=not step)
            if not (ends or begins):
                break
            for one in ends:
                one.stage = Stage.ENDED
            if begins:
                consumers.append(Consumer("", begins))
        else:
            pytest.fail("it never settles")
        room = sum(one.room for one in consumers)
        missing = max(0, credit - in_hand(consumers))
        assert missing <= room <= missing + credit // 64
        assert sum(one.stage is Stage.BEGUN for one in consumers) < 150
        for one in consumers:
            one.in_hand += chance.randint(0, one.room)
        consumers = [one for one in consumers if one.in_hand or one.stage is not Stage.ENDED]


# -- what comes ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_a_worker_with_long_jobs_is_brought_no_job_that_waits(
    broker: RabbitBroker, brought: list[int]
) -> None:
    # law 10: else jobs wander between workers, and go to the end
    jobs = [job() for _ in range(30)]
    broker.put(jobs)
    worker = LiveOwner(broker)
    leases = worker.await_all(8, queues=QUEUE)
    # when: it can run four, and gives back the others
    verdicts = [Verdict(lease.token, Outcome.RELEASE) for lease in leases[4:]]
    worker.exchange(verdicts=verdicts, want=Want(0, QUEUE))
    ran = leases[:4]
    for done in range(10):
        eventually(lambda: rests(broker, worker), "rest")
        assert in_hand_of(broker, worker) == 4
        assert len(brought) == 8 + done
        want = Want(1, QUEUE)
        ended = Verdict(ran[done].token, Outcome.SUCCESS)
        reply = worker.exchange(verdicts=[ended], want=want)
        ran += reply.leases or worker.await_all(1, queues=QUEUE)
    # then: in their order, and the next is anybody's
    assert [lease.open().id for lease in ran] == ids_of(jobs)[:14]
    other = LiveOwner(broker, "w2")
    assert other.await_all(1, queues=QUEUE)[0].open().id == jobs[14].id


@pytest.mark.usefixtures("at_once")
def test_of_several_queues_nothing_comes_that_is_not_run(
    broker: RabbitBroker, brought: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 10: they have their turns one after the other, and what comes in vain goes to the end
    monkeypatch.setattr(topology, "_SLOW", 60.0)  # a busy server has time to say what it has
    queues = ("a", "b", "c")
    jobs = {queue: [job(queue=queue) for _ in range(8)] for queue in queues}
    broker.put([one for queue in queues for one in jobs[queue]])
    worker = LiveOwner(broker)
    ran = worker.await_all(2, queues=queues)
    # when: it can run two at a time, and each takes long
    for done in range(12):
        eventually(lambda: rests(broker, worker), "rest")
        assert len(brought) == in_hand_of(broker, worker) + done == 2 + done
        ended = Verdict(ran[done].token, Outcome.SUCCESS)
        reply = worker.exchange(verdicts=[ended], want=Want(1, queues))
        ran += reply.leases or worker.await_all(1, queues=queues)
    # then: each queue had its turns, in its order
    for queue in queues:
        mine = [env.id for env in (lease.open() for lease in ran) if env.queue == queue]
        assert 4 <= len(mine) <= 6
        assert mine == ids_of(jobs[queue])[: len(mine)]


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_ends_its_last_jobs_is_brought_no_more(
    broker: RabbitBroker, brought: list[int]
) -> None:
    # law 6: a graceful end costs nothing
    broker.put([job() for _ in range(10)])
    worker = LiveOwner(broker)
    leases = worker.await_all(4, queues=QUEUE)
    eventually(lambda: rests(broker, worker), "rest")
    seen = len(brought)
    for lease in leases[:3]:
        worker.exchange(verdicts=[Verdict(lease.token, 0)], want=Want(0, QUEUE))
    assert intake_of(broker, worker)._channel.sync(30)
    assert len(brought) == seen
    assert in_hand_of(broker, worker) == 1


def test_messages_of_a_closed_channel_belong_to_the_server(broker: RabbitBroker) -> None:
    # law 5: its tag means another message on the channel that took its place
    broker.put([job() for _ in range(4)])
    worker = LiveOwner(broker)
    worker.await_all(2, queues=QUEUE)
    channel, late = intake_of(broker, worker)._channel, list[int]()
    deliveries = [(name, 99, False, b"", b"") for name in channel._whose]
    over = threading.Event()

    def leave() -> None:
        pikas: Any = channel._channel
        channel.lost()
        channel._delivered(deliveries)
        late.extend(channel._acknowledgements.open)
        pikas.close()
        channel._reopen(pikas)
        over.set()

    channel._thread.do(leave)
    assert over.wait(30)
    assert deliveries
    assert not late
    assert len(worker.await_all(2, queues=QUEUE)) == 2  # and it goes on


def test_an_answer_over_a_closed_channel_is_dropped(broker: RabbitBroker) -> None:
    # law 5: it says nothing of what was asked over the channel that took its place
    broker.put([job()])
    worker = LiveOwner(broker)
    (lease,) = worker.await_all(1, queues=QUEUE)
    channel, state = intake_of(broker, worker)._channel, intake_of(broker, worker)._all()[0]
    early, late, heard = list[Any](), list[Any](), list[Any]()
    over = threading.Event()

    def leave() -> None:
        left: Any = channel._channel
        channel._ask(state, early.append)
        channel.round_trip(early.append)
        left.basic_qos(prefetch_count=1, callback=lambda _: go_on(left))
        channel.lost()
        channel._asked.append((state, late.append))
        channel._syncing.append(late.append)

    def go_on(left: Any) -> None:
        heard.extend(late)
        channel._asked.clear()
        channel._syncing.clear()
        left.close()
        channel._reopen(left)
        over.set()

    channel._thread.do(leave)
    assert over.wait(30)
    assert early == [None, False]
    assert not heard
    eventually(lambda: worker.touch(lease), "its message to come back")
    assert worker.settle(lease)


def test_a_worker_that_needs_less_prefetches_less(broker: RabbitBroker) -> None:
    # law 10: what one worker does not run soon another may
    broker.put([job() for _ in range(3000)])
    worker, held = LiveOwner(broker), list[Any]()
    held += worker.await_all(10, queues=QUEUE)

    def busy() -> bool:
        """All but one end, one is wanted, two are held; and so on."""
        verdicts = [Verdict(lease.token, 0) for lease in held[1:]]
        del held[1:]
        held.extend(worker.exchange(verdicts=verdicts, want=Want(1, QUEUE)).leases)
        return all(one.credit <= 2 for one in intake_of(broker, worker)._all())

    eventually(busy, "less credit")
    assert intake_of(broker, worker)._channel.sync(30)
    assert in_hand_of(broker, worker) <= 2


def test_after_a_break_what_runs_comes_back_and_no_more(broker: RabbitBroker) -> None:
    # law 5
    broker.put([job() for _ in range(10)])
    worker = LiveOwner(broker)
    leases = worker.await_all(4, queues=QUEUE)
    eventually(lambda: rests(broker, worker), "rest")
    thread = broker._in
    connects = thread.connects
    thread.do(lambda: thread._connection.close())
    eventually(lambda: thread.connects > connects, "another line")
    eventually(lambda: all(worker.touch(lease) for lease in leases), "what runs")
    eventually(lambda: rests(broker, worker), "rest")
    assert in_hand_of(broker, worker) == 4
    assert sum(one.held for one in intake_of(broker, worker)._all()) == 4
    assert all(worker.settle(lease) for lease in leases)


def test_a_sleeper_asks_again_for_empty_queues_after_a_reconnect(broker: RabbitBroker) -> None:
    # law 9: until it does nothing less urgent comes
    worker, thread = LiveOwner(broker), broker._in
    states = intake_of(broker, worker)._all

    def sleeps() -> bool:
        worker.exchange(want=Want(1, QUEUE))
        return all(one.empty for one in states())

    eventually(sleeps, "an empty queue")
    wake_up = intake_of(broker, worker).wake_up
    assert not wake_up._news
    connects = thread.connects
    thread.do(lambda: thread._connection.close())
    eventually(lambda: thread.connects > connects, "another line")
    eventually(lambda: wake_up._news, "the bell")


# -- asking for one -----------------------------------------------------------------------------


@pytest.fixture
def answers_late(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The server's answers, each of which is heard when it is called; the first comes at once."""
    late: list[Callable[[], None]] = []
    get, asked = ConsumerChannel.get, list[int]()

    def ask(channel: ConsumerChannel, state: Any, then: Callable[[Any], None]) -> None:
        def heard(got: Any) -> None:
            asked.append(1)
            if len(asked) == 1 and got:
                then(got)
            else:
                late.append(lambda: then(got))

        get(channel, state, heard)

    monkeypatch.setattr(ConsumerChannel, "get", ask)
    monkeypatch.setattr(claim, "ANSWER_WITHIN", 0.5)
    return late


def wanting(count: int) -> Want:
    return Want(count, QUEUE, Mode.STRICT, tasks=False, messages=True, sleep=False)


def test_messages_taken_before_the_server_fell_silent_are_handed_out(
    broker: RabbitBroker, answers_late: list[Callable[[], None]]
) -> None:
    # law 2: what is leased is told
    given = [message(rank=0), message(rank=0)]
    broker.put(given)
    consumer = LiveOwner(broker, "c1", "consumer")
    reply = consumer.exchange(want=wanting(2))
    assert [lease.open().id for lease in reply.leases] == ids_of(given[:1])
    assert consumer.settle(reply.leases[0])


def test_a_message_that_comes_when_nobody_waits_for_it_any_more_goes_back(
    broker: RabbitBroker, answers_late: list[Callable[[], None]]
) -> None:
    # law 2: nobody would run it
    given = [message(rank=0), message(rank=0)]
    broker.put(given)
    consumer = LiveOwner(broker, "c1", "consumer")
    consumer.exchange(want=wanting(1))
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        consumer.exchange(want=wanting(1))
    # when
    eventually(lambda: answers_late, "the answer")
    broker._in.do(answers_late[0])
    # then
    other = LiveOwner(broker, "c2", "consumer")
    assert other.await_all(1, queues=QUEUE)[0].open().id == given[1].id
