"""Limits: rates, windows, concurrency and breakers, of queues and of keys, over all owners."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from broker_driver import LiveOwner, ids_of, job, message, state
from kinds import Clock, Kind

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import LimitCalls, with_limits
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings, Planned
from tidemill.core.job import Lease, Outcome, State
from tidemill.limits.arithmetic import Held, LimitStats

NEVER = float("inf")


@pytest.fixture
def limits(broker: Broker, need: Callable[[Feature], None]) -> LimitCalls:
    need(Feature.LIMITS)
    return with_limits(broker, "limits")


def put(broker: Broker, count: int, prefix: str = "j", **fields: Any) -> list[str]:
    jobs = [job(id=f"{prefix}{n:03}", **fields) for n in range(count)]
    broker.put(jobs)
    return ids_of(jobs)


def keyed(terms: LimitSettings, key: str = "", cost: float = 1.0, name: str = "api") -> JobLimit:
    return JobLimit(name, key, cost, terms)


def held(limits: LimitCalls, job_id: str) -> Held:
    return limits.held(job_id)


# -- queues --------------------------------------------------------------------------------------


def test_a_queue_gives_its_burst_and_then_its_rate_over_all_owners(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # law 13, case S5
    other = LiveOwner(broker, "w2")
    limits.set_limit("a", LimitSettings(rate=(1, 60), burst=6), queue=True)
    ids = put(broker, 20, queue="a")
    assert worker.take_ids(4) == ids[:4]
    assert other.take_ids(10) == ids[4:6]
    reply = worker.exchange(want=Want(1, sleep=False))
    assert not reply.leases
    assert 50 < reply.next_due < 61
    assert broker.stats()[0].ready == 14
    clock.advance(50)
    assert other.take_ids() == []
    clock.advance(10)
    assert worker.take_ids() == ids[6:7]
    assert other.take_ids() == []
    clock.advance(120)
    assert other.take_ids() == ids[7:9]


def test_unused_tokens_do_not_exceed_the_burst(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # case S5
    limits.set_limit("a", LimitSettings(rate=(1, 10), burst=3), queue=True)
    ids = put(broker, 9, queue="a")
    assert worker.take_ids() == ids[:3]
    clock.advance(3600)
    assert worker.take_ids() == ids[3:6]


def test_a_rate_of_nothing_and_a_change_that_is_taken_over_at_once(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # case S5
    limits.set_limit("a", LimitSettings(rate=(0, 1), burst=5), queue=True)
    ids = put(broker, 9, queue="a")
    reply = worker.exchange(want=Want(9))
    assert not reply.leases
    assert reply.next_due == NEVER
    limits.set_limit("a", LimitSettings(rate=(1, 1000), burst=2), queue=True)
    broker.wait(worker.id, 60)  # it was woken
    assert worker.take_ids() == ids[:2]
    clock.advance(500)
    limits.set_limit("a", LimitSettings(rate=(10, 1000), burst=2), queue=True)
    clock.advance(60)
    assert worker.take_ids() == ids[2:3]
    limits.set_limit("a", LimitSettings(), queue=True)
    assert worker.take_ids() == ids[3:]


def test_other_queues_go_on(broker: Broker, limits: LimitCalls, worker: LiveOwner) -> None:
    limits.set_limit("a", LimitSettings(concurrency=1), queue=True)
    mine, others = put(broker, 3, queue="a"), put(broker, 3, "o", queue="b")
    for mode in (Mode.FAIR, Mode.STRICT, Mode.MERGED):
        leases = worker.take(10, ("a", "b"), mode)
        assert sorted(lease.open().id for lease in leases) == [mine[0], *others]
        for lease in leases:
            worker.settle(lease, Outcome.RELEASE)


def test_so_many_of_a_queue_run_at_a_time_and_an_end_makes_room(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    # law 13
    other = LiveOwner(broker, "w2")
    limits.set_limit("a", LimitSettings(concurrency=3), queue=True)
    ids = put(broker, 9, queue="a")
    leases = worker.take(2)
    assert other.take_ids() == ids[2:3]
    reply = other.exchange(want=Want(5))
    assert (reply.leases, reply.next_due) == ([], NEVER)
    worker.settle(leases[0])
    broker.wait(other.id, 60)  # it was woken
    assert other.take_ids() == ids[3:4]
    worker.settle(leases[1], Outcome.RETRY, delay=60.0)
    assert other.take_ids() == ids[4:5]


@pytest.mark.parametrize("how", ["die", "lost", "detach", "delete", "terminate", "ttr"])
def test_every_end_of_a_lease_frees_its_place(
    broker: Broker,
    limits: LimitCalls,
    worker: LiveOwner,
    consumer: LiveOwner,
    clock: Clock,
    how: str,
) -> None:
    # law 13: exact also when owners die
    limits.set_limit("a", LimitSettings(concurrency=1), queue=True)
    claim = keyed(LimitSettings(concurrency=1))
    broker.put([message("a", id="first", limit=claim, ttr=5.0)])
    broker.put([message("a", id="next", limit=claim)])
    lease = consumer.take()[0]
    assert consumer.take_ids() == []
    spare = LiveOwner(broker, "c2", "consumer")
    if how == "die":
        broker.release(consumer.id, {lease.token: "killed"})
    elif how == "lost":
        broker.release(consumer.id, None)
    elif how == "detach":
        broker.detach(consumer.id)
    elif how == "delete":
        broker.delete(["first"])
    elif how == "terminate":
        broker.cancel(["first"], terminate=True)
        consumer.settle(lease, Outcome.RELEASE)
    else:
        clock.advance(6)
    assert len(spare.take(5)) == 1
    assert [row.running for row in limits.limits()] == [1, 1]


def test_a_job_that_cannot_be_ended_yet_keeps_its_place(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    limits.set_limit("a", LimitSettings(concurrency=1), queue=True)
    ids = put(broker, 2, queue="a", limit=keyed(LimitSettings(concurrency=1)))
    lease = worker.take()[0]
    assert worker.settle(lease, Outcome.RETRY, hold=True, delay=60.0)
    assert worker.take_ids() == []
    assert [row.running for row in limits.limits()] == [1, 1]
    assert worker.settle(lease, Outcome.SNOOZE, delay=60.0)
    assert worker.take_ids() == ids[1:]


def test_an_unrun_lease_refunds_its_token(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    limits.set_limit("a", LimitSettings(rate=(1, 3600), burst=2), queue=True)
    ids = put(broker, 4, queue="a", limit=keyed(LimitSettings(window=(2, 3600))))
    leases = worker.take(4)
    assert len(leases) == 2
    worker.settle(leases[1], Outcome.RELEASE)
    assert worker.take_ids() == ids[1:2]
    assert worker.take_ids() == []


@pytest.mark.parametrize("how", ["interrupted", "held", "held, owner dies", "lost", "failed"])
def test_a_lease_that_may_have_run_refunds_no_token(
    kind: Kind, broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock, how: str
) -> None:
    # law 13: a rate holds also when runs are killed
    limits.set_limit("a", LimitSettings(rate=(1, 3600), burst=2), queue=True)
    ids = put(broker, 4, queue="a", limit=keyed(LimitSettings(window=(2, 3600))))
    dying = LiveOwner(broker, "w2")
    [lease] = dying.take(1)
    if how == "interrupted":
        dying.settle(lease, Outcome.RELEASE, started=1.0)
    elif how == "lost":
        broker.release(dying.id, None)
    elif how == "failed":
        broker.release(dying.id, {lease.token: "killed"})
    else:
        assert dying.settle(lease, Outcome.RETRY, hold=True, started=1.0, ended=2.0)
        if how == "held":
            dying.settle(lease, Outcome.RELEASE)
        else:
            broker.release(dying.id, {})
    broker.put([job("a", id="urgent", priority=9, limit=keyed(LimitSettings(window=(2, 3600))))])
    assert len(worker.take_ids(4)) == 1
    assert state(broker, ids[1]) is State.READY
    clock.advance(3500)
    assert worker.take_ids() == []


def test_a_window_is_never_overfull(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    limits.set_limit("a", LimitSettings(window=(3, 600)), queue=True)
    ids = put(broker, 9, queue="a")
    assert worker.take_ids(1) == ids[:1]
    clock.advance(300)
    assert worker.take_ids() == ids[1:3]
    reply = worker.exchange(want=Want(1))
    assert 270 < reply.next_due < 320
    clock.advance(315)
    assert worker.take_ids() == ids[3:4]
    clock.advance(300)
    assert worker.take_ids() == ids[4:6]


@pytest.mark.parametrize("by_key", [False, True])
def test_a_refund_leaves_its_own_slot_of_the_window(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock, by_key: bool
) -> None:
    terms = LimitSettings(window=(2, 64))
    if by_key:
        put(broker, 9, queue="a", limit=keyed(terms, "k"))
    else:
        limits.set_limit("a", terms, queue=True)
        put(broker, 9, queue="a")
    [first] = worker.take(1)
    clock.advance(40)
    assert len(worker.take(9)) == 1
    worker.settle(first, Outcome.RELEASE)
    clock.advance(10)
    assert len(worker.take(9)) == 1
    clock.advance(20)  # both that ran count still
    assert worker.take_ids() == []
    clock.advance(37)
    assert len(worker.take(9)) == 1


def test_messages_are_limited_also_with_ttr_0(
    broker: Broker, limits: LimitCalls, consumer: LiveOwner, clock: Clock
) -> None:
    limits.set_limit("a", LimitSettings(rate=(1, 10), burst=2), queue=True)
    broker.put([message("a", id=f"m{n}", ttr=0.0) for n in range(4)])
    assert consumer.take_ids() == ["m0", "m1"]
    clock.advance(10)
    assert consumer.take_ids() == ["m2"]


def test_a_due_or_retried_job_waits_as_well(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    limits.set_limit("a", LimitSettings(concurrency=1), queue=True)
    ids = put(broker, 2, queue="a")
    broker.put([job("a", id="later", delay=5, priority=50)])
    [lease] = worker.take(5)
    clock.advance(6)
    assert worker.take_ids() == []
    worker.settle(lease, Outcome.FAIL)
    assert worker.take_ids() == ["later"]
    assert broker.retry(ids[:1]) == [True]
    assert worker.take_ids() == []


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.needs("exact turns")
def test_each_key_has_the_limit_for_itself_whatever_the_queue(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # law 13
    terms = LimitSettings(rate=(1, 100), burst=2)
    ada = put(broker, 3, "ada", queue="a", limit=keyed(terms, "ada"))
    ada += put(broker, 2, "more-ada", queue="b", limit=keyed(terms, "ada"))
    bob = put(broker, 2, "bob", queue="a", limit=keyed(terms, "bob"))
    free = put(broker, 2, "free", queue="a")
    assert sorted(worker.take_ids(queues=("b", "a"))) == sorted([ada[3], ada[4], *bob, *free])
    reply = worker.exchange(want=Want(1))
    assert not reply.leases
    assert 80 < reply.next_due < 101
    clock.advance(100)
    assert worker.take_ids(queues=("b", "a")) == ada[:1]


@pytest.mark.needs("exact turns")
def test_the_first_job_of_a_key_does_not_wait_in_an_unserved_queue(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    terms = LimitSettings(concurrency=1)
    put(broker, 1, "unserved", queue="a", limit=keyed(terms))
    served = put(broker, 2, "served", queue="b", limit=keyed(terms))
    [lease] = worker.take(9, ("b",))
    assert lease.open().id == served[0]
    assert worker.take_ids(9, ("a", "b")) == []
    worker.settle(lease)
    assert worker.take_ids(9, ("b",)) == served[1:]


@pytest.mark.needs("exact turns")
def test_a_limit_with_keys_gives_each_key_its_turn(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    # one tenant cannot starve the others
    put(broker, 100, "big", queue="a", limit=keyed(LimitSettings(), "big"))
    small = put(broker, 2, "small", queue="a", limit=keyed(LimitSettings(), "small"))
    tiny = put(broker, 1, "tiny", queue="a", limit=keyed(LimitSettings(), "tiny"))
    leases = worker.take(6)
    assert [lease.seq for lease in leases] == sorted(lease.seq for lease in leases)
    ids = [lease.open().id for lease in leases]
    assert ids == ["big000", small[0], tiny[0], "big001", small[1], "big002"]
    urgent = put(broker, 1, "urgent", queue="a", priority=5, limit=keyed(LimitSettings(), "big"))
    assert worker.take_ids(2) == [*urgent, "big003"]
    assert [worker.take_ids(1) for _ in range(2)] == [["big004"], ["big005"]]


def test_the_first_of_a_key_that_had_its_turn_may_be_cancelled(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    ids = put(broker, 4, queue="a", limit=keyed(LimitSettings(), "k"))
    assert worker.take_ids(1) == ids[:1]
    assert broker.cancel([ids[1]]) == [True]
    assert worker.take_ids() == ids[2:]


@pytest.mark.needs("exact turns")
def test_a_limit_without_keys_keeps_the_order(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    # law 10
    claim = keyed(LimitSettings(concurrency=3))
    ids = put(broker, 2, "a", queue="a", limit=claim)
    free = put(broker, 1, "free", queue="a")
    ids += put(broker, 2, "b", queue="a", limit=claim)
    first = put(broker, 1, "first", queue="a", priority=9, limit=claim)
    assert worker.take_ids(9) == [*first, *ids[:2], *free]


def test_a_job_may_cost_more_than_one_token(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    terms = LimitSettings(rate=(1, 100), burst=10)
    ids = put(broker, 2, "six", queue="a", limit=keyed(terms, cost=6))
    ids += put(broker, 1, "huge", queue="a", limit=keyed(terms, cost=100))
    ids += put(broker, 1, "free", queue="a", limit=keyed(terms, cost=0))
    assert worker.take_ids() == ids[:1]  # in order: the next of the lane waits, and all behind it
    clock.advance(200)
    assert worker.take_ids() == ids[1:2]
    clock.advance(900)
    assert worker.take_ids() == []
    clock.advance(100)
    assert worker.take_ids() == ids[2:3]
    assert worker.take_ids() == []
    clock.advance(10_000)
    assert worker.take_ids() == ids[3:]


def test_priority_and_cancel_apply_to_jobs_waiting_for_a_limit(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    claim = keyed(LimitSettings(concurrency=1), "k")
    ids = put(broker, 4, queue="a", limit=claim)
    [lease] = worker.take(9)
    assert [state(broker, i) for i in ids[1:]] == [State.READY] * 3
    broker.put([job("a", id="urgent", priority=5, limit=claim)])
    assert broker.cancel([ids[1]]) == [True]
    assert broker.delete([ids[2]]) == [True]
    worker.settle(lease)
    [lease] = worker.take(9)
    assert lease.open().id == "urgent"
    assert delete_waiting(broker, "a") == 1
    worker.settle(lease)
    assert worker.take_ids() == []


def test_an_expired_job_does_not_hold_up_its_limit(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    claim = keyed(LimitSettings(rate=(1, 10), burst=1))
    put(broker, 1, "runs", queue="a", limit=claim)
    put(broker, 2, "late", queue="a", limit=claim, expires=5)
    put(broker, 1, "then", queue="a", limit=claim)
    assert worker.take_ids() == ["runs000"]
    clock.advance(10)
    assert worker.take_ids() == ["then000"]
    assert state(broker, "late000") is State.EXPIRED


def test_a_lost_task_of_a_limit_runs_alone_and_within_it(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    claim = keyed(LimitSettings(concurrency=1))
    ids = put(broker, 2, queue="a", limit=claim)
    dying = LiveOwner(broker, "w2")
    assert dying.take_ids(1) == ids[:1]
    broker.release(dying.id, None)
    want = Want(5, alone=False)
    [lease] = worker.exchange(want=want).leases  # the other one, since the lost one is elsewhere
    assert lease.open().id == ids[1]
    assert worker.take_ids() == []
    worker.settle(lease)
    assert worker.exchange(want=want).leases == []
    assert worker.take_ids() == ids[:1]


def test_a_lost_task_is_not_forgotten_when_its_queue_opens(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    limits.set_limit("a", LimitSettings(concurrency=1), queue=True)
    ids = put(broker, 1, queue="a")
    dying = LiveOwner(broker, "w2")
    assert dying.take_ids(1) == ids
    broker.release(dying.id, None)
    other = LiveOwner(broker, "w3")
    broker.put([job("a", id="first", priority=9)])
    [lease] = other.exchange(want=Want(1, alone=False)).leases
    for _ in range(3):  # it has heard of all there was
        assert worker.take_ids() == []
        broker.wait(worker.id, 0)
    other.settle(lease)
    begun = time.monotonic()
    broker.wait(worker.id, 30)
    assert time.monotonic() - begun < 20  # it was woken
    assert worker.take_ids() == ids


# -- terms ---------------------------------------------------------------------------------------


def test_code_declares_a_limit_and_does_not_undo_what_was_set_by_hand(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    first, later, mine = (
        LimitSettings(concurrency=1),
        LimitSettings(concurrency=2),
        LimitSettings(concurrency=4),
    )
    put(broker, 2, "a", queue="a", limit=keyed(first))
    put(broker, 1, "b", queue="a", limit=keyed(later))  # code that says something else
    assert terms_of(limits, "api") == later
    limits.set_limit("api", mine)
    for code in (later, first, later):  # several versions of it, in turns
        broker.put([job("b", limit=keyed(code))])
        assert terms_of(limits, "api") == mine
    put(broker, 6, "d", queue="a", limit=keyed(first))
    (row,) = limits.limits()
    assert (row.declared, row.by_hand) == (first, True)
    assert len(worker.take(9)) == 4
    limits.set_limit("api", None)  # back to what code says
    (row,) = limits.limits()
    assert (row.terms, row.by_hand) == (first, False)
    put(broker, 1, "e", queue="a", limit=keyed(later))
    assert terms_of(limits, "api") == later


@pytest.mark.parametrize("queue", [False, True])
def test_settings_by_hand_before_a_declaration_stay(
    broker: Broker, limits: LimitCalls, queue: bool
) -> None:
    code, mine = LimitSettings(rate=(10, 1), burst=10), LimitSettings(rate=(0, 1))

    def declare() -> None:
        if queue:
            limits.set_limit("api", code, queue=True, declared=True)
        else:
            broker.put([job("a", limit=keyed(code))])

    limits.set_limit("api", mine, queue=queue)
    declare()
    declare()
    (row,) = limits.limits()
    assert (row.terms, row.declared, row.by_hand) == (mine, code, True)
    limits.set_limit("api", None, queue=queue)
    assert terms_of(limits, "api", queue=queue) == code


def test_a_job_of_a_schedule_declares_its_limit_only_when_it_is_not_known(
    broker: Broker, limits: LimitCalls
) -> None:
    old, new = LimitSettings(concurrency=1), LimitSettings(concurrency=2)
    broker.put([job("a", limit=keyed(old), planned=Planned("s", 1.0))])
    assert terms_of(limits, "api") == old
    broker.put([job("a", limit=keyed(new))])
    broker.put([job("a", limit=keyed(old), planned=Planned("s", 2.0))])
    (row,) = limits.limits()
    assert (row.terms, row.declared) == (new, new)


def terms_of(limits: LimitCalls, name: str, *, queue: bool = False) -> LimitSettings:
    (found,) = [row for row in limits.limits() if (row.name, row.queue) == (name, queue)]
    return found.terms


def test_a_changed_limit_applies_to_waiting_jobs(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # case S5, of keys
    ids = put(broker, 9, queue="a", limit=keyed(LimitSettings(rate=(1, 3600), burst=1), "k"))
    assert worker.take_ids() == ids[:1]
    limits.set_limit("api", LimitSettings(rate=(1, 100), burst=2))
    assert 80 < worker.exchange(want=Want(1)).next_due < 101
    clock.advance(100)
    assert worker.take_ids() == ids[1:2]
    limits.set_limit("api", LimitSettings(concurrency=5))
    assert worker.take_ids() == ids[2:5]
    limits.set_limit("api", LimitSettings(concurrency=1))
    assert worker.take_ids() == []
    limits.set_limit("api", LimitSettings())
    broker.wait(worker.id, 60)  # it was woken
    assert worker.take_ids() == ids[5:]


def test_a_ready_job_has_a_place_behind_the_jobs_of_its_key(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:  # case M17
    # given jobs of two keys and without a limit, in two queues, and one with a higher priority
    for key in ("k", "other"):
        put(broker, 6, key, queue="a", limit=keyed(LimitSettings(concurrency=1), key))
    put(broker, 3, "free", queue="b")
    put(broker, 2, "far", queue="c", limit=keyed(LimitSettings(concurrency=1), "k"))
    put(broker, 1, "soon", queue="a", limit=keyed(LimitSettings(concurrency=1), "k"), priority=9)
    # then each has its place
    ids = ["soon000", *(f"k{n:03}" for n in range(6))]
    assert [broker.ahead(i, 100) for i in ids] == [*range(7)]
    assert [broker.ahead(f"free{n:03}", 100) for n in range(3)] == [0, 1, 2]
    assert broker.ahead("far001", 100) == 1
    assert broker.ahead("k005", 4) == 4
    assert broker.ahead("nothing", 100) == 0
    # and leaves it when it starts
    lease = worker.take(1, ["a"])[0]
    assert lease.open().id == "soon000"
    assert [broker.ahead(i, 100) for i in ids] == [0, *range(6)]


def test_an_open_limit_is_told_too(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:  # case M17
    put(broker, 3, queue="a", limit=keyed(LimitSettings(rate=(1, 60), burst=2), "k"))
    assert (held(limits, "j002").name, held(limits, "j002").until) == ("api", 0)
    limits.set_limit("a", LimitSettings(concurrency=1), queue=True)
    assert (held(limits, "j002").queue, held(limits, "j002").until) == (False, 0)
    worker.take(1, ["a"])
    assert (held(limits, "j002").queue, held(limits, "j002").until) == (True, NEVER)
    limits.set_limit("a", LimitSettings(concurrency=9), queue=True)
    worker.take(1, ["a"])
    assert (held(limits, "j002").queue, held(limits, "j002").until > 0) == (False, True)
    put(broker, 1, "free", queue="a")
    assert (held(limits, "free000").queue, held(limits, "free000").until) == (True, 0)


def test_limits_report_the_limit_of_a_job_and_its_opening_time(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    claim = keyed(LimitSettings(concurrency=1), "k")
    put(broker, 2, "lane", queue="a", limit=claim)
    put(broker, 3, "free", queue="a")
    [first, *_] = worker.take(1)
    found = held(limits, "lane001")
    assert (found.name, found.key, found.queue, found.running) == ("api", "k", False, 1)
    assert found.until == NEVER
    assert limits.held("free001") is None
    assert limits.held("lane000") is None  # it runs
    assert limits.held("nothing") is None
    limits.set_limit("a", LimitSettings(rate=(1, 600), burst=1), queue=True)
    worker.settle(first)
    assert len(worker.take(1)) == 1
    found = held(limits, "free001")
    assert (found.name, found.queue) == ("a", True)
    assert 580 < found.until <= 600
    queue, lane = limits.limits()
    assert (queue.name, queue.queue, queue.running, queue.keys) == ("a", True, 1, 0)
    assert 580 < queue.until <= 600
    # behind what is free
    assert lane == LimitStats(name="api", terms=claim.terms, declared=claim.terms, keys=1)


def test_keys_that_are_not_used_are_forgotten(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # law 15
    terms = LimitSettings(rate=(1, 10), burst=2)
    for n in range(20):
        broker.put([job("a", limit=keyed(terms, f"user{n}"))])
    for lease in worker.take(50):
        worker.settle(lease)
    assert limits.limits()[0].keys == 20
    clock.advance(11)
    broker.tick()
    assert limits.limits()[0].keys == 0


# -- breakers ------------------------------------------------------------------------------------


def failing(hand: LiveOwner, leases: list[Lease]) -> None:
    for lease in leases:
        hand.settle(lease, Outcome.RETRY, delay=3600.0, started=1.0)


def test_a_queue_that_fails_in_a_row_pauses_probes_and_opens_again(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # case S6
    limits.set_limit("a", LimitSettings(breaker=(3, 300)), queue=True)
    ids = put(broker, 20, queue="a")
    failing(worker, worker.take(2))
    worker.settle(worker.take()[0])  # a success between: not in a row
    failing(worker, worker.take(2))
    last = worker.take(9)
    assert len(last) == 1  # no more at a time than may fail yet
    failing(worker, last)
    reply = worker.exchange(want=Want(9))
    assert not reply.leases
    assert 280 < reply.next_due < 301
    found = held(limits, ids[-1])
    assert found.broken
    assert 280 < found.until <= 300
    clock.advance(300)
    [probe] = worker.take(9)  # one tries
    assert worker.take_ids() == []
    failing(worker, [probe])
    assert worker.take_ids() == []
    clock.advance(300)
    [probe] = worker.take(9)
    worker.settle(probe)
    assert len(worker.take(9)) == 9
    assert limits.limits()[0].failures == 0


def test_a_probe_that_never_ran_is_followed_by_another(
    broker: Broker, limits: LimitCalls, worker: LiveOwner, clock: Clock
) -> None:
    # case S6
    limits.set_limit("a", LimitSettings(breaker=(1, 30)), queue=True)
    put(broker, 5, queue="a")
    failing(worker, worker.take(1))
    clock.advance(30)
    dying = LiveOwner(broker, "w2")
    assert len(dying.take(9)) == 1
    broker.detach(dying.id)
    assert len(worker.take(9)) == 1


# -- elsewhere -----------------------------------------------------------------------------------


def test_a_successor_and_a_merged_job_stay_under_their_limit(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    claim = keyed(LimitSettings(concurrency=1), "k")
    put(broker, 1, "other", queue="a", limit=claim)
    [lease] = worker.take()

    def again(job_id: str, conflict: str, priority: int = 0) -> Envelope:
        fields = {"key": "x", "on_conflict": conflict, "limit": claim}
        return job("a", id=job_id, priority=priority, **fields)

    broker.put([again("one", "keep")])
    broker.put([again("two", "merge", priority=9)])
    assert worker.take_ids() == []
    worker.settle(lease)
    [lease] = worker.take(9)
    assert lease.rank < job().rank
    broker.put([again("three", "replace")])
    assert worker.take_ids() == []
    worker.settle(lease)
    assert worker.take_ids() == ["three"]


def test_a_moved_job_takes_its_limit_along(
    broker: Broker, limits: LimitCalls, worker: LiveOwner
) -> None:
    from tidemill.brokers.registry import open_broker

    source = open_broker("memory://")
    ids = put(source, 3, queue="a", limit=keyed(LimitSettings(concurrency=2), "k"))
    records = [record for i in ids if (record := source.get(i))]
    departure = source.depart(broker.url)
    assert broker.adopt(departure, records, "1:") == [True] * 3
    source.close()
    assert worker.take_ids() == ids[:2]


def test_a_moved_job_does_not_change_a_limit_that_is_known(
    broker: Broker, limits: LimitCalls
) -> None:
    from tidemill.brokers.registry import open_broker

    source = open_broker("memory://")
    old, new = LimitSettings(concurrency=1), LimitSettings(concurrency=2)
    ids = put(source, 2, queue="a", limit=keyed(old))
    records = [record for i in ids if (record := source.get(i))]
    limits.set_limit("api", new, declared=True)
    assert broker.adopt(source.depart(broker.url), records, "1:") == [True] * 2
    source.close()
    assert terms_of(limits, "api") == new
