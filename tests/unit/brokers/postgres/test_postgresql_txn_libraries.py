"""``txn=`` takes the connections, cursors and sessions of the libraries that people use.

Law 17 for each: the job exists if and only if the caller's transaction commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import psycopg
import pytest
from servers import postgres_url

from tidemill import DuplicateJob, InvalidOption, QueueFull, Tidemill
from tidemill.core.clock import new_id
from tidemill.errors import BrokerUnavailable

asyncpg: Any = pytest.importorskip("asyncpg")
sqlalchemy: Any = pytest.importorskip("sqlalchemy")
django: Any = pytest.importorskip("django")


@pytest.fixture
def mill() -> Iterator[Tidemill]:
    with Tidemill(f"{postgres_url()}?schema=t{new_id()}&migrate=1") as mill:
        yield mill


def by_sqlalchemy(driver: str) -> str:
    return postgres_url().replace("postgresql://", f"postgresql+{driver}://")


class Transaction:
    """A caller's open transaction: ``txn`` and how to end it."""

    def __init__(self, txn: Any, commit: Callable[[], Any], rollback: Callable[[], Any]) -> None:
        self.txn, self.commit, self.rollback = txn, commit, rollback


# -- libraries that block ------------------------------------------------------------------------


@contextlib.contextmanager
def cursor_of(kind: Callable[[psycopg.Connection], psycopg.Cursor]) -> Iterator[Transaction]:
    with psycopg.connect(postgres_url()) as conn, kind(conn) as cursor:
        yield Transaction(cursor, conn.commit, conn.rollback)


@contextlib.contextmanager
def session() -> Iterator[Transaction]:
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(by_sqlalchemy("psycopg"))
    with Session(engine) as session:
        yield Transaction(session, session.commit, session.rollback)
    engine.dispose()


@contextlib.contextmanager
def scoped() -> Iterator[Transaction]:
    from sqlalchemy.orm import scoped_session, sessionmaker

    engine = sqlalchemy.create_engine(by_sqlalchemy("psycopg"))
    session = scoped_session(sessionmaker(engine))
    yield Transaction(session, session.commit, session.rollback)
    session.remove()
    engine.dispose()


@contextlib.contextmanager
def engine_connection() -> Iterator[Transaction]:
    engine = sqlalchemy.create_engine(by_sqlalchemy("psycopg"))
    with engine.connect() as conn:
        yield Transaction(conn, conn.commit, conn.rollback)
    engine.dispose()


ALIAS = "txn"
"""The name of the database in the settings of Django."""


def django_connection() -> Any:
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure()
        django.setup()
    if ALIAS not in connections.settings:
        server = urllib.parse.urlsplit(postgres_url())
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": server.path.lstrip("/"),
            "USER": server.username,
            "HOST": server.hostname,
            "PORT": server.port,
        }
        connections.settings[ALIAS] = connections.configure_settings(
            {"default": database, ALIAS: database}
        )[ALIAS]
    return connections[ALIAS]


@contextlib.contextmanager
def django_atomic() -> Iterator[Transaction]:
    from django.db import transaction

    connection = django_connection()
    block = transaction.atomic(using=ALIAS)
    block.__enter__()

    def end(*, rollback: bool) -> None:
        nonlocal block
        transaction.set_rollback(rollback, using=ALIAS)
        block.__exit__(None, None, None)
        block = transaction.atomic(using=ALIAS)
        block.__enter__()

    yield Transaction(connection, lambda: end(rollback=False), lambda: end(rollback=True))
    block.__exit__(None, None, None)
    connection.close()


BLOCKING: dict[str, Callable[[], AbstractContextManager[Transaction]]] = {
    "Cursor": lambda: cursor_of(psycopg.Cursor),
    "ClientCursor": lambda: cursor_of(psycopg.ClientCursor),
    "RawCursor": lambda: cursor_of(psycopg.RawCursor),
    "ServerCursor": lambda: cursor_of(lambda conn: psycopg.ServerCursor(conn, "named")),
    "Session": session,
    "scoped_session": scoped,
    "sqlalchemy.Connection": engine_connection,
    "django": django_atomic,
}


@pytest.mark.parametrize("library", BLOCKING)
def test_a_put_belongs_to_the_transaction(mill: Tidemill, library: str) -> None:
    queue = mill.queue("q")
    with BLOCKING[library]() as open_one:
        # given a put and a rollback
        queue.put("lost", id="lost", txn=open_one.txn)
        assert mill.queues() == []
        open_one.rollback()
        assert mill.queues() == []
        # when others follow, one of which is refused
        queue.put("kept", id="kept", txn=open_one.txn)
        with pytest.raises(DuplicateJob):
            queue.put("again", id="kept", txn=open_one.txn)
        queue.put_many(["a", "b"], txn=open_one.txn)
        assert mill.queues() == []
        open_one.commit()
        # then the commit stores them all
        assert [row.ready for row in mill.queues()] == [3]


def test_django_outside_of_atomic_is_refused(mill: Tidemill) -> None:
    with pytest.raises(InvalidOption, match=r"with transaction.atomic\(\):"):
        mill.queue("q").put(1, txn=django_connection())
    django_connection().close()


def test_sqlalchemy_in_autocommit_mode_is_refused(mill: Tidemill) -> None:
    engine = sqlalchemy.create_engine(by_sqlalchemy("psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as conn, pytest.raises(InvalidOption, match="autocommit mode"):
        mill.queue("q").put(1, txn=conn)
    engine.dispose()


def test_another_driver_is_refused_by_its_name(mill: Tidemill) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as conn, pytest.raises(InvalidOption, match=r"not sqlite3\.Connection"):
        mill.queue("q").put(1, txn=conn)
    engine.dispose()


# -- libraries of event loops --------------------------------------------------------------------


@contextlib.asynccontextmanager
async def async_cursor() -> AsyncIterator[Transaction]:
    async with await psycopg.AsyncConnection.connect(postgres_url()) as conn, conn.cursor() as cur:
        yield Transaction(cur, conn.commit, conn.rollback)


@contextlib.asynccontextmanager
async def async_session(driver: str) -> AsyncIterator[Transaction]:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine(by_sqlalchemy(driver))
    async with AsyncSession(engine) as session:
        yield Transaction(session, session.commit, session.rollback)
    await engine.dispose()


@contextlib.asynccontextmanager
async def async_connection(driver: str) -> AsyncIterator[Transaction]:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(by_sqlalchemy(driver))
    async with engine.connect() as conn:
        yield Transaction(conn, conn.commit, conn.rollback)
    await engine.dispose()


@contextlib.asynccontextmanager
async def asyncpg_transaction(pool: bool) -> AsyncIterator[Transaction]:
    async with contextlib.AsyncExitStack() as stack:
        if pool:
            pooled = await stack.enter_async_context(asyncpg.create_pool(postgres_url()))
            conn = await stack.enter_async_context(pooled.acquire())
        else:
            conn = await asyncpg.connect(postgres_url())
            stack.push_async_callback(conn.close)
        for codec in ("json", "jsonb"):  # as many apps set them
            await conn.set_type_codec(codec, schema="pg_catalog", encoder=repr, decoder=len)
        block = conn.transaction()
        await block.start()

        async def end(act: str) -> None:
            nonlocal block
            await getattr(block, act)()
            block = conn.transaction()
            await block.start()

        yield Transaction(conn, lambda: end("commit"), lambda: end("rollback"))
        await block.rollback()


ASYNC: dict[str, Callable[[], AbstractAsyncContextManager[Transaction]]] = {
    "AsyncCursor": async_cursor,
    "AsyncSession": lambda: async_session("psycopg"),
    "AsyncConnection": lambda: async_connection("psycopg"),
    "AsyncSession on asyncpg": lambda: async_session("asyncpg"),
    "AsyncConnection on asyncpg": lambda: async_connection("asyncpg"),
    "asyncpg": lambda: asyncpg_transaction(pool=False),
    "asyncpg pool": lambda: asyncpg_transaction(pool=True),
}


@pytest.mark.parametrize("library", ASYNC)
def test_an_awaited_put_belongs_to_the_transaction(mill: Tidemill, library: str) -> None:
    queue = mill.queue("q")
    task = mill.task(name="t", queue="q", key="k")(max)
    mill.queue("full", max_size=1)

    async def main() -> None:
        async with ASYNC[library]() as open_one:
            txn = open_one.txn
            # given a put and a rollback
            await queue.aput("lost", id="lost", txn=txn)
            await open_one.rollback()
            assert mill.queues()[-1].size == 0
            # when others follow, some of which are refused
            await queue.aput("kept", id="kept", txn=txn)
            with pytest.raises(DuplicateJob, match="'kept'"):
                await queue.aput("again", id="kept", txn=txn)
            with pytest.raises(QueueFull, match="max_size=1"):
                await mill.queue("full").aput_many([1, 2], txn=txn)
            first = await task.using(txn=txn).aenqueue(1)
            assert (await task.using(txn=txn).aenqueue(2)).id == first.id
            with pytest.raises(InvalidOption, match="await aenqueue"):
                queue.put("blocking", txn=txn)
            assert {row.name: row.size for row in mill.queues()} == {"full": 0}
            await open_one.commit()
            # then the commit stores them all
            assert {row.name: row.size for row in mill.queues()} == {"full": 0, "q": 2}
            # when a message is acknowledged
            message = await queue.aget(30)
            assert await message.aack(txn=txn)
            assert mill.queues()[-1].size == 2
            await open_one.commit()
            assert mill.queues()[-1].size == 1

    asyncio.run(main())


def test_asyncpg_without_a_transaction_is_refused(mill: Tidemill) -> None:
    async def main() -> None:
        conn = await asyncpg.connect(postgres_url())
        with pytest.raises(InvalidOption, match=r"async with conn.transaction\(\):"):
            await mill.queue("q").aput(1, txn=conn)
        await conn.close()

    asyncio.run(main())


def test_a_closed_connection_of_asyncpg_is_one_sentence(mill: Tidemill) -> None:
    async def main() -> None:
        conn = await asyncpg.connect(postgres_url())
        await conn.transaction().start()
        other = await asyncpg.connect(postgres_url())
        await other.execute("SELECT pg_terminate_backend($1)", conn.get_server_pid())
        await other.close()
        with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
            await mill.queue("q").aput(1, txn=conn)
        conn.terminate()

    asyncio.run(main())
