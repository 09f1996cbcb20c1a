"""The migration of ``django://`` can be undone and applied again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broker_driver import LiveOwner, job
from servers import django_on_mariadb, django_on_postgres, django_on_sqlite

from tidemill.brokers.registry import open_broker

pytestmark = pytest.mark.everyday("postgresql")

DATABASES: dict[str, Callable[[str], str]] = {
    "sqlite": django_on_sqlite,
    "postgresql": django_on_postgres,
}
if "TIDEMILL_TEST_MARIADB" in os.environ:
    DATABASES["mariadb"] = django_on_mariadb


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    from django.db import connections

    url = DATABASES[request.param](str(tmp_path))
    yield url
    connections[alias_of(url)].close()


def alias_of(url: str) -> str:
    return url.removeprefix("django://")


def migrate(url: str, number: str = "") -> None:
    from django.core.management import call_command

    target = [number] if number else []
    call_command("migrate", "tidemill", *target, database=alias_of(url), verbosity=0)


def indexes_of(url: str) -> dict[str, list[str]]:
    """The columns of each index of the table of jobs that a migration names."""
    from django.db import connections

    connection = connections[alias_of(url)]
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, "tidemill_job")
    return {name: one["columns"] for name, one in found.items() if "tidemill_job_" in name}


def check_works(url: str) -> None:
    """A job can be put, leased and settled."""
    broker = open_broker(url)
    owner = LiveOwner(broker)
    broker.put([one := job()])
    [lease] = owner.take(10)
    assert lease.open().id == one.id
    owner.settle(lease)
    broker.detach(owner.id)
    broker.close()


def test_the_tables_can_be_removed_and_made_again(url: str) -> None:
    # given
    newest = indexes_of(url)
    # when
    migrate(url, "zero")
    migrate(url)
    # then they are as they were, and the store works
    assert indexes_of(url) == newest
    check_works(url)
