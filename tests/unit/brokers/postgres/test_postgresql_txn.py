"""Puts inside a transaction of the caller's own, on PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from moved_clock import MovedClock
from postgres_desk import connect, ids, job, take, until_blocked
from psycopg.rows import class_row, dict_row, scalar_row

from tidemill import Tidemill, chain, group
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.core.job import Owner, Placed
from tidemill.errors import DuplicateJob, InvalidOption, JobNotFound, QueueFull, TidemillError


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection]:
    with connect(url) as conn:
        yield conn


def test_a_put_in_a_transaction_appears_with_its_commit(
    broker: Broker, conn: psycopg.Connection
) -> None:
    # case Q4, law 17
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id="one", queue="q")], txn=conn)
    broker.put([job(id="two", queue="queue2"), job(id="three", queue="q", delay=60)], txn=conn)
    assert ids(broker) == set()
    assert take(broker, "o", 9) == []
    conn.commit()
    assert ids(broker) == {"one", "two", "three"}
    assert {(r.name, r.size) for r in broker.stats()} == {("q", 2), ("queue2", 1)}
    assert {lease.open().id for lease in take(broker, "o", 9)} == {"one", "two"}


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_rollback_takes_the_jobs_with_it(broker: Broker, url: str, autocommit: bool) -> None:
    # case Q4, law 17
    with connect(url, autocommit=autocommit) as conn:
        with conn.transaction(force_rollback=True):
            broker.put([job(queue="q"), job(queue="queue2", key="k")], txn=conn)
        with conn.transaction():
            broker.put([job(id="kept")], txn=conn)
    assert ids(broker) == {"kept"}
    assert [row.name for row in broker.stats()] == ["default"]
    broker.put([job(key="k")])


def test_the_first_put_of_a_connection_does_not_commit(
    broker: Broker, conn: psycopg.Connection
) -> None:
    # law 17: psycopg takes a block inside no transaction for the transaction
    broker.put([job()], txn=conn)
    conn.rollback()
    assert ids(broker) == set()


def test_a_put_that_is_refused_leaves_the_transaction_usable(
    broker: Broker, conn: psycopg.Connection
) -> None:
    # law 3
    broker.put([job(id="taken")])
    broker.set_queue("small", max_size=1)
    broker.put([job(id="before")], txn=conn)
    with pytest.raises(DuplicateJob, match="'taken'"):
        broker.put([job(id="part", queue="new", key="k"), job(id="taken")], txn=conn)
    with pytest.raises(QueueFull, match="max_size=1"):
        broker.put([job(queue="small"), job(queue="small")], txn=conn)
    broker.put([job(id="after", key="k")], txn=conn)
    conn.commit()
    assert ids(broker) == {"taken", "before", "after"}
    assert [(r.name, r.ready) for r in broker.stats()] == [("default", 3), ("small", 0)]


def test_a_sleeper_is_woken_by_the_commit(broker: Broker, conn: psycopg.Connection) -> None:
    # case Q4, law 17
    broker.attach(Owner(id="o", name="w"))
    taken: list[str] = []
    asleep = threading.Event()

    def sleep() -> None:
        leases = take(broker, "o")
        until = time.monotonic() + 30
        while not leases and time.monotonic() < until:
            asleep.set()
            broker.wait("o", 20)
            leases = take(broker, "o")
        taken.extend(lease.open().id for lease in leases)

    thread = threading.Thread(target=sleep)
    thread.start()
    assert asleep.wait(10)
    broker.put([job(id="one")], txn=conn)
    assert taken == []
    start = time.monotonic()
    conn.commit()
    thread.join(30)
    assert taken == ["one"]
    assert time.monotonic() - start < 15


def test_a_connection_that_could_not_commit_is_refused(broker: Broker, url: str) -> None:
    # case Q17
    with (
        connect(url, autocommit=True) as conn,
        pytest.raises(InvalidOption, match=r"autocommit.*with conn.transaction"),
    ):
        broker.put([job()], txn=conn)
    with pytest.raises(InvalidOption, match=r"connection or cursor of psycopg.*builtins\.str"):
        broker.put([job()], txn="transaction")
    assert ids(broker) == set()


def test_an_open_transaction_keeps_nobody_from_the_same_queue(
    broker: Broker, conn: psycopg.Connection
) -> None:
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id="mine", queue="fresh")], txn=conn)
    broker.put([job(id="other", queue="fresh")])
    reply = broker.exchange(Step("o", want=Want(9, ("fresh",))))
    assert [lease.open().id for lease in reply.leases] == ["other"]
    conn.commit()
    assert ids(broker) == {"mine", "other"}


def test_an_open_acknowledgement_keeps_nobody_from_the_queue(
    url: str, conn: psycopg.Connection, moved_clock: MovedClock
) -> None:
    # law 17: other consumers pass over the locked message, and a rollback frees it
    with Tidemill(url) as mill:
        queue = mill.queue("q")
        queue.put_many(["mine", "other"], ttr=60)
        mine = queue.get(30)
        assert mine.ack(txn=conn)
        moved_clock.advance(61)
        other = queue.get(30)
        assert (other.body, other.ack()) == ("other", True)
        assert queue.get(0) is None
        conn.rollback()
        again = queue.get(30)
        assert (again.body, again.attempt) == ("mine", 2)


class Model:
    """What a row factory of the caller's makes."""

    def __init__(self, **columns: object) -> None:
        assert columns, "this factory takes no empty row"


@pytest.mark.parametrize("cursor", [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor])
@pytest.mark.parametrize("rows", [dict_row, scalar_row, class_row(Model)])
def test_cursors_and_row_factories_of_any_kind_will_do(
    broker: Broker, url: str, cursor: type[psycopg.Cursor], rows: Any
) -> None:
    # law 17
    with connect(url, cursor_factory=cursor, row_factory=rows) as conn:
        broker.put([job(id="a", key="k", queue="q")], txn=conn)
        [put] = broker.put([job(id="b", key="k", queue="q")], txn=conn)
        assert (put.id, put.placed) == ("a", Placed.KEPT)
        with pytest.raises(DuplicateJob):
            broker.put([job(id="a")], txn=conn)
    assert ids(broker) == {"a"}


def test_coroutines_put_on_an_async_connection(url: str) -> None:
    # law 17: the transaction commits with the jobs, or is rolled back with them
    async def main() -> None:
        with Tidemill(url) as mill:
            async with await psycopg.AsyncConnection.connect(url.partition("?")[0]) as conn:
                await mill.queue("q").aput("one", txn=conn, id="one")
                await mill.queue("q").aput_many(["two", "three"], txn=conn)
                assert mill.queues() == []
                await conn.commit()
                assert [row.size for row in mill.queues()] == [3]
                await mill.queue("q").aput("four", txn=conn)
                with pytest.raises(DuplicateJob):
                    await mill.queue("q").aput("again", txn=conn, id="one")
                await conn.rollback()
                with pytest.raises(InvalidOption, match="await aenqueue"):
                    mill.queue("q").put("five", txn=conn)
                assert [row.size for row in mill.queues()] == [3]

    asyncio.run(main())


def test_a_put_that_is_cancelled_leaves_an_async_connection_usable(
    broker: Broker, url: str, conn: psycopg.Connection
) -> None:
    broker.put([job(id="held", key="k")], txn=conn)  # who comes next for the key waits

    async def main() -> None:
        with Tidemill(url) as mill:
            async with await psycopg.AsyncConnection.connect(url.partition("?")[0]) as other:
                put = asyncio.ensure_future(mill.queue("q").aput(1, key="k", txn=other))
                with connect(url, autocommit=True) as looker:
                    await asyncio.to_thread(until_blocked, looker, conn)
                put.cancel()
                conn.rollback()
                with pytest.raises(asyncio.CancelledError):
                    await put
                await other.rollback()
                await mill.queue("q").aput(2, key="k", txn=other)

    asyncio.run(main())
    assert [row.size for row in broker.stats()] == [1]


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
@pytest.mark.parametrize("same", ["key", "id"])
def test_a_conflict_under_stricter_isolation_is_the_drivers_serialization_error(
    broker: Broker, conn: psycopg.Connection, level: str, same: str
) -> None:
    conn.isolation_level = psycopg.IsolationLevel[level]
    conn.execute("SELECT count(*) FROM pg_class")  # what it can see is settled now
    fields = {"key": {"key": "k"}, "id": {"id": "x"}}[same]
    broker.put([job(**fields)])
    error = refused(lambda: broker.put([job(**fields)], txn=conn))
    assert isinstance(error, psycopg.errors.SerializationFailure)
    assert isinstance(error, TidemillError)
    assert error.sqlstate == "40001"
    assert isinstance(error.__cause__, psycopg.Error)
    conn.rollback()
    broker.put([job(key="other")], txn=conn)
    conn.commit()


def refused(call: Callable[[], object]) -> Exception | None:
    """The error of a call, if it has one."""
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("shape", ["chain", "chain of groups", "group"])
def test_a_composition_that_is_rolled_back_is_not_found(
    url: str, conn: psycopg.Connection, shape: str
) -> None:  # case M7
    with Tidemill(url) as mill:

        @mill.task
        def work(*given: int) -> int:
            return len(given)

        calls = [work.call(1), work.call(2)]
        made = {
            "chain": chain(*calls),
            "chain of groups": chain(group(calls), group(calls)),
            "group": group(calls),
        }[shape]
        handle: Any = mill.enqueue(made.using(txn=conn))
        parts = [handle[0]] if shape == "group" else handle.steps
        conn.rollback()
        for one in (handle, *parts):
            for look in (one.refresh, lambda one=one: one.wait(timeout=60)):
                with pytest.raises(JobNotFound, match="not been committed, or was rolled back"):
                    look()
