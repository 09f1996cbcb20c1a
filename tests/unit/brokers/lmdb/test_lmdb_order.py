"""Lists of an LMDB store: newest first by acceptance, whatever the ids and the size."""

from __future__ import annotations

import random

import pytest
from lmdb_desk import Process

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.look import search
from tidemill.brokers.lmdb.look.search import newest
from tidemill.brokers.lmdb.record import number_in
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock, new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Verdict
from tidemill.core.owner import Owner

pytestmark = pytest.mark.everyday

IDS = ["zebra", "17", "apple", "b", "Z", "0"]


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


def test_nothing_is_left_of_jobs_that_are_gone(url: str) -> None:
    broker = open_broker(f"{url}?keep_count=3&keep=0&keep_failed=0")
    assert isinstance(broker, LmdbBroker)
    broker.attach(Owner(id="o", name="w"))
    for turn in range(5):
        same = [f"own{turn}", made_at(1e9, turn), new_id(), *IDS]
        broker.put([Envelope(id=each, task="t") for each in same])
        leases = broker.exchange(Step("o", want=Want(99))).leases
        broker.exchange(Step("o", verdicts=[Verdict(v.token, Outcome.SUCCESS) for v in leases]))
        assert walked(broker) == by_number(broker)
        broker.delete(IDS)
        assert walked(broker) == by_number(broker)
    broker.close()


def test_jobs_of_processes_that_put_at_once_are_listed_in_the_order_of_acceptance(
    broker: LmdbBroker, url: str
) -> None:
    code = """
    ids = [[new_id() for _ in range(5)] for _ in range(60)]
    say("ready")
    sys.stdin.readline()
    for some in ids:
        broker.put([Envelope(id=i) for i in some] + [Envelope(id=new_id()) for _ in range(5)])
    say("done")
    """
    with Process(url, code) as one, Process(url, code) as two:
        for process in (one, two):
            process.expect("ready")
        for process in (one, two):
            process.tell()
        for process in (one, two):
            process.expect("done")
    every = by_number(broker)
    assert len(every) == 1200
    assert every != sorted(every, reverse=True)
    assert listed(broker, limit=100) == every
    assert walked(broker) == every


def test_a_page_looks_at_few_jobs_whatever_the_store_holds(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [new_id() for _ in range(20)]
    own = [f"{each}{n}" for n in range(1000) for each in ("0", "1z", "zz")]
    broker.put([Envelope(id=each) for each in [*own, *ours]])
    broker.put([Envelope(id=each) for each in ("new", "17", "x0")])
    looked: list[int] = []
    monkeypatch.setattr(search, "number_in", lambda data: looked.append(1) or number_in(data))
    page = broker.find(Filter(), 10)
    assert [r.envelope.id for r in page.records] == ["x0", "17", "new", *ours[:-8:-1]]
    assert listed(broker, page.cursor, limit=200) == [*ours[-8::-1], *own[::-1]]
    assert len(looked) < 6 * 3100
    looked.clear()
    page = broker.find(Filter(), 25)
    assert [r.envelope.id for r in page.records][-2:] == own[:-3:-1]
    assert len(looked) < 3 * 40


def test_a_list_goes_on_after_what_is_put_meanwhile(broker: LmdbBroker) -> None:
    broker.put([Envelope(id=each) for each in IDS])
    page = broker.find(Filter(), 2)
    broker.delete(["17"])
    broker.put([Envelope(id="17"), Envelope(id=new_id())])
    assert listed(broker, page.cursor) == ["b", "apple", "zebra"]


@pytest.fixture
def prefixed(broker: LmdbBroker) -> list[str]:
    rng = random.Random(2)
    ids = [f"{rng.choice('abc')}{rng.randrange(10**6)}" for _ in range(50)]
    broker.put([Envelope(id=each) for each in dict.fromkeys(ids)])
    return list(dict.fromkeys(ids))


@pytest.mark.parametrize("look", [20_000, 5])
def test_ids_with_a_prefix_are_newest_first(
    broker: LmdbBroker, prefixed: list[str], look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LOOK", look)
    some = [each for each in prefixed[::-1] if each.startswith("b")]
    assert listed(broker, what=Filter(id_prefix="b")) == some
