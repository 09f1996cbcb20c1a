"""Topics on PostgreSQL: publishing in the caller's transactions, beside changes of bindings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from postgres_desk import connect
from servers import postgres_url

from tidemill import QueueFull, Tidemill, Unroutable
from tidemill.core.clock import new_id


@pytest.fixture
def url() -> str:
    return f"{postgres_url()}?schema=t{new_id()}&migrate=1"


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


def test_bindings_change_while_a_transaction_with_a_publish_is_open(
    mill: Tidemill, conn: psycopg.Connection[Any]
) -> None:
    mill.queue("a").bind("x")
    mill.publish("x", 1, txn=conn)
    mill.queue("b").bind("x")  # does not wait for the transaction
    mill.publish("x", 2, txn=conn)
    conn.commit()
    assert (bodies(mill, "a"), bodies(mill, "b")) == ([1, 2], [2])


def test_an_async_transaction_publishes(mill: Tidemill, url: str) -> None:
    asyncpg = pytest.importorskip("asyncpg")
    mill.queue("a").bind("x")

    async def main() -> None:
        conn = await asyncpg.connect(url.partition("?")[0])
        async with conn.transaction():
            assert len(await mill.apublish("x", 1, txn=conn)) == 1
            assert await mill.apublish("y", 1, txn=conn) == []
            assert bodies(mill, "a") == []
        await conn.close()

    asyncio.run(main())
    assert bodies(mill, "a") == [1]
