"""Lists of an LMDB store: newest first by acceptance, whatever the ids and the size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.look import inspect, search
from tidemill.brokers.lmdb.look.search import newest
from tidemill.brokers.lmdb.record import number_in
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock, new_id
from tidemill.core.envelope import Envelope, JobLimit
from tidemill.core.job import Outcome, Owner, State, Verdict

pytestmark = pytest.mark.everyday


def listed(
    broker: Broker, cursor: str = "", what: Filter | None = None, limit: int = 2
) -> list[str]:
    found: list[str] = []
    while True:
        page = broker.find(what or Filter(), limit, cursor)
        found += [record.envelope.id for record in page.records]
        cursor = page.cursor
        if not cursor:
            return found


def by_number(broker: LmdbBroker) -> list[str]:
    """All ids, from a look at every job."""
    with broker._store.env.begin() as txn:
        rows = [(number_in(data), i.decode()) for i, data in txn.cursor(broker._store.tables.job)]
    return [job_id for _, job_id in sorted(rows, reverse=True)]


def walked(broker: LmdbBroker) -> list[str]:
    """All ids, from the index; every entry is there, and none too many."""
    store = broker._store
    with store.reading_views() as (txn, views):
        rows = list(newest(store, txn, views, search.FIRST, b""))
        entries = [key for key, _ in txn.cursor(store.tables.said) if key[:1] == b"i"]
        apart = [row for row in rows if not row[3]]
        assert len(entries) == len(apart)
    return [job_id.decode() for _, job_id, *_ in rows]


def made_at(seconds: float, n: int) -> str:
    """An id as tidemill makes it at a time."""
    return f"{int(seconds * 1000) << 20 | n:016x}{n:010x}"


def any_id(rng: random.Random, n: int) -> str:
    now = clock.wall()
    return rng.choice(
        [
            new_id(),
            new_id(),
            f"{rng.randrange(10**6)}-{n}",
            f"zz{rng.randrange(10**6)}-{n}",
            f"{new_id()}.{rng.randrange(20)}",
            made_at(now + rng.uniform(-2, 2), n),
            made_at(now + rng.choice([-9e5, -5000, 5000, 9e7]), n),
            "f" * 20 + f"{n:06}",
        ]
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_list_is_that_of_the_memory_broker_whatever_the_ids(
    broker: LmdbBroker, seed: int
) -> None:
    rng, memory = random.Random(seed), open_broker("memory://")
    ids: list[str] = []
    for n in range(60):
        new = [any_id(rng, 100 * n + i) for i in range(rng.choice([1, 1, 2, 9]))]
        gone = rng.sample(ids, min(len(ids), rng.choice([0, 0, 1, 3])))
        again = rng.sample(ids, min(len(ids), 1))
        for each in (broker, memory):
            each.put([Envelope(id=i, queue=rng_queue(i)) for i in new])
            each.cancel(again)
            each.retry(again)
            each.delete(gone)
        if n == 40:
            assert delete_waiting(broker, "a") == delete_waiting(memory, "a")
        ids = [i for i in (*ids, *new) if memory.get(i)]
        if n % 10 == 9:
            assert listed(broker, limit=rng.choice([1, 7, 1000])) == listed(memory, limit=1000)
            assert walked(broker) == by_number(broker)
    memory.close()


def rng_queue(job_id: str) -> str:
    return "ab"[sum(job_id.encode()) % 2]


@pytest.mark.parametrize("seed", range(6))
def test_a_list_by_state_is_that_of_the_memory_broker(
    broker: LmdbBroker, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_FEW", 3)
    monkeypatch.setattr(search, "_MOST", 4)
    monkeypatch.setattr(inspect, "_SCAN", 5)
    rng, memory = random.Random(seed), open_broker("memory://")
    for each in (broker, memory):
        each.attach(Owner(id="me"))
    ids: list[str] = []
    for n in range(30):
        jobs = [any_job(rng, any_id(rng, 100 * n + i)) for i in range(rng.choice([1, 3, 9]))]
        ids += [job.id for job in jobs]
        some = rng.sample(ids, min(len(ids), 3))
        act = rng.choice(["cancel", "delete", "retry"])
        for each in (broker, memory):
            each.put(jobs)
            getattr(each, act)(some)
            run_some(each)
    for state in State:
        for queue in ("a", "b", ""):
            what = Filter(states=frozenset({state}), queue=queue)
            expected = listed(memory, what=what)
            assert listed(broker, what=what) == expected
        assert expected or state in (State.WAITING, State.EXPIRED)
    memory.close()


def any_job(rng: random.Random, job_id: str) -> Envelope:
    delay, limit = rng.choice([0.0, 0.0, 1000.0]), rng.choice([None, JobLimit("few")])
    return Envelope(id=job_id, task="t", queue=rng_queue(job_id), delay=delay, limit=limit)


def run_some(broker: Broker) -> None:
    """Lease a job of queue a: some succeed, some fail, and some go on."""
    leases = broker.exchange(Step("me", want=Want(1, ("a",)))).leases
    outcomes = (Outcome.SUCCESS, Outcome.FAIL, None)
    ends = [(lease.token, outcomes[sum(lease.open().id.encode()) % 3]) for lease in leases]
    broker.exchange(Step("me", [Verdict(token, end) for token, end in ends if end is not None]))


def test_the_walk_to_a_list_by_state_ends_soon(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_FEW", 10)
    monkeypatch.setattr(inspect, "_SCAN", 5)
    walked = list[int]()

    def counted(*args: Any) -> Iterator[Any]:
        for row in newest(*args):
            walked.append(row[0])
            yield row

    monkeypatch.setattr(search, "newest", counted)
    broker.put([Envelope(id=f"early-{n:03}", task="t", delay=1000) for n in range(40)])
    broker.put([Envelope(id=new_id(), task="t") for _ in range(400)])
    page = broker.find(Filter(states=frozenset({State.SCHEDULED})), limit=15)
    assert [record.envelope.id for record in page.records] == [
        f"early-{n:03}" for n in range(39, 24, -1)
    ]
    assert len(walked) < 30
