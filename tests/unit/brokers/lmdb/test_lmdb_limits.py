"""Limits on LMDB: who is woken, and what is handed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from lmdb_desk import Sleeper, commits, job

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Outcome, State, Verdict


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
