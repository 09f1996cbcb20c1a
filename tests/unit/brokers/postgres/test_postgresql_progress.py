"""Reports of progress on PostgreSQL, from workers of two releases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from postgres_desk import job, take
from servers import postgres_url

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.postgres import exchange
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Note
from tidemill.core.owner import Owner


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = open_broker(f"{postgres_url()}?schema=t{new_id()}&migrate=1")
    broker.attach(Owner(id="w", name="w"))
    yield broker
    broker.close()


def test_a_report_of_the_release_before_has_no_text(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a running job that has reported a text
    given = job()
    broker.put([given])
    [lease] = take(broker, "w")
    broker.exchange(Step("w", notes=[Note(lease.token, 1, 4, text="b.png")]))
    # when a worker reports as the release before did, without the last element
    packed = exchange.json

    def former(rows: list[list[Any]]) -> Any:
        return packed([row[:5] for row in rows])

    monkeypatch.setattr(exchange, "json", former)
    broker.exchange(Step("w", notes=[Note(lease.token, 2, 4, text="c.png")]))
    # then the numbers are kept, without a text
    record = broker.get(given.id)
    assert record is not None
    assert (record.progress, record.progress_text) == ((2, 4), "")
