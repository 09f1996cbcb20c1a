"""``patience`` holds on a server that stops or whose locks are held, also for migrations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from harness import eventually
from postgres_desk import connect, ids, job, take, until_blocked
from servers import Postgres

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.registry import migrate_store, open_broker
from tidemill.core.job import Owner, Verdict
from tidemill.errors import BrokerUnavailable, DuplicateJob

pytestmark = pytest.mark.full

SLACK = 15.0
"""Seconds by which a busy machine may be late; without a limit these calls would not end."""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    # Who asks for it by synchronous_commit=on waits for a standby that never comes.
    options = ("fsync=off", "synchronous_commit=local", "synchronous_standby_names=nowhere")
    with contextlib.closing(Postgres(*options)) as server:
        yield server


@pytest.fixture
def url(server: Postgres, schema: str) -> str:
    migrate_store(f"{server.url()}?schema={schema}")
    return f"{server.url()}?schema={schema}&patience=2"


@contextlib.contextmanager
def locked(url: str, table: str) -> Iterator[psycopg.Connection]:
    """A table that somebody has for themselves."""
    with connect(url) as conn:
        conn.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
        yield conn
        conn.rollback()


def given_up(call: Callable[[], object]) -> str:
    """What a call says that ends although the server is not back."""
    start = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        call()
    took = time.monotonic() - start
    assert took < 2 + SLACK, f"patience=2, and it took {took:.1f} s"
    return str(caught.value)


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except BrokerUnavailable:
        return False
    return True


def test_every_call_ends_within_patience_while_the_server_is_stopped(
    server: Postgres, url: str
) -> None:
    # law 16, case Q17
    broker = open_broker(url)
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id="a"), job(id="b")])
    [lease] = take(broker, "o")
    calls: list[Callable[[], object]] = [
        lambda: broker.put([job(id="c")]),
        lambda: broker.get("a"),
        lambda: broker.cancel(["b"]),
        lambda: broker.stats(),
        lambda: broker.set_queue("other", paused=True),
        lambda: broker.exchange(Step("o", [Verdict(lease.token, 0)], want=Want(1))),
        lambda: broker.attach(Owner(id="p", name="p")),
        lambda: broker.wait_for(["a"], 1.0),
        lambda: open_broker(url),
        lambda: migrate_store(url),
    ]
    with ThreadPoolExecutor(len(calls)) as pool, server.stalled():
        said = list(pool.map(given_up, calls))
    assert not [text for text in said if "\n" in text]
    eventually(lambda: succeeds(lambda: broker.put([job(id="d")])), "the server to be back")
    assert broker.exchange(Step("o", [Verdict(lease.token, 0)])).settled == [True]
    assert ids(broker) >= {"a", "b", "d"}
    broker.close()


def test_a_put_that_is_given_up_is_stored_whole_or_not_at_all(
    server: Postgres, broker: Broker
) -> None:
    # law 3, law 16
    jobs = [job(id=f"part-{number}") for number in range(300)]
    broker.put([job(id="before")])
    with server.stalled():
        said = given_up(lambda: broker.put(jobs))
    assert "did not answer within patience" in said
    assert "all or none: put them again with the same ids" in said
    eventually(lambda: succeeds(lambda: broker.put([job(id="after")])), "the server to be back")
    stored = ids(broker) - {"before", "after"}
    assert stored in (set(), {one.id for one in jobs})
    with contextlib.suppress(DuplicateJob):
        broker.put(jobs)
    assert ids(broker) == {"before", "after", *(one.id for one in jobs)}


def test_a_put_ends_within_patience_while_somebody_holds_its_locks(
    broker: Broker, url: str, schema: str
) -> None:
    with locked(url, f"{schema}.job"):
        assert "holds a lock" in given_up(lambda: broker.put([job(id="a")]))
    assert ids(broker) == set()  # it does not happen later either
    broker.put([job(id="a")])


def test_a_wait_for_a_connection_of_the_pool_ends_within_patience(url: str, schema: str) -> None:
    broker = open_broker(f"{url}&pool=2")
    try:
        with locked(url, f"{schema}.job"), ThreadPoolExecutor(6) as pool:
            said = list(pool.map(lambda _: given_up(lambda: broker.put([job()])), range(6)))
        assert [text for text in said if "raise pool=" in text]
        broker.put([job()])
    finally:
        broker.close()


def test_a_migration_lets_others_through_while_it_waits(
    broker: Broker, url: str, schema: str
) -> None:
    with connect(url) as reader, connect(url, autocommit=True) as looker:
        looker.execute(f"UPDATE {schema}.meta SET functions = 'old'".encode())
        reader.execute(f"SELECT FROM {schema}.shown".encode())
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(given_up, lambda: migrate_store(url))
            until_blocked(looker, reader)
            assert broker.get("none") is None  # it would wait behind the migration
            assert "a transaction that stays open uses its tables" in said.result()
            again = pool.submit(migrate_store, f"{url}0")
            until_blocked(looker, reader)
            reader.rollback()
            again.result()
    assert broker.get("none") is None


def test_a_put_that_may_have_been_accepted_says_so_and_which_id(url: str) -> None:
    # law 1: the server commits, and cannot say so, since a standby is away
    url = url.replace("patience=2", "patience=6")  # on a busy machine the put arrives late
    with (
        contextlib.closing(open_broker(url)) as broker,
        contextlib.closing(open_broker(f"{url}&options=-csynchronous_commit%3Don")) as other,
    ):
        broker.put([job(id="zero")])
        said = given_up(lambda: other.put([job(id="one")]))
        assert "job 'one' may have been accepted: put it again with the same id" in said
        said = given_up(lambda: other.put([job(id="two"), job(id="three")]))
        assert "2 jobs from 'two' on may have been accepted" in said
        # a commit is seen once its wait for the standby is cancelled, a moment after the put ended
        accepted = {"zero", "one", "two", "three"}
        eventually(lambda: ids(broker) == accepted, "the commits")
        with pytest.raises(DuplicateJob):
            broker.put([job(id="one")])
