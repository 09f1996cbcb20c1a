"""The credit of owners on RabbitMQ: an owner gets the messages that it uses, others the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import eventually
from rabbitmq_desk import LiveOwner, ids_of, job, message

from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.rabbitmq import RabbitBroker, claim
from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection import Delivery
from tidemill.brokers.rabbitmq.claim import AttachedOwner
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
