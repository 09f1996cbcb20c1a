"""The laws as far as leases show them, in real time; most for a broker without inspection."""

from __future__ import annotations

import time

import pytest
from broker_driver import LiveOwner, ids_of, job, message
from kinds import KINDS, Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.core.job import Outcome, Verdict

pytestmark = pytest.mark.moving_clock
WITHOUT_A_CLOCK = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.fake], ids=lambda kind: kind.name
)
"""On the other brokers, other files prove the same by a clock that the test moves."""

SOON = 0.15
"""A delay in seconds, which the tests really wait for."""

ENDS = [Outcome.SUCCESS, Outcome.FAIL, Outcome.CANCELLED, Outcome.EXPIRED]


@WITHOUT_A_CLOCK
@pytest.mark.parametrize("end", ENDS)
def test_an_ended_job_is_never_leased_again(
    broker: Broker, worker: LiveOwner, end: Outcome
) -> None:
    # law 3
    broker.put([job()])
    [lease] = worker.take()
    assert worker.settle(lease, end)
    assert not worker.settle(lease, end)
    assert worker.take() == []
    broker.detach(worker.id)
    assert LiveOwner(broker, "w2").take() == []


@WITHOUT_A_CLOCK
@pytest.mark.parametrize("later", list(Outcome))
def test_a_lost_lease_changes_nothing(broker: Broker, worker: LiveOwner, later: Outcome) -> None:
    # law 4, case S4
    given = job()
    broker.put([given])
    [lease] = worker.take()
    assert worker.settle(lease, Outcome.RELEASE)
    [again] = worker.await_all(1)
    # when
    assert not worker.settle(lease, later, delay=0.0, followers=(job(id="late"),))
    assert not worker.touch(lease)
    # then
    assert (again.open().id, again.attempt) == (given.id, 1)
    assert worker.settle(again)
    assert worker.take() == []


@WITHOUT_A_CLOCK
def test_retries_are_counted_and_finite(broker: Broker, worker: LiveOwner) -> None:
    # law 7, case T3: retries=2 means exactly 3 runs
    broker.put([job(retries=2)])
    for number in (1, 2, 3):
        [lease] = worker.await_all(1)
        assert lease.attempt == number
        assert worker.settle(lease, Outcome.RETRY, error=f"no {number}")
    assert worker.take() == []


@WITHOUT_A_CLOCK
def test_a_released_job_stays_in_its_first_attempt(broker: Broker, worker: LiveOwner) -> None:
    # law 6
    broker.put([job(retries=0)])
    for outcome, delay in ((Outcome.RELEASE, 0.0), (Outcome.SNOOZE, 0.1), (Outcome.RELEASE, 0.1)):
        [lease] = worker.await_all(1)
        assert lease.attempt == 1
        assert worker.settle(lease, outcome, delay=delay)
    assert worker.await_all(1)[0].attempt == 1


@pytest.mark.parametrize("how", ["put", "at", "retry", "snooze", "release", "follower"])
def test_nothing_comes_before_it_is_due(broker: Broker, worker: LiveOwner, how: str) -> None:
    # law 9, case Q14
    asked = time.monotonic() + SOON
    if how == "put":
        broker.put([job(delay=SOON)])
    elif how == "at":
        broker.put([job(at=time.time() + SOON)])
    else:
        broker.put([job()])
        [lease] = worker.take()
        asked = time.monotonic() + SOON
        if how == "follower":
            assert worker.settle(lease, followers=(job(delay=SOON),))
        else:
            assert worker.settle(lease, Outcome[how.upper()], delay=SOON)
    [late] = worker.take() or worker.await_all(1)
    # the wall's clock and the machine's differ a little
    assert asked <= time.monotonic() + 0.02 < asked + 20
    assert late.attempt == (2 if how == "retry" else 1)


def test_the_due_come_by_their_time_whatever_was_put_first(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # case S2: nothing waits behind what is due later
    second = 100 if clock.fake else 1
    jobs = [job(delay=delay * second) for delay in (3.0, 0.1, 1.5)]
    broker.put(jobs)
    taken = []
    for passed in (0.2, 1.4, 1.5):
        if clock.fake:
            clock.advance(passed * second)
        taken += worker.await_all(1)
    assert [lease.open().id for lease in taken] == ids_of([jobs[1], jobs[2], jobs[0]])


@pytest.mark.parametrize("mode", [Mode.FAIR, Mode.STRICT])
def test_high_comes_before_normal_before_low(broker: Broker, worker: LiveOwner, mode: Mode) -> None:
    # law 10, case T13
    jobs = [job(priority=priority) for priority in (-7, 0, 7) * 5]
    broker.put(jobs)
    taken = [worker.await_all(1, mode=mode)[0].open().id for _ in jobs]
    assert taken == ids_of([*jobs[2::3], *jobs[1::3], *jobs[0::3]])


@WITHOUT_A_CLOCK
@pytest.mark.parametrize("queues", [("a", "b", "c"), ()])
def test_no_queue_is_starved(broker: Broker, worker: LiveOwner, queues: tuple[str, ...]) -> None:
    # law 10
    for queue in "abc":
        broker.put([job(queue) for _ in range(150)])
    served, done, until = list[str](), list[Verdict](), time.monotonic() + 60
    all_there = False  # what a broker pushes is on its way for a while, of one queue longer
    while len(served) < 45 or not all_there:
        assert time.monotonic() < until
        if not all_there and {*served} == {*"abc"}:
            all_there, served = True, []
        reply = worker.exchange(verdicts=done, want=Want(1, queues))
        done = [Verdict(lease.token, Outcome.SUCCESS) for lease in reply.leases]
        served += [lease.open().queue for lease in reply.leases]
        if not reply.leases:
            broker.wait(worker.id, min(1.0, reply.next_due))
    assert min(served.count(queue) for queue in "abc") >= 7


@WITHOUT_A_CLOCK
def test_a_released_job_returns_to_the_front(broker: Broker, worker: LiveOwner) -> None:
    # law 10
    jobs = [job() for _ in range(6)]
    broker.put(jobs)
    leases = worker.await_all(3)
    assert [lease.open().id for lease in leases] == ids_of(jobs[:3])
    broker.detach(worker.id)
    taken = [lease.open().id for lease in LiveOwner(broker, "w2").await_all(6)]
    assert taken == ids_of(jobs)


@WITHOUT_A_CLOCK
def test_an_unacknowledged_message_goes_to_another_owner(
    broker: Broker, consumer: LiveOwner
) -> None:
    # case Q16, case S3: also when its holder never comes back
    given = message(ttr=6.0)
    broker.put([given])
    began = time.monotonic()
    [lease] = consumer.take()
    assert lease.attempt == 1
    # when
    other = LiveOwner(broker, "c2", "consumer")
    assert other.take() == []
    [again] = other.await_all(1)
    # then
    assert 5.95 < time.monotonic() - began < 30
    assert (again.open().id, again.attempt) == (given.id, 2)
    assert not consumer.settle(lease)
    assert other.settle(again)
    assert other.take() == consumer.take() == []


@WITHOUT_A_CLOCK
def test_touch_keeps_a_message(broker: Broker, consumer: LiveOwner) -> None:
    # case Q16
    broker.put([message(ttr=6.0)])
    [lease] = consumer.take()
    for _ in range(3):
        time.sleep(2.2)
        assert consumer.touch(lease)
    assert LiveOwner(broker, "c2", "consumer").take() == []
    assert consumer.settle(lease)


@WITHOUT_A_CLOCK
def test_a_message_may_be_taken_so_often_and_no_more(broker: Broker, consumer: LiveOwner) -> None:
    # law 7
    broker.put([job(task="", ttr=0.2, retries=1)])
    assert [consumer.await_all(1)[0].attempt for _ in range(2)] == [1, 2]
    time.sleep(0.3)
    assert consumer.take() == []


@WITHOUT_A_CLOCK
def test_a_held_retry_is_nobodys_before_the_second_verdict(
    broker: Broker, worker: LiveOwner
) -> None:
    # law 8
    broker.put([job()])
    [lease] = worker.take()
    assert worker.settle(lease, Outcome.RETRY, error="stuck", hold=True)
    other = LiveOwner(broker, "w2")
    assert worker.take() == other.take() == []
    assert worker.settle(lease, Outcome.RELEASE)
    assert not worker.settle(lease, Outcome.RELEASE)
    assert worker.await_all(1)[0].attempt == 2


@WITHOUT_A_CLOCK
def test_a_held_last_attempt_is_the_end(broker: Broker, worker: LiveOwner) -> None:
    # law 8
    broker.put([job(retries=0)])
    [lease] = worker.take()
    assert worker.settle(lease, Outcome.RETRY, hold=True)
    assert not worker.settle(lease, Outcome.RELEASE)
    assert worker.take() == []


@WITHOUT_A_CLOCK
def test_an_expired_job_is_not_leased(broker: Broker, worker: LiveOwner) -> None:
    # case T14
    broker.put([job(expires=0.1), job(expires=0.1, delay=0.2), job("now", expires=30.0)])
    time.sleep(0.3)
    assert [lease.open().queue for lease in worker.await_all(1)] == ["now"]
    assert worker.take() == []


@WITHOUT_A_CLOCK
def test_followers_come_with_the_end_of_the_first(broker: Broker, worker: LiveOwner) -> None:
    # law 3
    first, second, third = job(), job("other"), job()
    broker.put([first])
    [lease] = worker.take()
    assert worker.take() == []
    assert worker.settle(lease, followers=(second, third))
    assert {lease.open().id for lease in worker.await_all(2)} == {second.id, third.id}


@WITHOUT_A_CLOCK
def test_a_released_job_goes_to_another_owner(broker: Broker, worker: LiveOwner) -> None:
    # nothing that was handed out in advance stays with who has stopped to ask
    jobs = [job() for _ in range(8)]
    broker.put(jobs)
    mine = [worker.await_all(1)[0], worker.await_all(1)[0]]
    other = LiveOwner(broker, "w2")
    theirs = other.await_all(6)
    assert {lease.open().id for lease in [*mine, *theirs]} == set(ids_of(jobs))
