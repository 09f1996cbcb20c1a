"""Fixtures of the tests of PostgreSQL: a store of its own on the shared server for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import postgres_url

from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id


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
    assert isinstance(broker, PostgresBroker)
    yield broker
    broker.close()
