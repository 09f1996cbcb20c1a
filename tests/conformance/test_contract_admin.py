"""Acting on jobs and queues by hand: cancel, retry, delete, purge, pause, command."""

from __future__ import annotations

import re

import pytest
from broker_driver import LiveOwner, everything, ids_of, job, message, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.core.job import NOT_STARTED, Command, Outcome, State


def in_every_state(broker: Broker, worker: LiveOwner, clock: Clock) -> dict[State, str]:
    """One job in each state; the id of each. The running one is ``worker``'s."""
    jobs = {s: job(id=str(s)) for s in State}
    jobs[State.SCHEDULED] = job(id="scheduled", delay=1000)
    jobs[State.EXPIRED] = job(id="expired", expires=1, delay=1000)
    jobs[State.RUNNING] = job(id="running", key="k")
    jobs[State.WAITING] = job(id="waiting", key="k", on_conflict="replace")
    for s, outcome in (
        (State.SUCCEEDED, Outcome.SUCCESS),
        (State.FAILED, Outcome.FAIL),
        (State.CANCELLED, Outcome.CANCELLED),
    ):
        broker.put([jobs[s]])
        worker.settle(worker.take()[0], outcome, error="by hand", result=b"r")
    broker.put([jobs[State.RUNNING]])
    assert worker.take_ids() == ["running"]
    broker.put([jobs[s] for s in (State.WAITING, State.SCHEDULED, State.EXPIRED, State.READY)])
    clock.advance(2)
    broker.tick()
    assert {s: state(broker, envelope.id) for s, envelope in jobs.items()} == {s: s for s in State}
    return {s: envelope.id for s, envelope in jobs.items()}


def test_cancel_in_every_state(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    # law 14, case T14
    ids = in_every_state(broker, worker, clock)
    unfinished = (State.WAITING, State.SCHEDULED, State.READY)
    for s in (*unfinished, State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED):
        done = s in unfinished
        assert broker.cancel([ids[s]]) == [done], s
        assert state(broker, ids[s]) is (State.CANCELLED if done else s)
        assert broker.cancel([ids[s]]) == [False]
    assert broker.cancel(["unknown", ""]) == [False, False]
    assert broker.get(ids[State.READY]).error == "cancelled before it started"
    assert worker.take_ids() == []


def test_cancel_reaches_a_running_job_through_its_owner(broker: Broker, worker: LiveOwner) -> None:
    # law 14
    given = job()
    broker.put([given])
    [lease] = worker.take()
    other = LiveOwner(broker, "w2")
    assert broker.cancel([given.id]) == [True]
    assert broker.get(given.id).cancelling
    assert state(broker, given.id) is State.RUNNING
    assert broker.cancel([given.id], terminate=True) == [True]
    assert other.commands() == []
    assert worker.commands() == [("cancel", lease.token), ("terminate", lease.token)]
    assert worker.commands() == []
    # a retry of a job that is being cancelled ends it
    worker.settle(lease, Outcome.RETRY, delay=5)
    record = broker.get(given.id)
    assert (record.state, record.error) == (State.CANCELLED, "cancelled while it was running")
    # and who asked for it is in the trail
    asked = "cancel was asked for"
    assert [line for _, line in record.log] == [asked, f"{asked}, at once"]


@pytest.mark.parametrize("witness", [False, True])
def test_an_unrun_job_counts_as_cancelled_before_its_start(
    broker: Broker, worker: LiveOwner, witness: bool
) -> None:
    # law 14
    given = job()
    broker.put([given])
    [lease] = worker.take()
    broker.cancel([given.id])
    if witness:
        broker.release(worker.id, {})
    else:
        worker.settle(lease, Outcome.RELEASE, error=NOT_STARTED)
    record = broker.get(given.id)
    assert (record.state, record.error) == (State.CANCELLED, NOT_STARTED)


def test_a_job_that_succeeds_in_spite_of_a_cancel_has_succeeded(
    broker: Broker, worker: LiveOwner
) -> None:
    given = job()
    broker.put([given])
    [lease] = worker.take()
    broker.cancel([given.id])
    worker.settle(lease, result=b"r")
    assert state(broker, given.id) is State.SUCCEEDED


def test_retry_in_every_state(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    ids = in_every_state(broker, worker, clock)
    before = {row.name: (row.failed, row.cancelled, row.expired) for row in broker.stats()}
    retryable = {State.SCHEDULED, State.FAILED, State.CANCELLED, State.EXPIRED}
    for s in State:
        assert broker.retry([ids[s]]) == [s in retryable], s
        assert state(broker, ids[s]) is (State.READY if s in retryable else s)
    assert broker.retry(["unknown", ""]) == [False, False]
    # totals count what happened, and are not taken back
    after = {row.name: (row.failed, row.cancelled, row.expired) for row in broker.stats()}
    assert after == before
    assert len(worker.take_ids()) == 5


def test_a_retried_job_has_fresh_attempts_and_keeps_its_trail(
    broker: Broker, worker: LiveOwner
) -> None:
    given = job(retries=1, expires=1000)
    broker.put([given])
    for _ in range(2):
        worker.settle(worker.take()[0], Outcome.RETRY, error="bad")
    assert state(broker, given.id) is State.FAILED
    # when
    assert broker.retry([given.id]) == [True]
    # then
    record = broker.get(given.id)
    assert (record.state, record.error, record.finished, record.expires) == (State.READY, "", 0, 0)
    assert [a.number for a in record.attempts] == [1, 2]
    assert [line for _, line in record.log] == ["retry was asked for"]
    assert (record.run, record.attempt, record.max_attempts) == (2, 0, 2)
    for number in (1, 2):
        [lease] = worker.take()
        assert lease.attempt == number
        worker.settle(lease, Outcome.RETRY, error="bad again")
    assert state(broker, given.id) is State.FAILED
    shown = [(a.run, a.number) for a in broker.get(given.id).attempts]
    assert shown == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_a_retry_respects_the_key(broker: Broker, worker: LiveOwner) -> None:
    # law 12
    broker.put([job(id="a", key="k", retries=0)])
    worker.settle(worker.take()[0], Outcome.FAIL)
    broker.put([job(id="b", key="k")])
    assert broker.retry(["a"]) == [False]
    worker.settle(worker.take()[0])
    assert broker.retry(["a"]) == [True]
    assert broker.put([job(id="c", key="k")])[0].id == "a"


def test_delete_in_every_state(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    # case S4
    ids = in_every_state(broker, worker, clock)
    # the running one last: its successor is a job of this test, too
    for s in sorted(State, key=lambda s: s is State.RUNNING):
        assert broker.delete([ids[s]]) == [True], s
        assert broker.get(ids[s]) is None
        assert broker.delete([ids[s]]) == [False]
    assert broker.delete(["unknown", ""]) == [False, False]
    assert everything(broker) == []
    assert worker.take_ids() == []


@pytest.mark.needs(Feature.INSPECT)
def test_a_deleted_running_job_loses_its_lease(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    # law 4
    given = message(ttr=10)
    broker.put([given])
    [lease] = consumer.take()
    broker.delete([given.id])
    broker.put([given])
    assert not consumer.settle(lease)
    assert state(broker, given.id) is State.READY
    clock.advance(11)
    assert consumer.take()[0].attempt == 1  # the old deadline is gone


def test_purge_keeps_running_and_finished_jobs(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    ids = in_every_state(broker, worker, clock)
    broker.put([job("other", id="other"), message(id="raw")])
    assert delete_waiting(broker, "default") == 4  # waiting, scheduled, ready, and the message
    left = {r.envelope.id for r in everything(broker)}
    gone = {ids[State.WAITING], ids[State.SCHEDULED], ids[State.READY]}
    assert left == set(ids.values()) - gone | {"other"}
    assert delete_waiting(broker, "default") == 0
    assert delete_waiting(broker, "never seen") == 0
    clock.advance(2000)
    assert worker.take_ids() == ["other"]


def test_a_paused_queue_accepts_and_gives_nothing_out(broker: Broker, worker: LiveOwner) -> None:
    broker.set_queue("a", paused=True)
    here, there = job("a"), job("b")
    broker.put([here, there])
    assert worker.take_ids(9, ["a", "b"]) == [there.id]
    assert worker.take_ids() == []
    assert [(row.name, row.paused) for row in broker.stats()] == [("a", True), ("b", False)]
    broker.set_queue("a", max_size=9)  # one setting leaves the other
    assert worker.take_ids() == []
    broker.set_queue("a", paused=False)
    assert worker.take_ids() == [here.id]
    assert broker.stats()[0].max_size == 9


@pytest.mark.needs("commands")
def test_a_command_reaches_its_owner_once(broker: Broker, worker: LiveOwner) -> None:
    assert broker.command(worker.id, Command("quiet")) is True
    assert broker.command(worker.id, Command("dump")) is True
    assert broker.command("nobody", Command("quiet")) is False
    assert broker.wait(worker.id, 30) == []  # at once
    assert worker.commands() == [("quiet", 0), ("dump", 0)]
    assert worker.commands() == []


def test_owners_come_and_go(broker: Broker, worker: LiveOwner) -> None:
    other = LiveOwner(broker, "w2", host="h", pid=7, queues=("a",), concurrency=4)
    shown = {owner.name: owner for owner in broker.owners()}
    assert set(shown) == {"w1", "w2"}
    assert (shown["w2"].host, shown["w2"].pid, shown["w2"].queues) == ("h", 7, ("a",))
    broker.detach(other.id)
    broker.detach(other.id)
    assert [owner.name for owner in broker.owners()] == ["w1"]
    assert broker.command(other.id, Command("quiet")) is False


def test_jobs_of_a_detaching_owner_go_back_uncounted(broker: Broker, worker: LiveOwner) -> None:
    # law 6: a graceful shutdown costs nothing
    jobs = [job(), job()]
    broker.put(jobs)
    [lease, _] = worker.take(2)
    broker.detach(worker.id)
    other = LiveOwner(broker, "w2")
    assert [(t.open().id, t.attempt) for t in other.take(9)] == [(j.id, 1) for j in jobs]
    assert not other.settle(lease)


def test_attaching_again_starts_afresh(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job()])
    [lease] = worker.take()
    [owner] = broker.owners()
    broker.attach(owner)
    assert len(broker.owners()) == 1
    assert not worker.settle(lease)
    assert len(worker.take()) == 1


@pytest.mark.needs("a witness")
def test_the_witness_reports_jobs_of_a_dead_owner(broker: Broker, worker: LiveOwner) -> None:
    # law 6, case T9
    ran, held = job(), job()
    broker.put([ran, held])
    [one, two] = worker.take(2)
    # when
    assert broker.release(worker.id, {one.token: "killed by SIGKILL"}) == 2
    # then
    record = broker.get(ran.id)
    assert (record.state, record.attempt, record.losses) == (State.READY, 1, 0)
    assert record.attempts[0].error == "killed by SIGKILL"
    assert broker.get(held.id).attempt == 0
    assert broker.owners() == []
    assert broker.release(worker.id, {}) == 0
    # and whatever the dead owner says is too late
    broker.put([job()])
    reply = worker.exchange(verdicts=[], touch=[(one.token, 0.0)])
    assert (reply.touched, reply.leases) == ([False], [])
    assert reply.commands == [Command("lost")]
    assert not worker.settle(two)
    assert worker.take() == []
    other = LiveOwner(broker, "w2")
    assert [lease.attempt for lease in other.take(2)] == [2, 1]


@pytest.mark.needs("a witness")
def test_a_job_that_kills_its_worker_each_time_fails(broker: Broker) -> None:
    # law 6, case T9: no poison loop
    given = job(retries=1)
    broker.put([given])
    for _ in range(2):
        hand = LiveOwner(broker)
        [lease] = hand.take()
        broker.release(hand.id, {lease.token: "killed by SIGSEGV"})
    record = broker.get(given.id)
    assert (record.state, record.error, record.attempt) == (State.FAILED, "killed by SIGSEGV", 2)


@pytest.mark.needs("a witness")
def test_without_a_witness_a_job_gets_a_loss(broker: Broker) -> None:
    # law 6
    given = job(retries=1)
    broker.put([given])
    for losses in (0, 1):
        hand = LiveOwner(broker)
        [lease] = hand.take()
        assert (lease.attempt, lease.losses) == (1, losses)
        broker.release(hand.id, None)
    record = broker.get(given.id)
    assert (record.state, record.losses, record.attempt) == (State.FAILED, 2, 0)
    assert record.attempts == []
    assert record.error == "lost with its worker: loss 2 of 2"
    # the trail has both losses (case M6)
    assert len(record.log) == 2
    text = r"lost after \d+\.\d{3} s with its worker .+"
    assert all(re.fullmatch(text, line) for _, line in record.log)
    assert broker.retry([given.id]) == [True]
    assert broker.get(given.id).losses == 0


@pytest.mark.needs("a witness")
def test_lost_tasks_are_leased_one_at_a_time(broker: Broker) -> None:
    # law 6: so that the culprit is known
    lost, plain, later = [job(f"q{n}") for n in range(3)], job(priority=9), job(delay=60)
    broker.put(lost)
    gone = LiveOwner(broker, "gone")
    gone.take(3)
    broker.release(gone.id, None)
    broker.put([plain, later])
    worker = LiveOwner(broker)
    # then: the first comes before all others, and alone of its kind
    [one, other] = worker.take(5)
    assert (one.open().id, one.losses) == (lost[0].id, 1)
    assert (other.open().id, other.losses) == (plain.id, 0)
    # and one who runs such a job already gets no other
    assert worker.exchange(want=Want(5, alone=False)).leases == []
    # nor is one given to who does not serve its queue, or while that is paused
    broker.set_queue("q1", paused=True)
    assert worker.take(5, ["q1", "default"]) == []
    assert worker.take_ids(5) == [lost[2].id]
    broker.set_queue("q1", paused=False)
    assert worker.take_ids(5, ["q1"]) == [lost[1].id]
    # and it stays so for its retries, until somebody has it begin anew
    worker.settle(one, Outcome.RETRY)
    assert worker.exchange(want=Want(5, alone=False)).leases == []
    [again] = worker.take(5)
    assert (again.open().id, again.losses, again.attempt) == (lost[0].id, 1, 2)
    worker.settle(again, Outcome.FAIL)
    broker.retry([lost[0].id])
    [fresh] = worker.exchange(want=Want(5, alone=False)).leases
    assert fresh.losses == 0


@pytest.mark.needs("a witness")
def test_lost_tasks_can_be_purged_and_cancelled(broker: Broker) -> None:
    # law 6
    jobs = [job() for _ in range(3)]
    broker.put(jobs)
    gone = LiveOwner(broker, "gone")
    gone.take(3)
    broker.release(gone.id, None)
    assert state(broker, jobs[0].id) is State.READY
    assert broker.cancel([jobs[0].id]) == [True]
    assert delete_waiting(broker, "default") == 2
    assert everything(broker, Filter(states=frozenset([State.READY]))) == []


@pytest.mark.parametrize("causes", [{}, None])
def test_a_job_cancelled_while_its_owner_died_is_cancelled(
    broker: Broker, worker: LiveOwner, causes: dict[int, str] | None
) -> None:
    given = job()
    broker.put([given])
    worker.take()
    broker.cancel([given.id])
    broker.release(worker.id, causes)
    assert state(broker, given.id) is State.CANCELLED


@pytest.mark.needs("a retry keeps its place")
def test_acting_on_many_answers_in_order(broker: Broker, worker: LiveOwner) -> None:
    jobs = [job() for _ in range(3)]
    broker.put(jobs)
    asked = [jobs[0].id, "unknown", jobs[2].id, jobs[0].id]
    assert broker.cancel(asked) == [True, False, True, False]
    assert broker.retry(asked) == [True, False, True, False]
    assert worker.take_ids() == ids_of(jobs)
    assert broker.delete(asked) == [True, False, True, False]
