"""Old transactions, standbys and slots that keep deleted rows on PostgreSQL are named."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from postgres_desk import connect
from servers import Postgres

from tidemill.app import Tidemill
from tidemill.brokers.postgres import vacuum_horizon
from tidemill.brokers.registry import migrate_store
from tidemill.core.clock import new_id
from tidemill.doctor.examine import examine

pytestmark = pytest.mark.full

PREPARED = "max_prepared_transactions=2"
STANDBY = ("fsync=off", PREPARED, "hot_standby_feedback=on", "wal_receiver_status_interval=1")

NOTHING = [("ok", "no old transaction keeps deleted rows")]


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with contextlib.closing(Postgres("fsync=off", PREPARED)) as server:
        server.run("CREATE ROLE app LOGIN")
        yield server


@pytest.fixture
def url(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store where everything is old enough to be named."""
    monkeypatch.setattr(vacuum_horizon, "_OLD", 0.0)
    url = f"{server.url()}?schema=t{new_id()}"
    migrate_store(url)
    return url


def found(url: str) -> list[tuple[str, str]]:
    """What the doctor says: ok or warn, and the sentence."""
    with Tidemill(url) as mill:
        return [(f.status, f.message) for f in examine(mill) if f.check == "cleaning"]


def until(url: str, fits: Callable[[list[tuple[str, str]]], bool]) -> list[tuple[str, str]]:
    deadline = time.monotonic() + 60
    while not fits(said := found(url)):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return said


def until_nothing(url: str) -> None:
    until(url, lambda said: said == NOTHING)


def test_the_oldest_transaction_is_named(url: str) -> None:
    until_nothing(url)
    with connect(url, application_name="report") as reader, connect(url) as writer:
        # given a transaction that reads, and one that has written
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("SELECT 1")
        writer.execute("CREATE TEMPORARY TABLE x ()")
        # then both are named, the older first
        [(status, first), (_, second)] = found(url)
        assert status == "warn"
        assert first.startswith(
            f"pid {reader.info.backend_pid} of user tidemill (report) has had a transaction open "
        )
        assert first.endswith(" s, idle in transaction")
        assert second.startswith(f"pid {writer.info.backend_pid} of user tidemill has had a ")
    until_nothing(url)


def test_a_standby_and_a_slot_that_hold_back_the_primary_are_named(
    url: str, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuum_horizon, "_FAR", -1)
    # given a standby that tells the primary what its readers see
    with contextlib.closing(Postgres(*STANDBY, primary=server)) as standby:
        [(status, said)] = until(url, lambda said: said != NOTHING)
        assert status == "warn"
        assert said.startswith("standby 'walreceiver' (pid ")
        # given that it does so through a slot, which stays when the standby is gone
        server.run("SELECT pg_create_physical_replication_slot('copy')")
        standby.run("ALTER SYSTEM SET primary_slot_name = 'copy'")
        standby.run("SELECT pg_reload_conf()")
        until(url, lambda said: any("slot 'copy'" in text for _, text in said))
        server.run("SELECT pg_current_xact_id()")
    said = until(url, lambda said: len(said) == 1)[0][1]
    assert said.startswith("replication slot 'copy' is ")
    server.run("SELECT pg_drop_replication_slot('copy')")
    until_nothing(url)
