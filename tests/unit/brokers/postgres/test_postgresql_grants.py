"""A role with the rights that ``tidemill migrate --grants`` prints, in crashes and upgrades."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from postgres_desk import connect, ids, job, take
from servers import Postgres

from tidemill.app import Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.registry import grants_of, migrate_store, open_broker
from tidemill.cli import main
from tidemill.core.clock import clock
from tidemill.core.envelope import LimitSettings
from tidemill.core.job import Command, Owner, Verdict
from tidemill.doctor.examine import examine
from tidemill.errors import BrokerUnavailable, InvalidOption

ROLE = 'the "app"'


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with contextlib.closing(Postgres("fsync=off")) as server:
        server.run('CREATE ROLE "the ""app""" LOGIN')
        yield server


@pytest.fixture
def owned(server: Postgres, schema: str) -> str:
    """The store, as the user that migrates."""
    url = f"{server.url()}?schema={schema}"
    migrate_store(url)
    return url


@pytest.fixture
def url(owned: str) -> str:
    """The store, as a user without more rights than were printed."""
    printed = CliRunner().invoke(main, ["migrate", owned, "--grants", ROLE])
    assert printed.exit_code == 0, printed.output
    with connect(owned, autocommit=True) as conn:
        conn.execute(printed.stdout.encode())
    return owned.replace("tidemill@", "the%20%22app%22@") + "&patience=20"


def grants(url: str) -> tuple[str, str]:
    """What the doctor finds: ok or fail, and the sentence."""
    with Tidemill(url) as mill:
        [found] = [f for f in examine(mill) if f.check == "grants"]
    return found.status, found.message


def test_such_a_user_puts_runs_looks_and_acts(broker: Broker, url: str, schema: str) -> None:
    broker.attach(Owner(id="o", name="w"))
    broker.set_limit("lane", LimitSettings(concurrency=2))
    broker.put([job(id="a"), job(id="b", key="k", delay=60.0)])
    with connect(url) as conn:
        broker.put([job(id="c")], txn=conn)
    [lease, *_] = take(broker, "o", 9)
    broker.exchange(Step("o", [Verdict(lease.token, 0)]))
    broker.change_schedules([Change("s", 0, clock.wall() + 60)])
    broker.tick()
    assert broker.cancel(["b"]) == [True]
    assert delete_waiting(broker, "default") >= 0
    broker.set_queue("default", paused=True)
    broker.depart("postgresql://elsewhere/x")
    broker.stay()
    assert grants(url) == ("ok", "the user has all rights on the store")
    with connect(url) as conn, pytest.raises(Exception, match="permission denied for table meta"):
        conn.execute(f"UPDATE {schema}.meta SET version = 0".encode())


def test_such_a_user_puts_after_a_crash_of_the_server(server: Postgres, broker: Broker) -> None:
    # laws 1, 4: the numbers that may be lost are skipped, which needs a right of its own
    broker.put([job(id="before")])
    server.kill()
    server.start()
    broker.put([job(id="after")])
    assert ids(broker) == {"before", "after"}


def test_a_user_who_would_not_survive_a_crash_is_found_by_the_doctor(
    server: Postgres, owned: str, url: str, schema: str
) -> None:
    server.run(f'REVOKE UPDATE ON ALL SEQUENCES IN SCHEMA {schema} FROM "the ""app"""')
    status, said = grants(url)
    assert status == "fail"
    assert f"UPDATE on sequence {schema}.acceptance" in said
    server.kill()
    server.start()
    broker = open_broker(url)
    try:
        with pytest.raises(BrokerUnavailable, match=r"acceptance.*migrate URL --grants ROLE"):
            broker.put([job()])
    finally:
        broker.close()


def test_a_user_needs_no_right_on_sequences_of_identity_columns(
    server: Postgres, broker: Broker, url: str, schema: str
) -> None:
    server.run(f'REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM "the ""app"""')
    server.run(f'GRANT ALL ON SEQUENCE {schema}.acceptance TO "the ""app"""')
    server.run(f'GRANT USAGE ON SEQUENCE {schema}.owner_number_seq TO "the ""app"""')
    assert grants(url)[0] == "ok"
    broker.attach(Owner(id="o", name="w"))
    broker.set_limit("lane", LimitSettings(concurrency=2))
    broker.put([job(id="a", queue="new")])
    assert len(take(broker, "o", 1)) == 1
    assert broker.command("o", Command("quiet"))


def test_such_a_user_keeps_the_rights_when_the_store_is_migrated(
    owned: str, url: str, schema: str
) -> None:
    with connect(owned, autocommit=True) as conn:
        conn.execute(f"UPDATE {schema}.meta SET functions = 'old'".encode())
    migrate_store(owned)
    assert grants(url)[0] == "ok"


def test_a_role_without_a_name_is_refused(owned: str) -> None:
    with pytest.raises(InvalidOption, match="--grants"):
        grants_of(owned, "")
    assert grants_of("memory://", "app") is None
