"""Long falls in the LMDB store: they go in pieces, and go on after a kill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lmdb_desk import job

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb import broker as lmdb_broker
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.claim import due
from tidemill.brokers.lmdb.put import workflows
from tidemill.core.envelope import Links
from tidemill.core.job import Outcome, Owner, State, Verdict

MANY = 20


def group(broker: LmdbBroker, waits: str) -> Callable[[Outcome], None]:
    """A job behind many; what settles each of these in a step of its own."""
    names = tuple(f"m{n:02}" for n in range(MANY))
    end = job(id="end", links=Links(waits=waits, inputs=names))
    broker.put([end, *[job(id=i, links=Links(next=("end",))) for i in names], job(id="last")])
    broker.attach(Owner(id="w", name="w"))
    leases = broker.exchange(Step("w", want=Want(MANY))).leases

    def settle(outcome: Outcome) -> None:
        for lease in leases:
            broker.exchange(Step("w", [Verdict(lease.token, outcome)]))

    return settle


def chain_of(broker: LmdbBroker, count: int, queue: str = "default") -> list[str]:
    """Jobs one after the other, and one that is called when the last did not succeed."""
    names = [f"c{n:03}" for n in range(count)]
    jobs = [job(id="hook", queue=queue, links=Links(waits="failure"))]
    for n in reversed(range(count)):
        after = (names[n + 1],) if n + 1 < count else ("hook",)
        waits = "success" if n else ""
        jobs.append(job(id=names[n], queue=queue, links=Links(next=after, waits=waits)))
    broker.put(jobs)
    return names


@pytest.fixture
def short_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (workflows, due, lmdb_broker):
        monkeypatch.setattr(module, "FALL_MOST", 5)


def states(broker: LmdbBroker, names: list[str]) -> set[State]:
    return {record.state for record in broker.get_many(names) if record is not None}


def test_a_long_fall_goes_in_pieces(broker: LmdbBroker, short_falls: None) -> None:
    # law 14
    names = chain_of(broker, 50)
    before = broker._store.env.info()["last_txnid"]
    assert broker.cancel([names[0]]) == [True]
    assert states(broker, names) == {State.CANCELLED}
    assert states(broker, ["hook"]) == {State.READY}
    assert broker._store.env.info()["last_txnid"] - before >= 10


def test_a_fall_goes_on_when_its_cause_was_killed(
    broker: LmdbBroker, short_falls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 3
    names = chain_of(broker, 50)

    class Killed(BaseException):
        pass

    def killed(_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(lmdb_broker, "come_due", killed)
        with pytest.raises(Killed):
            broker.cancel([names[0]])
    assert states(broker, names) == {State.CANCELLED, State.WAITING}
    # then: the next worker that comes goes on, at once
    broker.attach(Owner(id="w", name="w"))
    steps = 0
    while broker.exchange(Step("w", want=Want(0))).next_due == 0:
        steps += 1
    assert steps >= 8
    assert states(broker, names) == {State.CANCELLED}
    [lease] = broker.exchange(Step("w", want=Want(5))).leases
    assert lease.open().id == "hook"


def test_a_job_made_ready_in_the_middle_of_its_fall_takes_all_with_it(
    broker: LmdbBroker, short_falls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = chain_of(broker, 30)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_broker, "come_due", lambda _: None)
        broker.cancel([names[0]])
    assert State.WAITING in states(broker, names)
    assert broker.retry([names[0]]) == [True]
    assert states(broker, names[1:]) == {State.WAITING}
    broker.attach(Owner(id="w", name="w"))
    ran = []
    while leases := broker.exchange(Step("w", want=Want(1))).leases:
        ran.append(leases[0].open().id)
        broker.exchange(Step("w", [Verdict(leases[0].token, Outcome.SUCCESS)]))
    assert ran == ["hook", *names]  # it had been called for the first end
    assert states(broker, names) == {State.SUCCEEDED}
