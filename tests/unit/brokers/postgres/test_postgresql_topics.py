"""Topics on PostgreSQL: publishing in the caller's transactions, beside changes of bindings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from postgres_desk import connect

from tidemill import QueueFull, Tidemill
from tidemill.errors import Unroutable


@pytest.fixture
def mill(url: str) -> Iterator[Tidemill]:
    with Tidemill(url) as mill:
        yield mill


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(url) as conn:
        yield conn


def bodies(mill: Tidemill, queue: str) -> list[Any]:
    return [message.body for message in mill.queue(queue).get_many(100, timeout=0)]


def test_copies_of_a_transaction_exist_if_it_commits(
    mill: Tidemill, conn: psycopg.Connection[Any]
) -> None:
    mill.queue("a").bind("x")
    mill.queue("b").bind("#")
    assert len(mill.publish("x", 1, txn=conn)) == 2
    assert bodies(mill, "a") == []
    conn.commit()
    assert len(mill.publish("x", 2, txn=conn)) == 2
    conn.rollback()
    assert bodies(mill, "a") == bodies(mill, "b") == [1]


def test_a_refused_publish_leaves_the_transaction_usable(
    mill: Tidemill, conn: psycopg.Connection[Any]
) -> None:
    mill.queue("a").bind("x")
    mill.queue("b", max_size=1).bind("x")
    mill.queue("b").put(0)
    with pytest.raises(QueueFull):
        mill.publish("x", 1, txn=conn)
    with pytest.raises(Unroutable):
        mill.publish("y", 1, mandatory=True, txn=conn)
    mill.queue("b").unbind("x")
    assert len(mill.publish("x", 2, txn=conn)) == 1
    conn.commit()
    assert bodies(mill, "a") == [2]
