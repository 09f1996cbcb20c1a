"""Leases at a carrier: handed over, taken by the owner that gets the message, recalled."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from broker_driver import LiveOwner, check_counts, ids_of, job, message, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.registry import open_broker
from tidemill.core.backoff import RetryPolicy
from tidemill.core.envelope import Envelope, Links
from tidemill.core.errors import StoreMoved
from tidemill.core.job import Lease, Outcome, Placed, Record, RunOn, State, Verdict
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.transfer.store_to_store import move

ELSEWHERE = "lmdb://./elsewhere"


@pytest.fixture(autouse=True)
def needs_carry(need: Callable[[Feature], None]) -> None:
    need(Feature.CARRY)


@pytest.fixture
def relay(broker: Broker) -> LiveOwner:
    """Who leases jobs and hands them over."""
    return LiveOwner(broker, "relay")


def carried(broker: Broker, relay: LiveOwner, *jobs: Envelope) -> list[Lease]:
    """Put jobs, and hand them over to the carrier."""
    broker.put(jobs)
    leases = relay.take(len(jobs), mode=Mode.MERGED, kinds="both")
    assert [lease.open().id for lease in leases] == ids_of(jobs)
    assert all(relay.carry(*leases))
    return leases


def shown(broker: Broker, job_id: str) -> Record:
    record = broker.get(job_id)
    assert record is not None
    return record


def test_a_lease_that_a_relay_still_holds_can_be_taken(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # law 4: a message may arrive before its relay has said that it is out
    relay, other = LiveOwner(broker, "relay", "relay"), LiveOwner(broker, "other")
    first, second, third = job(), job(), job()
    broker.put([first, second])
    mine, other_one = relay.take(1)[0], relay.take(1)[0]
    # when
    assert worker.fetch(mine) == [True]
    # then
    assert shown(broker, first.id).worker == "w1"
    assert other.fetch(mine) == [False]
    assert relay.carry(mine) == [False]  # too late, and no harm
    assert relay.carry(other_one) == [True]
    assert worker.fetch(other_one) == [True]
    assert worker.settle(mine)
    assert state(broker, first.id) is State.SUCCEEDED
    # and what any other owner holds is its own
    broker.put([third])
    held = other.take(1)[0]
    assert worker.fetch(held) == [False]
    assert other.settle(held)


def test_leases_of_a_dead_relay_go_back_uncounted(broker: Broker, worker: LiveOwner) -> None:
    # law 6: it ran none of it
    relay, one = LiveOwner(broker, "relay", "relay"), job()
    broker.put([one])
    (lease,) = relay.take(1)
    broker.release(relay.id, None)
    record = shown(broker, one.id)
    assert (record.state, record.losses, record.attempt) == (State.READY, 0, 0)
    assert worker.fetch(lease) == [False]


def is_gone(hand: LiveOwner, *leases: Lease) -> bool:
    """True when none of the leases lies with the carrier any more."""
    return not any(hand.fetch(*leases))


# -- handing over and taking -----------------------------------------------------------------------


def test_a_carried_job_is_ready_and_in_no_queue(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 3: it is in one state, and counted there
    first, second = job(), job()
    leases = carried(broker, relay, first)
    broker.put([second])
    # then
    record = shown(broker, first.id)
    assert (record.state, record.attempt, record.attempts) == (State.READY, 0, [])
    assert (record.worker, record.leased, record.error) == ("", 0.0, "")
    [row] = broker.stats()
    assert (row.ready, row.running, row.carried) == (2, 0, 1)
    assert row.oldest == first.created
    found = broker.find(Filter(states=frozenset({State.READY}), queue="default")).records
    assert {r.envelope.id for r in found} == {first.id, second.id}
    assert broker.find(Filter(states=frozenset({State.RUNNING}))).records == []
    # and: the store leases the other one only
    assert worker.take_ids() == [second.id]
    assert not relay.settle(leases[0])  # law 4: it is the relay's no more
    check_counts(broker)


def test_a_taken_lease_is_like_a_lease_of_ones_own(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, clock: Clock
) -> None:
    # law 3, law 4
    given = job()
    [lease] = carried(broker, relay, given)
    clock.advance(5)
    assert worker.fetch(lease) == [True]
    record = shown(broker, given.id)
    assert (record.state, record.worker) == (State.RUNNING, "w1")
    assert record.leased > lease.leased + 4
    [row] = broker.stats()
    assert (row.ready, row.running, row.carried) == (0, 1, 0)
    # then: nobody can take it again
    assert worker.fetch(lease) == [False]
    assert relay.fetch(lease) == [False]
    assert not relay.settle(lease)
    assert worker.settle(lease, result=b"r", started=1.0, ended=2.0)
    record = shown(broker, given.id)
    assert (record.state, record.raw_result) == (State.SUCCEEDED, b"r")
    [attempt] = record.attempts
    assert (attempt.number, attempt.worker) == (1, "w1")
    assert attempt.leased > lease.leased + 4
    assert worker.fetch(lease) == [False]


def test_many_are_handed_over_and_taken_in_one_step_each(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    jobs = [job() for _ in range(60)]
    leases = carried(broker, relay, *jobs)
    other = LiveOwner(broker, "w2")
    assert other.fetch(*leases[::2]) == [True] * 30
    # law 4: each is somebody's, whoever asks in what order, and twice in one step
    again = [*reversed(leases), leases[1]]
    assert worker.fetch(*again) == [*[True, False] * 30, False]
    more = [job() for _ in range(3)]
    broker.put(more)
    reply = worker.exchange(
        verdicts=[Verdict(lease.token, Outcome.SUCCESS) for lease in leases[1::2]], want=Want(5)
    )
    assert reply.settled == [True] * 30
    assert [lease.open().id for lease in reply.leases] == ids_of(more)
    assert {state(broker, j.id) for j in jobs[1::2]} == {State.SUCCEEDED}
    assert {state(broker, j.id) for j in jobs[::2]} == {State.RUNNING}


def test_of_many_takers_one_gets_the_lease(broker: Broker, relay: LiveOwner) -> None:
    # law 3, law 4: what somebody takes nobody else does, nor is it cancelled before it started
    jobs = [job() for _ in range(40)]
    leases = carried(broker, relay, *jobs)
    hands = [LiveOwner(broker, f"w{n}") for n in range(3)]
    orders = [[*leases[n:], *leases[:n]] for n in (0, 13, 26)]
    with ThreadPoolExecutor(4) as pool:
        fetch = [pool.submit(h.fetch, *order) for h, order in zip(hands, orders, strict=True)]
        assert all(pool.submit(broker.cancel, ids_of(jobs[::-3])).result())
    taken: Counter[int] = Counter()
    for order, answer in zip(orders, fetch, strict=True):
        taken.update(o.token for o, mine in zip(order, answer.result(), strict=True) if mine)
    assert set(taken.values()) == {1}
    for lease, each in zip(leases, jobs, strict=True):
        record = shown(broker, each.id)
        assert (record.state is State.RUNNING) is (lease.token in taken)
        assert record.cancelling is (record.state is State.RUNNING and each in jobs[::-3])
    check_counts(broker)


def test_handing_over_taking_and_leasing_are_one_step(broker: Broker, relay: LiveOwner) -> None:
    # law 3
    first, second, third = job(), job(), job()
    [brought] = carried(broker, relay, first)
    broker.put([second, third])
    [mine] = relay.take(1)
    reply = relay.exchange(
        verdicts=[Verdict(mine.token, Outcome.CARRY)],
        take=[(brought.token, first.id), (mine.token, second.id)],
        want=Want(5),
    )
    assert (reply.settled, reply.taken) == ([True], [True, True])
    assert [lease.open().id for lease in reply.leases] == [third.id]


def test_only_the_very_lease_is_taken(broker: Broker, relay: LiveOwner, worker: LiveOwner) -> None:
    # law 4
    first, second = job(), job()
    one, two = carried(broker, relay, first, second)
    assert (
        worker.exchange(take=[(one.token, second.id), (two.token, "nobody")]).taken == [False] * 2
    )
    assert worker.exchange(take=[(one.token + 100_000, first.id), (one.token, "")]).taken == [
        False,
        False,
    ]
    assert not relay.settle(one, Outcome.CARRY)  # it is handed over already
    assert not worker.settle(one, Outcome.CARRY)
    assert worker.fetch(one, two) == [True, True]


def test_a_given_up_owner_is_not_told_of_stale_messages(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 5: else nobody would run it
    [lease] = carried(broker, relay, job())
    broker.release(worker.id, None)
    reply = broker.exchange(Step(worker.id, take=[(lease.token, lease.open().id)]))
    assert [command.verb for command in reply.commands] == ["lost"]
    assert reply.taken == []
    assert LiveOwner(broker, "w2").fetch(lease) == [True]


def test_the_carrier_does_not_die(broker: Broker, relay: LiveOwner, worker: LiveOwner) -> None:
    # law 5
    kept, held = job(), job()
    [lease] = carried(broker, relay, kept)
    broker.put([held])
    relay.take(1)
    assert broker.release(relay.id, None) == 1  # the one that was not handed over yet
    broker.tick()
    assert shown(broker, kept.id).losses == 0
    assert worker.fetch(lease) == [True]


def test_a_death_after_taking_counts_as_for_any_lease(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 6
    ran, waited = job(), job()
    one, two = carried(broker, relay, ran, waited)
    assert worker.fetch(one, two) == [True, True]
    assert broker.release(worker.id, {one.token: "killed by signal 9"}) == 2
    assert [a.error for a in shown(broker, ran.id).attempts] == ["killed by signal 9"]
    assert shown(broker, waited.id).attempts == []
    # then: published anew, under tokens of their own
    assert is_gone(relay, one, two)
    again = relay.take(2)
    assert {lease.open().id for lease in again} == {ran.id, waited.id}
    assert {lease.token for lease in again}.isdisjoint({one.token, two.token})


def test_a_relay_that_dies_before_it_hands_over_leaves_a_stale_message(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 3, law 4
    given = job()
    broker.put([given])
    [lease] = relay.take(1)  # published, and then it died
    broker.release(relay.id, {})
    assert shown(broker, given.id).attempts == []
    assert worker.fetch(lease) == [False]
    [again] = worker.take(1)
    assert again.open().id == given.id


def test_handing_leases_over_hints_no_owner(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 9
    broker.put([job()])
    [lease] = relay.take(1)
    worker.take()  # and sleeps
    relay.carry(lease)
    assert worker.take() == []
    assert worker.exchange(want=Want(1)).next_due == float("inf")


# -- what does not run -----------------------------------------------------------------------------


def test_a_cancelled_or_expired_lease_ends_at_hand_over(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, clock: Clock
) -> None:
    # law 14
    cancelled, late = job(), job(expires=10.0)
    broker.put([cancelled, late])
    leases = relay.take(2)
    broker.cancel([cancelled.id])
    clock.advance(20)
    assert relay.carry(*leases) == [True, True]
    assert state(broker, cancelled.id) is State.CANCELLED
    assert state(broker, late.id) is State.EXPIRED
    assert shown(broker, cancelled.id).attempts == []
    assert is_gone(worker, *leases)


def test_a_job_that_expires_while_carried_is_not_taken(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, clock: Clock
) -> None:
    given = job(expires=10.0)
    [lease] = carried(broker, relay, given)
    assert worker.exchange(want=Want(1)).next_due < 11
    clock.advance(20)
    assert worker.fetch(lease) == [False]
    record = shown(broker, given.id)
    assert (record.state, record.error) == (State.EXPIRED, "not started before it expired")
    assert record.attempts == []


def test_cancelling_a_carried_job_makes_its_message_stale(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 14
    given = job()
    [lease] = carried(broker, relay, given)
    assert broker.cancel([given.id]) == [True]
    record = shown(broker, given.id)
    assert (record.state, record.error) == (State.CANCELLED, "cancelled before it started")
    assert worker.fetch(lease) == [False]
    assert relay.commands() == []
    assert broker.cancel([given.id]) == [False]


def test_deleting_and_purging_forget_a_carried_job(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    gone, purged, other = job(), job("a"), job("b")
    leases = carried(broker, relay, gone, purged, other)
    waits = job("a")
    broker.put([waits])
    assert broker.delete([gone.id]) == [True]
    assert broker.purge("a") == 2
    assert [broker.get(j.id) for j in (gone, purged, waits)] == [None] * 3
    assert worker.fetch(*leases) == [False, False, True]


def test_an_id_that_is_free_again_does_not_revive_an_old_message(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 4, law 11
    [old] = carried(broker, relay, job(id="mine"))
    broker.delete(["mine"])
    [new] = carried(broker, relay, job(id="mine"))
    assert old.token != new.token
    assert worker.fetch(old, new) == [False, True]


def test_a_kick_changes_nothing(broker: Broker, relay: LiveOwner, worker: LiveOwner) -> None:
    given = job()
    [lease] = carried(broker, relay, given)
    assert broker.kick([given.id]) == [False]
    assert worker.fetch(lease) == [True]


def test_a_queue_that_is_paused_lets_nothing_be_taken(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    given, other = job("a"), job("b")
    leases = carried(broker, relay, given, other)
    broker.set_queue("a", paused=True)
    assert worker.fetch(*leases) == [False, True]
    assert state(broker, given.id) is State.READY
    broker.set_queue("a", paused=False)
    # then: its message was dropped, and it is on its line
    assert worker.take_ids() == [given.id]


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_is_replaced_and_merged_as_if_it_were_not_carried(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 12: a message that is out cannot be changed, but it is stale then
    old = job(key="k", priority=0)
    [lease] = carried(broker, relay, old)
    assert broker.put([job(key="k", on_conflict="keep")])[0].placed == Placed.KEPT
    [put] = broker.put([job(key="k", on_conflict="merge", priority=7)])
    assert (put.id, put.placed) == (old.id, Placed.MERGED)
    assert worker.fetch(lease) == [False]
    [lease] = relay.take(1)  # published anew
    assert (lease.open().id, lease.rank) == (old.id, shown(broker, old.id).rank)
    assert relay.carry(lease) == [True]
    new = job(key="k", on_conflict="replace")
    [put] = broker.put([new])
    assert (put.id, put.placed) == (new.id, Placed.REPLACED)
    assert state(broker, old.id) is State.CANCELLED
    assert worker.fetch(lease) == [False]
    assert worker.take_ids() == [new.id]


def test_a_successor_waits_for_a_taken_job(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 12
    first, second = job(key="k"), job(key="k", on_conflict="replace")
    [lease] = carried(broker, relay, first)
    assert worker.fetch(lease) == [True]
    assert broker.put([second])[0].placed == Placed.SUCCESSOR
    assert worker.settle(lease)
    [lease] = relay.take(1)
    assert lease.open().id == second.id
    assert relay.carry(lease) == [True]


# -- messages, flows, losses -----------------------------------------------------------------------


def test_the_ttr_of_a_message_runs_from_when_it_was_taken(
    broker: Broker, relay: LiveOwner, consumer: LiveOwner, clock: Clock
) -> None:
    given = message(ttr=30.0)
    [lease] = carried(broker, relay, given)
    clock.advance(100)
    assert consumer.fetch(lease) == [True]
    clock.advance(20)
    assert consumer.touch(lease)
    clock.advance(20)
    assert consumer.settle(lease)
    assert broker.get(given.id) is None


def test_a_message_of_a_consumer_has_no_ttr_while_it_is_carried(
    broker: Broker, consumer: LiveOwner, worker: LiveOwner, clock: Clock
) -> None:
    given = message(ttr=5.0)
    broker.put([given])
    [lease] = consumer.take(1)
    assert consumer.carry(lease) == [True]
    clock.advance(50)
    assert consumer.exchange().next_due == float("inf")
    assert state(broker, given.id) is State.READY
    other = LiveOwner(broker, "c2", "consumer")
    assert other.fetch(lease) == [True]
    clock.advance(6)
    broker.tick()
    record = shown(broker, given.id)
    assert [a.error for a in record.attempts] == ["ttr passed without an ack"]


def test_followers_and_flows_go_on_as_ever(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.FLOWS)
    behind = job(id="behind", links=Links((), RunOn.SUCCESS, ("first",)))
    first = job(id="first", links=Links(("behind",)))
    broker.put([behind, first])
    [lease] = relay.take(5)
    assert relay.carry(lease) == [True]
    assert worker.fetch(lease) == [True]
    assert worker.settle(lease, result=b"r")
    [lease] = relay.take(5)
    assert (lease.open().id, lease.inputs[0].result) == ("behind", b"r")
    assert relay.carry(lease) == [True]
    broker.cancel(["behind"])
    assert worker.fetch(lease) == [False]


def test_a_dependent_of_a_cancelled_carried_job_is_cancelled(
    broker: Broker, relay: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.FLOWS)
    broker.put(
        [
            job(id="behind", links=Links((), RunOn.SUCCESS)),
            job(id="first", links=Links(("behind",))),
        ]
    )
    assert relay.carry(*relay.take(1)) == [True]
    broker.cancel(["first"])
    assert state(broker, "behind") is State.CANCELLED


def test_a_retry_after_taking_counts_as_for_any_lease(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, clock: Clock
) -> None:
    # law 7
    given = job(retries=1)
    [lease] = carried(broker, relay, given)
    assert worker.fetch(lease) == [True]
    assert worker.settle(lease, Outcome.RETRY, delay=5.0, error="once")
    assert worker.fetch(lease) == [False]
    clock.advance(6)
    [lease] = relay.take(1)
    assert lease.attempt == 2
    assert relay.carry(lease) == [True]
    assert worker.fetch(lease) == [True]
    assert worker.settle(lease, Outcome.RETRY, error="twice")
    assert state(broker, given.id) is State.FAILED


def test_lost_tasks_are_carried_in_their_own_queue(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 6
    given = job()
    broker.put([given])
    worker.take(1)
    broker.release(worker.id, None)
    [lease] = relay.take(3)
    assert lease.losses == 1
    assert relay.carry(lease) == [True]
    assert relay.take(3) == []
    assert LiveOwner(broker, "w2").fetch(lease) == [True]


def test_endless_messages_may_be_carried_for_ever(
    broker: Broker, relay: LiveOwner, clock: Clock
) -> None:
    given = message(retries=RetryPolicy(limit=0))
    [lease] = carried(broker, relay, given)
    clock.advance(100_000)
    broker.tick()
    assert state(broker, given.id) is State.READY
    assert LiveOwner(broker, "c1", "consumer").fetch(lease) == [True]


# -- called back -----------------------------------------------------------------------------------


def test_recall_gives_everything_back_uncounted(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # for when the carrier has lost its queues
    jobs = [job("a", priority=n % 3) for n in range(9)]
    broker.put(jobs)
    leases = relay.take(9)
    taken, *rest = leases
    assert all(relay.carry(*leases))
    assert worker.fetch(taken) == [True]
    assert broker.recall() == 8
    assert broker.recall() == 0
    [row] = broker.stats()
    assert (row.ready, row.running, row.carried) == (8, 1, 0)
    assert is_gone(worker, *rest)
    # law 10: in their order
    again = worker.take(20)
    assert [lease.open().id for lease in again] == [lease.open().id for lease in rest]
    assert {lease.attempt for lease in again} == {1}
    assert worker.settle(taken)


def test_a_message_of_before_stays_stale_though_its_job_is_carried_anew(
    broker: Broker, relay: LiveOwner, worker: LiveOwner
) -> None:
    # law 4
    jobs = [job("a"), job("b", key="k"), job("c")]
    old = carried(broker, relay, *jobs)
    broker.put([job("b", key="k", on_conflict="merge", priority=5)])
    broker.set_queue("c", paused=True)
    assert worker.fetch(old[2]) == [False]
    broker.set_queue("c", paused=False)
    broker.recall()
    new = relay.take(3)
    assert {lease.open().id for lease in new} == set(ids_of(jobs))
    assert relay.carry(*new) == [True] * 3
    assert worker.fetch(*old) == [False] * 3
    assert worker.fetch(*new) == [True] * 3


def test_recall_wakes_sleeping_owners(broker: Broker, relay: LiveOwner, worker: LiveOwner) -> None:
    # law 9
    carried(broker, relay, job())
    assert worker.take() == []
    broker.recall()
    broker.wait(worker.id, 30.0)
    assert len(worker.take()) == 1


# -- leaving the store -----------------------------------------------------------------------------


def test_a_store_that_departs_lets_nothing_be_taken_and_loses_nothing(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.MOVE)
    jobs = [job() for _ in range(4)]
    broker.put(jobs)
    leases = relay.take(4)
    relay.carry(*leases[:3])
    broker.depart(ELSEWHERE)
    # when: a message that comes now is dropped
    assert worker.fetch(leases[0]) == [False]
    # and: what is handed over now goes back instead
    assert relay.carry(leases[3]) == [True]
    with pytest.raises(StoreMoved):
        broker.recall()
    [row] = broker.stats()
    assert (row.ready, row.running, row.carried) == (4, 0, 2)
    broker.depart(ELSEWHERE, seal=True)
    assert worker.fetch(leases[1]) == [False]
    # then: all are ready, for the store they go to; or for this one, if they stay
    assert {state(broker, j.id) for j in jobs} == {State.READY}
    broker.stay()
    assert worker.fetch(leases[2]) == [True]
    assert set(worker.take_ids()) == {jobs[n].id for n in (0, 1, 3)}


def test_a_carried_job_moves_to_another_store_and_is_leased_there(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    # law 3
    need(Feature.MOVE)
    one, two = job("a", key="k", priority=3), job("a")
    leases = carried(broker, relay, one, two)
    with contextlib.closing(open_broker("memory://?keep=7200")) as target:
        move(broker, target)
        new = LiveOwner(target)
        there = new.take(5)
        assert [lease.open().id for lease in there] == [one.id, two.id]
        assert {lease.attempt for lease in there} == {1}
        check_counts(target)
    assert worker.fetch(*leases) == [False, False]


# -- limits ----------------------------------------------------------------------------------------


def test_a_carried_job_keeps_its_place_under_a_limit(
    broker: Broker, relay: LiveOwner, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    # law 13
    need(Feature.LIMITS)
    limits = with_limits(broker, "limits")
    limits.set_limit("q", LimitSettings(concurrency=2), queue=True)
    claim = JobLimit("api", "x", 1.0, LimitSettings(concurrency=1))
    one, two, three = job("q"), job("q"), job("q")
    keyed, next_ = job("k", limit=claim), job("k", limit=claim)
    leases = carried(broker, relay, one, keyed, two)[:2]
    broker.put([three, next_])
    assert worker.take_ids() == []
    assert limits.held(one.id) is None
    assert (held := limits.held(three.id)) is not None
    assert held.running == 2
    assert (held := limits.held(next_.id)) is not None
    assert held.running == 1
    assert {(row.name, row.running) for row in limits.limits()} == {("q", 2), ("api", 1)}
    # when: it is taken, it has its place still
    assert worker.fetch(*leases) == [True, True]
    assert worker.take_ids() == []
    # then: and gives it up as any other
    assert worker.settle(leases[0])
    assert worker.settle(leases[1])
    assert sorted(worker.take_ids()) == sorted([three.id, next_.id])
    check_counts(broker)


@pytest.mark.parametrize("how", ["cancel", "delete", "purge", "recall", "expire"])
def test_an_unrun_job_refunds_its_tokens(
    broker: Broker,
    relay: LiveOwner,
    worker: LiveOwner,
    clock: Clock,
    how: str,
    need: Callable[[Feature], None],
) -> None:
    # law 13
    need(Feature.LIMITS)
    limits = with_limits(broker, "limits")
    limits.set_limit("q", LimitSettings(rate=(1, 1000), burst=1), queue=True)
    limits.set_limit("k", LimitSettings(window=(1, 1000)), queue=True)
    claim = JobLimit("api", "x", 1.0, LimitSettings(rate=(1, 1000), burst=1, concurrency=1))
    first = [job("q", expires=20.0), job("k", expires=20.0), job("l", limit=claim, expires=20.0)]
    leases = carried(broker, relay, *first)
    second = [job("q"), job("k"), job("l", limit=claim)]
    broker.put(second)
    assert worker.take_ids() == []
    if how == "expire":
        clock.advance(21)
        broker.tick()
    elif how == "recall":
        assert broker.recall() == 3
    elif how == "purge":
        assert [broker.purge(name) for name in "qkl"] == [2, 2, 2]
        broker.put(second)
    else:
        assert getattr(broker, how)(ids_of(first)) == [True] * 3
    expected = first if how == "recall" else second
    assert sorted(worker.take_ids()) == sorted(ids_of(expected))
    assert is_gone(worker, *leases)
    check_counts(broker)


def test_taking_gives_no_token_back(
    broker: Broker,
    relay: LiveOwner,
    worker: LiveOwner,
    clock: Clock,
    need: Callable[[Feature], None],
) -> None:
    # law 13
    need(Feature.LIMITS)
    terms = LimitSettings(rate=(1, 1000), burst=1, window=(9, 1000))
    with_limits(broker, "limits").set_limit("q", terms, queue=True)
    claim = JobLimit("api", "x", 1.0, terms)
    leases = carried(broker, relay, job("q"), job("l", limit=claim))
    clock.advance(100)
    assert worker.fetch(*leases) == [True, True]
    assert [worker.settle(lease) for lease in leases] == [True, True]
    broker.put([job("q"), job("l", limit=claim)])
    assert worker.take_ids() == []
    clock.advance(990)  # since it started
    assert worker.take_ids() == []
    clock.advance(20)
    assert len(worker.take_ids()) == 2


@pytest.mark.parametrize(
    "terms", [LimitSettings(rate=(1, 10), burst=3), LimitSettings(window=(3, 30))], ids=str
)
def test_jobs_waiting_at_the_carrier_start_within_their_limit(
    broker: Broker,
    relay: LiveOwner,
    worker: LiveOwner,
    clock: Clock,
    terms: LimitSettings,
    need: Callable[[Feature], None],
) -> None:
    # law 13: tokens are taken when a job starts, and kept for it until then
    need(Feature.LIMITS)
    with_limits(broker, "limits").set_limit("q", terms, queue=True)
    claim = JobLimit("api", "x", 1.0, terms)
    broker.put([each for _ in range(9) for each in (job("q"), job("l", limit=claim))])
    waiting: list[Lease] = []
    for _ in range(6):  # nobody is free for a minute
        leases = relay.take(20)
        assert all(relay.carry(*leases))
        waiting += leases
        clock.advance(10)
    assert len(waiting) == 2 * 3
    # when
    assert worker.fetch(*waiting) == [True] * 6
    # then: what comes now waits for new tokens
    assert relay.take(20) == []
    clock.advance(10.5 if terms.rate else 30.5)
    assert len(relay.take(20)) == (2 if terms.rate else 6)
    check_counts(broker)


def test_jobs_carried_before_a_limit_count_in_it(
    broker: Broker,
    relay: LiveOwner,
    worker: LiveOwner,
    clock: Clock,
    need: Callable[[Feature], None],
) -> None:
    # law 13
    need(Feature.LIMITS)
    leases = carried(broker, relay, *[job("q") for _ in range(4)])
    with_limits(broker, "limits").set_limit("q", LimitSettings(rate=(1, 10), burst=2), queue=True)
    broker.put([job("q")])
    assert relay.take(5) == []
    assert worker.fetch(*leases) == [True] * 4
    clock.advance(25)  # two were too many
    assert relay.take(5) == []
    clock.advance(6)
    assert len(relay.take(5)) == 1


def test_a_late_take_counts_in_the_window_of_its_start(
    broker: Broker,
    relay: LiveOwner,
    worker: LiveOwner,
    clock: Clock,
    need: Callable[[Feature], None],
) -> None:
    # law 13
    need(Feature.LIMITS)
    limits = with_limits(broker, "limits")
    limits.set_limit("q", LimitSettings(window=(1, 100)), queue=True)
    claim = JobLimit("api", "x", 1.0, LimitSettings(window=(1, 100)))
    leases = carried(broker, relay, job("q"), job("l", limit=claim))
    clock.advance(90)
    assert worker.fetch(*leases) == [True, True]
    rest = [job("q"), job("l", limit=claim)]
    broker.put(rest)
    clock.advance(50)  # long after it was handed over, soon after it was taken
    assert worker.take_ids() == []
    # when: it goes back before it ran, it counts there no more
    for lease in leases:
        assert worker.settle(lease, Outcome.RELEASE)
    assert len(worker.take_ids()) == 2
