"""The store's own time, when the clocks of the machine are set or it boots."""

from __future__ import annotations

import time

import pytest
from lmdb_desk import Sleeper, job
from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Unique
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.core.verdicts import given_back


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_jumps_across_a_restart_moves_nothing(
    url: str, moved_clock: MovedClock, jump: float
) -> None:
    # case Q9, law 19
    broker = open_broker(url)
    broker.put([job(id="first"), job(id="late", delay=60)])
    broker.close()
    moved_clock.set_wall(jump)
    again = open_broker(url)
    again.put([job(id="second")])
    again.attach(Owner(id="o", name="w"))
    reply = again.exchange(Step("o", want=Want(9)))
    assert [lease.open().id for lease in reply.leases] == ["first", "second"]
    assert 50 < reply.next_due <= 60
    again.close()


@pytest.mark.parametrize(("wall", "left"), [(30.0, 30.0), (-7200.0, 60.0)])
def test_after_a_boot_time_goes_on_and_never_back(
    url: str, monkeypatch: pytest.MonkeyPatch, wall: float, left: float
) -> None:
    # law 19: the machine's clock starts anew; the wall clock may have been set meanwhile
    broker = open_broker(url)
    broker.put([job(id="late", delay=60)])
    broker.tick()  # notes how the clocks stand
    broker.close()
    monkeypatch.setattr("tidemill.brokers.lmdb.engine.store._boot_id", lambda: "another")
    MovedClock(monkeypatch, wall=time.time() + wall, machine=5.0)
    again = open_broker(url)
    again.attach(Owner(id="o", name="w"))
    assert again.exchange(Step("o", want=Want(1))).next_due == pytest.approx(left, abs=5)
    again.close()


def test_no_expired_job_starts_when_more_expired_than_one_commit_ends(
    url: str, moved_clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.brokers.lmdb.claim.due._PROMOTE_MOST", 1)
    broker = open_broker(url)
    broker.put([job(id=name, expires=5) for name in "abc"])
    moved_clock.advance(6)
    broker.attach(Owner(id="o", name="w"))
    assert broker.exchange(Step("o", want=Want(9))).leases == []
    assert {broker.get(name).state for name in "abc"} == {State.EXPIRED}
    broker.close()


def test_a_job_of_an_unknown_task_meets_the_other_sleepers(broker: LmdbBroker) -> None:
    # given an owner with a job whose task it does not know, and sleepers
    owner, *others = (Sleeper(broker, name) for name in "uvw")
    broker.put([job()])
    [lease] = owner.exchange(want=Want(1))
    for other in others:
        other.sleep(1)
    # when the owner gives the job back, and goes to sleep until the job is due again
    owner.exchange(verdicts=[given_back(lease.token, lease.open())], want=Want(1))
    # then the sleepers look now, learn the due time, and will wake for the job, too
    assert all(other.hinted() for other in others)


def test_the_tick_forgets_keys_whose_time_is_over(
    url: str, moved_clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.brokers.lmdb.broker._PRUNE_MOST", 2)
    broker = open_broker(url)
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(key=name, unique=Unique(period=5)) for name in "abc"])
    leases = broker.exchange(Step("o", want=Want(3))).leases
    broker.exchange(Step("o", [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]))
    for seconds, left in ((0, 3), (6, 0)):
        moved_clock.advance(seconds)
        broker.tick()
        with broker._store.reading_txn() as txn:
            assert txn.stat(broker._store.tables.key)["entries"] == left
    broker.close()
