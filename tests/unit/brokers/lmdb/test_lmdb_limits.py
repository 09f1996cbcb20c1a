"""Limits on LMDB: who is woken, what is handed over, and what a look costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from lmdb_desk import Sleeper, commits, job
from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.limit_settings import JobLimit, LimitSettings


def jobs(
    count: int, terms: LimitSettings | None = None, key: str = "", **fields: Any
) -> list[Envelope]:
    claim = JobLimit("limit", key, 1.0, terms) if terms is not None else None
    return [job(id=f"{key}{n}", limit=claim, **fields) for n in range(count)]


def running(broker: LmdbBroker) -> list[str]:
    states = frozenset({State.RUNNING})
    return sorted(r.envelope.id for r in broker.find(Filter(states=states)).records)


@pytest.mark.parametrize("how", ["queue", "lane"])
def test_a_put_hands_over_no_more_than_may_start_and_wakes_nobody_for_the_rest(
    broker: LmdbBroker, how: str
) -> None:
    # law 13
    first, second = Sleeper(broker, "one"), Sleeper(broker, "two")
    terms = LimitSettings(concurrency=2)
    if how == "queue":
        broker.set_limit("default", terms, queue=True)
    first.sleep()
    broker.put(jobs(3, terms if how == "lane" else None))
    assert running(broker) == ["0", "1"]
    assert first.hinted()
    second.sleep()
    broker.put([job(id="more", limit=JobLimit("limit", "", 1.0, terms) if how == "lane" else None)])
    assert not second.hinted()
    assert sorted(first.take()) == ["0", "1"]


@pytest.mark.parametrize("how", ["queue", "lane"])
def test_an_end_wakes_a_sleeper_for_the_place_it_leaves(broker: LmdbBroker, how: str) -> None:
    terms = LimitSettings(concurrency=1)
    if how == "queue":
        broker.set_limit("default", terms, queue=True)
    busy, idle = Sleeper(broker, "busy"), Sleeper(broker, "idle")
    broker.put(jobs(3, terms if how == "lane" else None))
    (lease,) = busy.exchange(want=Want(1))
    idle.sleep()
    assert not idle.hinted()
    broker.exchange(Step("busy", verdicts=[Verdict(lease.token, Outcome.SUCCESS)]))
    assert idle.hinted()
    assert idle.take() == ["1"]


@pytest.mark.parametrize("how", ["queue", "lane"])
def test_a_token_wakes_one_and_a_look_before_its_time_writes_nothing(
    broker: LmdbBroker, moved_clock: MovedClock, how: str
) -> None:
    # law 9: no polling; a look costs no disk
    terms = LimitSettings(rate=(1, 1000), burst=1)
    if how == "queue":
        broker.set_limit("default", terms, queue=True)
    one, two = Sleeper(broker, "one"), Sleeper(broker, "two")
    broker.put(jobs(9, terms if how == "lane" else None))
    assert one.take() == ["0"]
    two.sleep()
    before = commits(broker)
    reply = broker.exchange(Step("one", want=Want(4)))
    assert 900 < reply.next_due <= 1000
    assert commits(broker) == before
    one.hinted()  # of before
    two.hinted()
    moved_clock.advance(1000)
    assert one.take() == ["1"]
    assert not one.hinted()
    assert not two.hinted()


def test_an_owner_that_leaves_limited_jobs_makes_a_sleeper_keep_the_time(
    broker: LmdbBroker,
) -> None:
    # law 9: whoever is full may not come back in time
    broker.set_limit("default", LimitSettings(rate=(1, 10), burst=1), queue=True)
    full, idle = Sleeper(broker, "full"), Sleeper(broker, "idle")
    idle.sleep(queues=["other"])
    idle.hinted()
    broker.put(jobs(3))
    assert full.take(1) == ["0"]
    assert idle.hinted()


def test_nothing_is_left_of_lanes_that_nobody_uses(
    broker: LmdbBroker, moved_clock: MovedClock
) -> None:
    # law 15
    worker = Sleeper(broker)
    for n in range(50):
        broker.put(jobs(2, LimitSettings(rate=(1, 10), burst=1), f"user{n}"))
    while broker.limits()[0].keys:
        leases = worker.exchange(want=Want(500))
        broker.exchange(Step("w", verdicts=[Verdict(x.token, Outcome.SUCCESS) for x in leases]))
        moved_clock.advance(11)
        broker.tick()
    with broker._store.env.begin() as txn:
        tables = broker._store.tables
        for table in (tables.partition, tables.park, tables.due, tables.ready):
            assert txn.stat(table)["entries"] == 0


def test_a_change_reaches_all_keys_in_one_commit(broker: LmdbBroker) -> None:
    # law 13
    def put(terms: LimitSettings, keys: Sequence[str]) -> None:
        limits = [JobLimit("limit", key, 1.0, terms) for key in keys for _ in "ab"]
        broker.put([job(limit=limit) for limit in limits])

    one, two = LimitSettings(concurrency=1), LimitSettings(concurrency=2)
    keys = [f"k{n:03}" for n in range(350)]
    worker = Sleeper(broker)
    put(one, keys)
    put(one, keys)
    assert len(worker.take(2000)) == 350
    before = commits(broker)
    broker.set_limit("limit", two)
    assert commits(broker) - before == 1
    assert len(worker.take(2000)) == 350
    # and so does a lower limit: no place is free before two of three have ended
    broker.set_limit("limit", one)
    assert worker.take(2000) == []
    # and the declaration of a put, in which one key is new
    broker.set_limit("limit", None)
    put(LimitSettings(concurrency=3), ["new"])
    assert len(worker.take(2000)) == 350 + 2
