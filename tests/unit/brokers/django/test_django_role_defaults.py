"""``django://`` on PostgreSQL with unusual defaults of the role."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from broker_driver import job
from servers import Postgres, django_on_own_postgres

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.django.broker import DjangoBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner
from tidemill.errors import DuplicateJob

pytestmark = pytest.mark.everyday

DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "extra_float_digits": "-15",
    "standard_conforming_strings": "off",
    "statement_timeout": "1h",
}
DUE = 1_800_000_000.123456


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Postgres("fsync=off")
    for name, value in DEFAULTS.items():
        server.run(f"ALTER ROLE tidemill SET {name} = '{value}'")
    yield django_on_own_postgres(server, "strange")
    server.close()


@pytest.fixture
def broker(url: str) -> Iterator[DjangoBroker]:
    broker = open_broker(url)
    yield broker
    broker.close()


def settings(broker: DjangoBroker) -> dict[str, str]:
    """The settings of the broker's own sessions."""
    names = ", ".join(f"current_setting('{name}')" for name in DEFAULTS)
    [row] = broker._store.read(lambda rows: rows.execute(f"SELECT {names}"))
    return dict(zip(DEFAULTS, row, strict=True))


def test_the_sessions_of_the_broker_have_the_settings_that_they_need(broker: DjangoBroker) -> None:
    # case M11
    assert settings(broker) == {
        **DEFAULTS,
        "default_transaction_isolation": "read committed",
        "extra_float_digits": "1",
        "statement_timeout": "0",
    }
    isolation = broker._store.change(lambda jobs: jobs.rows.execute("SHOW transaction_isolation"))
    assert isolation == [("read committed",)]


def test_a_time_comes_back_as_it_was_given(broker: DjangoBroker) -> None:
    # case M11
    one = job(queue="back\\slash", at=DUE)
    broker.put([one])
    broker.change_schedules([Change("s", 0, DUE, b"\\rule")])
    record, (schedule,) = broker.get(one.id), broker.schedules(["s"])
    assert (record.due, record.envelope.queue) == (DUE, "back\\slash")
    assert (schedule.due, schedule.body) == (DUE, b"\\rule")


def test_a_put_in_a_transaction_of_the_user_leaves_its_settings_alone(broker: DjangoBroker) -> None:
    # case M11
    from django.db import connections, transaction

    alias = broker._address.alias
    connection = connections[alias]

    def user_settings() -> tuple[str, ...]:
        with connection.cursor() as cursor:
            found = []
            for name in DEFAULTS:
                cursor.execute(f"SHOW {name}")
                found.append(cursor.fetchone()[0])
        return tuple(found)

    # when the rules of a put read times, on the connection of the user
    first = job(key="k", delay=100.0)
    with transaction.atomic(using=alias):
        broker.put([first])
        with pytest.raises(DuplicateJob):
            broker.put([job(id=first.id)])
        assert user_settings() == tuple(DEFAULTS.values())
    # then the times are right
    record = broker.get(first.id)
    assert record.due == pytest.approx(broker.wall() + 100, abs=60)


def test_a_step_without_a_limit_of_time_waits_as_long_as_the_server_can(
    broker: DjangoBroker,
) -> None:
    # case M11
    broker.attach(Owner(id="o", name="w"))
    broker.put([job()])
    assert len(broker.exchange(Step("o", want=Want(1), patience=1e9)).leases) == 1
