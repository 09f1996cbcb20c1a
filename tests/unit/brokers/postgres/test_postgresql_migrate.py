"""The tables: made once by any number of processes, changed in order, checked when opened."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from postgres_desk import connect, job, take
from servers import NETWORK, postgres_url

from tidemill import Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.postgres import schema
from tidemill.brokers.registry import migrate_store, open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Owner, State, Verdict
from tidemill.errors import BrokerUnavailable, InvalidOption


@pytest.fixture
def name() -> str:
    return f"t{new_id()}"


@pytest.fixture
def url(name: str) -> str:
    return f"{postgres_url()}?schema={name}"


def test_an_unmigrated_store_says_what_to_do(url: str) -> None:
    # case Q17
    with pytest.raises(BrokerUnavailable, match=r"no store in schema .*tidemill migrate"):
        open_broker(url)
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", "doctor", "--url", url],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "tidemill migrate" in done.stdout


def test_many_may_migrate_at_once_and_again(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: migrate_store(f"{url}&patience=60"), range(8)))
    assert sorted(made) == [(0, schema.VERSION), *[(schema.VERSION, schema.VERSION)] * 7]
    broker = open_broker(url)
    broker.put([job()])
    broker.close()
    assert migrate_store(url) == (schema.VERSION, schema.VERSION)


def test_migrations_run_once_each_and_in_order(name: str, url: str) -> None:
    steps = [
        *schema._migrations(),
        "CREATE TABLE tidemill.extra (n int); INSERT INTO tidemill.extra VALUES (1)",
        "UPDATE tidemill.extra SET n = n + 1",
    ]
    with connect(url, autocommit=True) as conn:
        schema.migrate(conn, name, steps[:-1])
        assert schema.migrate(conn, name, steps) == (len(steps) - 1, len(steps))
        assert schema.migrate(conn, name, steps) == (len(steps), len(steps))
        [(n,)] = conn.execute(f"SELECT n FROM {name}.extra").fetchall()
    assert n == 2
    # and a newer store is never taken back
    with pytest.raises(BrokerUnavailable, match=r"never goes back: upgrade tidemill here"):
        migrate_store(url)
    both = rf"version {len(steps)}, .* version {len(steps) - 2}; upgrade tidemill here"
    with pytest.raises(BrokerUnavailable, match=both):
        open_broker(url)


def test_a_migration_that_fails_leaves_all_as_it_was(name: str, url: str) -> None:
    migrate_store(url)
    with connect(url, autocommit=True) as conn:
        with pytest.raises(Exception, match="nonsense"):
            schema.migrate(conn, name, [*schema._migrations(), "CREATE TABLE x (); nonsense"])
        assert schema.version_of(conn, name) == schema.VERSION
    open_broker(url).close()


def test_older_functions_are_noticed(name: str, url: str) -> None:
    migrate_store(url)
    with connect(url, autocommit=True) as conn:
        conn.execute(f"UPDATE {name}.meta SET functions = 'old'")
    with pytest.raises(BrokerUnavailable, match=r"another build of version.*tidemill migrate"):
        open_broker(url)
    migrate_store(url)
    open_broker(url).close()


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("schema=Odd-Name", "schema"),
        ("schema=pg_catalog", "schema"),
        ("migrate=yes", "migrate"),
        ("pool=1", "pool"),
        ("owner_lease=0.1", "owner_lease"),
        ("patience=-1", "patience"),
        ("direct=redis://x", "direct"),
        ("shcema=a", "did you mean 'schema'"),
    ],
)
def test_bad_options_are_named(option: str, named: str) -> None:
    # case Q17
    with pytest.raises(InvalidOption, match=named):
        open_broker(f"postgresql://nobody@127.0.0.1:1/none?{option}")


@pytest.fixture
def old(url: str) -> Iterator[Broker]:
    """The broker of a worker that runs, with one of two jobs leased, as its store is migrated."""
    broker = open_broker(f"{url}&migrate=1")
    broker.attach(Owner(id="old"))
    broker.put([job(id="a"), job(id="b")])
    yield broker
    broker.close()


def test_a_worker_that_the_store_has_outgrown_leaves(name: str, url: str, old: Broker) -> None:
    # case M13, laws 3, 5: else it would keep its jobs as long as it lives
    [lease] = take(old, "old")
    with connect(url, autocommit=True) as conn:
        conn.execute(f"ALTER TYPE {name}.want ADD ATTRIBUTE more int".encode())
        step = Step("old", [Verdict(lease.token, 0)], want=Want(1))
        with pytest.raises(BrokerUnavailable, match="does not fit"):
            old.exchange(step)  # the version is the same: nobody migrated it
        conn.execute(f"UPDATE {name}.meta SET functions = 'new'".encode())
    for _ in range(2):
        reply = old.exchange(step)
        assert reply.settled == [False]
        quiet, outgrown = reply.commands[-2:]
        assert quiet.verb == "quiet"
        assert re.match("outgrown the store at .* does not fit this version", outgrown.verb)
    old.detach("old")
    record = old.get("a")
    assert (record.state, record.losses, record.attempt) == (State.READY, 0, 0)
    old.attach(Owner(id="c", kind="consumer"))
    with pytest.raises(BrokerUnavailable, match="another build of version"):
        old.exchange(Step("c", want=Want(1)))


def test_a_worker_whose_store_was_migrated_ends_its_jobs_and_leaves(
    name: str, url: str, old: Broker
) -> None:
    # case M13
    [lease] = take(old, "old")
    with connect(url, autocommit=True) as conn:
        conn.execute(f"UPDATE {name}.meta SET version = version + 1".encode())
    old.tick()
    reply = old.exchange(Step("old", [Verdict(lease.token, 0)], want=Want(1)))
    assert reply.settled == [True]
    assert reply.leases == []
    assert [command.verb.split()[0] for command in reply.commands] == ["quiet", "outgrown"]
    old.attach(Owner(id="c", kind="consumer"))
    with pytest.raises(BrokerUnavailable, match=r"has version 2, .*; upgrade tidemill here"):
        old.exchange(Step("c", want=Want(1)))


def test_a_url_with_the_short_scheme_opens_the_same_store() -> None:
    # given a store with a message
    url = NETWORK["postgresql"](f"t{new_id()}")
    with Tidemill(url) as mill:
        message = mill.queue("orders").put("x")
        # then the other scheme shows it
        with Tidemill(url.replace("postgresql://", "postgres://")) as other:
            assert other.job(message.id).state == "ready"
            assert other.broker.url == mill.broker.url
