"""``django://`` works in pieces: no transaction grows with the number of jobs in the store.

The tests count what the largest transaction does: its statements, the rows that they return, and
the instructions of SQLite's virtual machine. The last number shows rows that a query walks over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broker_driver import LiveOwner, job
from moved_clock import MovedClock
from servers import django_on_sqlite

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.django import inspect
from tidemill.brokers.django import store as store_module
from tidemill.brokers.django.broker import DjangoBroker
from tidemill.brokers.django.connections import Connection
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Outcome, State, Verdict
from tidemill.errors import QueueFull

pytestmark = pytest.mark.everyday

FEW, MANY = 1200, 3600
OTHER = "other"


class Cost(msgspec.Struct):
    """What one transaction did."""

    statements: int = 0
    rows: int = 0
    instructions: int = 0  # in hundreds


class Meter:
    """The costs of all transactions since the last reset."""

    def __init__(self) -> None:
        self.all: list[Cost] = [Cost()]

    def instruction(self) -> int:
        self.all[-1].instructions += 1
        return 0

    def statement(self, text: str, rows: int) -> None:
        if text.startswith("BEGIN"):
            self.all.append(Cost())
        self.all[-1].statements += 1
        self.all[-1].rows += rows
        if text == "COMMIT":
            self.all.append(Cost())  # what comes now holds no lock

    def largest(self) -> Cost:
        """The largest number of each kind; reads without a transaction do not count."""
        begun = [cost for cost in self.all if cost.statements > 2]
        return Cost(*(max(getattr(one, name) for one in begun) for name in Cost.__struct_fields__))


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    meter = Meter()
    plain_execute, plain_open = Connection._execute_one, Connection.open

    def execute(self: Connection, text: str, parameters: Any) -> list[Any]:
        rows = plain_execute(self, text, parameters)
        meter.statement(text, len(rows))
        return rows

    def open_counted(self: Connection) -> None:
        plain_open(self)
        self._wrapper.connection.set_progress_handler(meter.instruction, 100)

    monkeypatch.setattr(Connection, "_execute_one", execute)
    monkeypatch.setattr(Connection, "open", open_counted)
    return meter


class Store:
    """A store, its owner, and a clock."""

    def __init__(self, broker: DjangoBroker, clock: MovedClock) -> None:
        self.broker = broker
        self.owner = LiveOwner(broker)
        self._clock = clock

    def put(self, count: int, **fields: Any) -> list[str]:
        jobs = [job(**fields) for _ in range(count)]
        self.broker.put(jobs)
        return [one.id for one in jobs]

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def end(self, count: int, outcome: Outcome = Outcome.SUCCESS, **fields: Any) -> None:
        """Lease jobs, and settle them."""
        while count > 0:
            leases = self.owner.take(min(count, 400))
            assert leases
            verdicts = [Verdict(one.token, outcome, **fields) for one in leases]
            assert all(self.owner.exchange(verdicts=verdicts).settled)
            count -= len(leases)

    def count(self, *states: State) -> int:
        page = self.broker.find(Filter(states=frozenset(states)), 10_000)
        return len(page.records)


@pytest.fixture
def make_store(tmp_path: Path, moved_clock: MovedClock) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(query: str = "") -> Store:
        url = django_on_sqlite(str(tmp_path / f"store{len(stores)}"))
        broker = open_broker(url + query)
        stores.append(Store(broker, moved_clock))
        return stores[-1]

    yield make
    for store in stores:
        store.broker.close()


def assert_no_larger(few: Cost, many: Cost) -> None:
    """A tree of an index may be one level deeper."""
    assert many.statements <= few.statements + 2
    assert many.rows <= few.rows + 20
    assert many.instructions <= few.instructions * 1.2 + 30


Act = Callable[[Store], None]
Fill = Callable[[Store, int], Act]


def jobs_that_come_due(store: Store, count: int) -> Act:
    store.put(count, delay=10.0)
    store.advance(20)

    def act(store: Store) -> None:
        assert len(store.owner.take(10)) == 10
        assert store.count(State.SCHEDULED) == 0

    return act


def jobs_that_expire(store: Store, count: int) -> Act:
    store.put(count, expires=10.0)
    store.advance(20)

    def act(store: Store) -> None:
        assert store.owner.take(10) == []
        assert store.count(State.EXPIRED) == count

    return act


def a_purge(store: Store, count: int) -> Act:
    store.put(count)
    store.put(5, queue=OTHER)

    def act(store: Store) -> None:
        assert delete_waiting(store.broker, "default") == count
        assert [(row.name, row.ready) for row in store.broker.stats()] == [
            ("default", 0),
            (OTHER, 5),
        ]

    return act


def a_purge_of_a_queue_with_one_job(store: Store, count: int) -> Act:
    store.put(1, queue=OTHER)
    store.put(count)
    store.put(1, queue=OTHER)

    def act(store: Store) -> None:
        assert delete_waiting(store.broker, OTHER) == 2

    return act


def jobs_to_delete(store: Store, count: int) -> Act:
    ids = store.put(count)

    def act(store: Store) -> None:
        assert all(store.broker.delete(ids))

    return act


def finished_jobs_that_are_too_old(store: Store, count: int) -> Act:
    store.put(count)
    store.end(count)
    store.advance(4000)

    def act(store: Store) -> None:
        store.broker.tick()
        assert store.count() == 0

    return act


def finished_jobs_that_are_too_many(store: Store, count: int) -> Act:
    store.put(count)
    store.end(count)

    def act(store: Store) -> None:
        store.broker.tick()
        assert store.count() == 100

    return act


def jobs_under_a_limit(store: Store, count: int) -> Act:
    limit = JobLimit("one", "a", 1.0, LimitSettings(concurrency=1))
    other = JobLimit("one", "b", 1.0, LimitSettings(concurrency=1))
    store.put(count, limit=limit)
    ids = store.put(10, limit=other, queue=OTHER)
    store.put(5)

    def act(store: Store) -> None:
        found = [lease.open() for lease in store.owner.take(10)]
        assert sorted((one.queue, one.limit is None) for one in found) == [
            *[("default", False), *[("default", True)] * 5],
            (OTHER, False),
        ]
        assert ids[0] in {one.id for one in found}

    return act


def jobs_of_a_queue_with_a_limit(store: Store, count: int) -> Act:
    store.put(count)
    store.broker.set_limit("default", LimitSettings(concurrency=2), queue=True)

    def act(store: Store) -> None:
        leases = store.owner.take(10)
        assert len(leases) == 2
        store.owner.settle(leases[0])
        assert len(store.owner.take(10)) == 1

    return act


def a_queue_with_a_bound(store: Store, count: int) -> Act:
    store.put(count)
    store.broker.set_queue("default", max_size=500)

    def act(store: Store) -> None:
        with pytest.raises(QueueFull):
            store.put(1)

    return act


FILLS: list[Fill] = [
    jobs_that_come_due,
    jobs_that_expire,
    a_purge,
    a_purge_of_a_queue_with_one_job,
    jobs_to_delete,
    finished_jobs_that_are_too_old,
    finished_jobs_that_are_too_many,
    jobs_under_a_limit,
    jobs_of_a_queue_with_a_limit,
    a_queue_with_a_bound,
]


@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_no_transaction_grows_with_the_store(
    fill: Fill, make_store: Callable[..., Store], meter: Meter
) -> None:
    # given two stores, one with more jobs
    costs: list[Cost] = []
    for count in (FEW, MANY):
        store = make_store("?keep_count=100&poll=3600")
        act = fill(store, count)
        # when the same call meets them
        meter.all = [Cost()]
        act(store)
        costs.append(meter.largest())
    # then no transaction of the larger store does more
    assert_no_larger(*costs)


def test_an_owner_whose_step_waits_for_many_due_jobs_keeps_its_lease(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given more due jobs than one transaction moves
    store = make_store()
    store.put(1200, delay=10.0)
    store.advance(20)
    seen: list[float] = []
    come_due = store_module.come_due

    def late(jobs: StoredJobs) -> bool:
        text = 'SELECT "until" FROM tidemill_owner'
        seen.extend(until for (until,) in jobs.rows.execute(text))
        store.advance(1)
        return come_due(jobs)

    monkeypatch.setattr(store_module, "come_due", late)
    # when the owner makes a step
    assert len(store.owner.take(10)) == 10
    # then each transaction has renewed its lease
    assert len(seen) > 2
    assert sorted(seen) == seen
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("act", ["delete", "alter"])
def test_a_large_job_that_changes_while_a_list_reads_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    # case M10
    broker = open_broker(django_on_sqlite(str(tmp_path / "store")))
    given = Envelope(id="a", task="t", queue="q", body=b"x" * 20_000, text="words")
    broker.put([given])
    listed_row = inspect.listed_row

    def meanwhile(*args: Any) -> Any:
        if act == "delete":
            broker.delete(["a"])
        else:
            broker.alter(["a"], queue="a longer name")
        return listed_row(*args)

    monkeypatch.setattr(inspect, "listed_row", meanwhile)
    found = [(r.envelope.id, r.envelope.text) for r in broker.find(Filter()).records]
    assert found == ([] if act == "delete" else [("a", "words")])
    broker.close()
