"""PostgreSQL with unusual defaults of the role: the sessions of the broker do not follow them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres_desk import connect, job, take
from servers import Postgres

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.postgres.timed_connection import Connection
from tidemill.core.job import Owner

pytestmark = pytest.mark.everyday

DEFAULTS = {
    "client_encoding": "LATIN1",
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-15",
    "idle_session_timeout": "1h",
    "lock_timeout": "1h",
    "standard_conforming_strings": "off",
    "statement_timeout": "1h",
}
DUE = 1_800_000_000.123456


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Postgres("fsync=off")
    for name, value in DEFAULTS.items():
        server.run(f"ALTER ROLE tidemill SET {name} = '{value}'")
    yield f"{server.url()}?schema=tidemill&migrate=1"
    server.close()


def test_each_session_has_the_settings_that_it_needs(broker: PostgresBroker) -> None:
    # case M11
    broker.attach(Owner(id="o", name="w"))
    sessions: list[dict[str, str]] = []

    def look(conn: Connection) -> None:
        text = "SELECT name, current_setting(name) FROM unnest(%s::text[]) AS name"
        sessions.append(dict(conn.execute(text, [list(DEFAULTS)]).fetchall()))

    # when both sessions tell their settings: that of calls, and that of notifications
    broker._session.connections.run(lambda _, conn: look(conn))
    wake_ups = broker._session.wake_ups
    with wake_ups._lock:
        look(wake_ups._conn)
    # then they do not have the defaults of the role
    needed = {
        "client_encoding": "UTF8",
        "default_transaction_isolation": "read committed",
        "extra_float_digits": "1",
        "idle_session_timeout": "0",
        "lock_timeout": "9250ms",
        "standard_conforming_strings": "off",  # the functions work with both values
        "statement_timeout": "0",
    }
    assert sessions == [needed, needed]


def test_times_and_names_come_back_as_they_were_given(broker: PostgresBroker) -> None:
    # case M11
    one = job(queue="grün", at=DUE)
    broker.put([one])
    broker.change_schedules([Change("täglich", 0, DUE, b"rule")])
    record = broker.get(one.id)
    assert (record.due, record.envelope.queue) == (DUE, "grün")
    (schedule,) = broker.schedules(["täglich"])
    assert schedule.due == DUE
    assert {stats.name for stats in broker.stats()} == {"grün"}


def test_bytes_are_packed_as_they_are(broker: PostgresBroker, url: str) -> None:
    # case M11
    # given a worker that sleeps
    broker.attach(Owner(id="o", name="w"))
    assert not broker.exchange(Step("o", want=Want(1))).leases
    # when a job is handed to it within a transaction of the user
    one, two = job(), job()
    with connect(url) as conn:
        broker.put([one], txn=conn)
    broker.wait("o", 60)
    # then the worker gets this job, and by a claim a job that moved to another queue
    broker.put([two])
    assert broker.alter([two.id], queue="other") == [True]
    leases = {lease.open().id: lease.open().queue for lease in take(broker, "o", 2)}
    assert leases == {one.id: "default", two.id: "other"}
    # and a list shows a large job
    large = job(task="large", body=b"\x90" * 100_000)
    broker.put([large])
    [record] = broker.find(Filter(task="large"), 10).records
    assert record.envelope.id == large.id
