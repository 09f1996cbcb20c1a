"""History on PostgreSQL: rows that change while the housekeeping sums them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from postgres_desk import connect

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.shared import folded_history
from tidemill.core.clock import clock

pytestmark = pytest.mark.usefixtures("worker")
NOW = int(clock.wall()) // HOUR * HOUR


@pytest.fixture
def conn(url: str, broker: PostgresBroker) -> Iterator[psycopg.Connection[Any]]:
    with connect(url) as conn:
        conn.autocommit = True
        conn.execute(f"SET search_path = {broker._session.address.schema}".encode())
        yield conn


def row(*counts: int, name: str = "a", sample: bytes = b"") -> HistoryRow:
    return HistoryRow("task", name, MINUTE, NOW, counts, sample)


def stored(conn: psycopg.Connection[Any]) -> tuple[list[str], int]:
    """The names with sums, and the number of steps whose rows are not in sums."""
    sums = conn.execute("SELECT name FROM history ORDER BY name").fetchall()
    added = conn.execute("SELECT n FROM history_added").fetchall()
    return [name for (name,) in sums], len(added)


def test_rows_that_were_replaced_meanwhile_are_not_folded(
    broker: PostgresBroker, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.exchange(Step("w", history=[row(1), row(1, name="b")]))
    add = folded_history.added

    def late(before: HistoryRow | None, one: HistoryRow) -> HistoryRow:
        monkeypatch.setattr(folded_history, "added", add)
        broker.keep_history([row(50)])  # after the fold has read its rows
        broker.exchange(Step("w", history=[row(7), row(8, name="b")]))
        return add(before, one)

    monkeypatch.setattr(folded_history, "added", late)
    broker._history.fold()

    assert broker.history("task", MINUTE) == [row(57), row(9, name="b")]
    assert stored(conn) == (["a", "b"], 0)
