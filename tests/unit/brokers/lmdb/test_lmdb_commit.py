"""Group commit: callers share one, errors and interruptions hurt only their own."""

from __future__ import annotations

import os
import sys
from typing import Any

import lmdb
import pytest
from lmdb_desk import Gate, ids, in_threads, job, join

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine import group_commit
from tidemill.brokers.lmdb.put import put
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, Verdict
from tidemill.errors import DuplicateJob, StoreFull, TidemillError


def test_callers_that_meet_share_a_commit(broker: LmdbBroker) -> None:
    # law 1
    store = broker._store
    limiter = Gate(store)
    before = store.env.info()["last_txnid"]
    threads, answers = in_threads([lambda: broker.put([job()])] * 20)
    limiter.release_when(20)
    join(threads)
    # then: the limiter's own commit, one for the twenty
    assert store.env.info()["last_txnid"] - before <= 2
    assert all(isinstance(a, list) for a in answers)
    assert len(ids(broker)) == 20


def test_a_failing_request_hurts_only_itself(broker: LmdbBroker) -> None:
    broker.put([job(id="taken")])
    limiter = Gate(broker._store)
    calls = [lambda n=n: broker.put([job(id=f"new{n}")]) for n in range(6)]
    calls.insert(3, lambda: broker.put([job(id="half"), job(id="taken")]))
    calls.insert(5, lambda: broker.attach(Owner(id="o", name="w")))
    threads, answers = in_threads(calls)
    limiter.release_when(8)
    join(threads)
    assert [type(a) for a in answers if isinstance(a, Exception)] == [DuplicateJob]
    assert ids(broker) == {"taken", *(f"new{n}" for n in range(6))}
    assert broker.stats()[0].ready == 7


def test_when_the_store_is_full_each_is_replayed_by_itself(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case Q10
    insert = put._insert

    def full(commit: Transitions, envelope: Envelope, *args: Any, **kwargs: Any) -> None:
        insert(commit, envelope, *args, **kwargs)
        if envelope.body == b"big":
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")

    limiter = Gate(broker._store)
    monkeypatch.setattr(put, "_insert", full)
    calls = [lambda: broker.put([job(), job()]), lambda: broker.put([job(body=b"big")])] * 2
    threads, answers = in_threads(calls)
    limiter.release_when(4)
    join(threads)
    assert [type(a) for a in answers] == [list, StoreFull, list, StoreFull]
    assert len(ids(broker)) == 4


def test_an_interrupted_leader_leaves_the_others_their_requests(broker: LmdbBroker) -> None:
    limiter = Gate(broker._store)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def lead() -> None:
        with pytest.raises(KeyboardInterrupt):
            broker._store.commits.run(broker._transitions, interrupt)

    first, _ = in_threads([lead])
    while len(broker._store.commits.pending) < 1:
        os.sched_yield()
    threads, answers = in_threads([lambda: broker.put([job()])] * 5)
    limiter.release_when(6)
    join(first + threads)
    assert [type(a) for a in answers] == [list] * 5
    assert len(ids(broker)) == 5
    assert broker.put([job()])  # the lead is free


def test_many_threads_lose_nothing(broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    # case Q8, small
    monkeypatch.setattr(group_commit, "BRISK", 60.0)  # a busy machine is slow

    def storm(n: int) -> int:
        owner = f"o{n}"
        broker.attach(Owner(id=owner, name=owner))
        done = 0
        for _ in range(30):
            broker.put([job()])
            for lease in broker.exchange(Step(owner, want=Want(2))).leases:
                done += broker.exchange(Step(owner, verdicts=[Verdict(lease.token, 0)])).settled[0]
        return done

    interval = sys.getswitchinterval()
    threads, answers = in_threads([lambda n=n: storm(n) for n in range(8)])
    join(threads)
    [row] = broker.stats()
    assert (row.accepted, row.succeeded, row.ready, row.running) == (
        240,
        sum(answers),
        240 - sum(answers),
        0,
    )
    assert sys.getswitchinterval() == interval


def test_a_step_inside_a_step_is_an_error_not_a_deadlock(broker: LmdbBroker) -> None:
    with pytest.raises(TidemillError, match=r"wait for itself"):
        broker._store.commits.run(broker._transitions, lambda commit: broker.put([job()]))
