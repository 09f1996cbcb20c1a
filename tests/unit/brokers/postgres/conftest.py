"""Fixtures of the tests of PostgreSQL: a store for each test, servers to kill, an owner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import Postgres, postgres_url

from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Owner


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A server for one module, which notices deadlocks at once."""
    server = Postgres("deadlock_timeout=20ms")
    yield server
    server.close()


@pytest.fixture
def schema() -> str:
    return f"t{new_id()}"


@pytest.fixture
def url(schema: str) -> str:
    """A new store. A module with a server of its own overrides this."""
    return f"{postgres_url()}?schema={schema}&migrate=1"


@pytest.fixture
def broker(url: str) -> Iterator[PostgresBroker]:
    broker = open_broker(url)
    yield broker
    broker.close()


@pytest.fixture
def worker(broker: PostgresBroker) -> Owner:
    """An owner "w" of the broker."""
    owner = Owner(id="w", name="w")
    broker.attach(owner)
    return owner
