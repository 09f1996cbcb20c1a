"""Group commit: callers share one, errors and interruptions hurt only their own."""

from __future__ import annotations

import collections
import os
import sys
import time
from typing import Any

import lmdb
import pytest
from lmdb_desk import Gate, ids, in_threads, job, join

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine import group_commit
from tidemill.brokers.lmdb.engine.group_commit import Request
from tidemill.brokers.lmdb.put import put
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.commit_delay import CommitDelay
from tidemill.core.envelope import Envelope
from tidemill.core.job import Verdict
from tidemill.core.owner import Owner
from tidemill.errors import (
    DuplicateJob,
    StoreFull,
    TidemillError,
)


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


@pytest.mark.everyday
def test_threads_that_put_one_after_the_other_share_each_commit(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None falls behind: who was answered is waited for; here for long, so no clock matters."""
    delay = broker._store.commits._delay
    monkeypatch.setattr(delay, "_each", 6.0)  # once it waits in vain: the limiter puts no more
    monkeypatch.setattr(delay, "_most", 6.0)
    limiter = Gate(broker._store)
    before = broker._store.env.info()["last_txnid"]

    def put() -> None:
        for _ in range(10):
            broker.put([job()])

    threads, answers = in_threads([put] * 4)
    limiter.release_when(4)
    join(threads)
    assert answers == [None] * 4
    # then: the limiter's own commit, and one for every four puts
    assert broker._store.env.info()["last_txnid"] - before <= 12


class Leaving(collections.deque[Request]):
    """The last of those who wait takes his request back, just when the leader turns to him."""

    def popleft(self) -> Request:
        if len(self) == 1:
            self.clear()
        return super().popleft()


def test_a_request_taken_back_just_before_its_turn_harms_no_other(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = broker._store.commits
    done: list[str] = []
    other, gone = (Request(lambda _, name=name: done.append(name)) for name in ("other", "gone"))
    own = Request(lambda _: done.append("own"))
    monkeypatch.setattr(commits, "pending", Leaving([own, other, gone]))
    with commits.lead:
        assert commits.lock.take()
        commits._lead(broker._transitions, own)
    assert done == ["own", "other"]
    assert [own.done, other.done, gone.done] == [True, True, False]
    commits.pending.append(gone)
    assert commits.lead.acquire(timeout=0)
    commits.pass_on()
    assert not commits.lead.locked()


def test_the_last_request_of_a_commit_is_not_undone_by_the_others(
    broker: LmdbBroker,
) -> None:
    """What such a request does is told of before the commit."""
    commits = broker._store.commits
    done: list[int] = []

    def refuse(_: object) -> None:
        done.append(0)
        raise DuplicateJob("x")

    limiter = Gate(broker._store)
    first = lambda: commits.run(broker._transitions, lambda _: done.append(1), last=True)  # noqa: E731
    threads, _ = in_threads([first])
    while not commits.pending:
        os.sched_yield()
    more, _ = in_threads([lambda: commits.run(broker._transitions, refuse)])
    limiter.release_when(2)
    join(threads + more)
    assert done.count(1) == 1
    assert done[0] == 0


def test_a_commit_does_not_wait_twice_for_absent_callers() -> None:
    waits = CommitDelay()
    pending = collections.deque([object()])
    waits.expect(10, 1)
    before = time.monotonic()
    waits.wait(pending)
    assert time.monotonic() - before >= 200e-6
    waits.expect(10, 1)
    waits._until = time.monotonic() + 3600
    waits.wait(pending)  # returns: it was in vain the last time
    waits.arrived(11)  # nobody waits, nothing breaks


def test_an_interrupt_while_waiting_for_others_takes_the_request_back(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CommitDelay, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            broker.put([job(id="never")])
    threads, answers = in_threads([lambda: broker.put([job(id="next")])])
    join(threads)
    assert isinstance(answers[0], list)
    assert ids(broker) == {"next"}


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


def test_attaching_and_detaching_survive_a_replay(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tidemill.brokers.lmdb.engine.group_commit.BRISK", 60.0
    )  # a busy machine is slow
    # an owner's lock and place to sleep are no part of the transaction that is abandoned
    broker.put([job(id="taken")])
    for n in range(3):
        broker.attach(Owner(id=f"o{n}", name=f"w{n}"))
    limiter = Gate(broker._store)
    threads, answers = in_threads(
        [
            lambda: broker.detach("o0"),
            lambda: broker.put([job(id="taken")]),
            lambda: broker.detach("o1"),
            lambda: broker.attach(Owner(id="o3", name="w3")),
        ]
    )
    limiter.release_when(4)
    join(threads)
    assert [type(a) for a in answers] == [type(None), DuplicateJob, type(None), type(None)]
    assert sorted(o.id for o in broker.owners()) == ["o2", "o3"]
    assert len({m.sleeper.slot for o in ("o2", "o3") for m in [broker._owners[o]]}) == 2


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


def test_a_follower_that_is_interrupted_takes_its_request_back(broker: LmdbBroker) -> None:
    store = broker._store
    limiter = Gate(store)

    class Interrupted(BaseException):
        pass

    class Turn:
        def acquire(self, **_: object) -> bool:
            raise Interrupted

    real = group_commit.Request

    def interrupted_request(apply: Any, **options: Any) -> Any:
        request = real(apply, **options)
        request.turn = Turn()
        return request

    group_commit.Request = interrupted_request
    try:
        with pytest.raises(Interrupted):
            broker.put([job(id="gone")])
    finally:
        group_commit.Request = real
    threads, _ = in_threads([lambda: broker.put([job(id="kept")])])
    limiter.release_when(1)
    join(threads)
    assert ids(broker) == {"kept"}


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
