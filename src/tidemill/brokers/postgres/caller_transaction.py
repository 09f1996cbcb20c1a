"""Puts inside a transaction of the caller, on the caller's own connection.

The connection may have any cursor class and row factory, and it may be async. The statement runs on
a plain cursor; on an async connection it runs in the connection's event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from tidemill.brokers.postgres.caller_connection import driver_connection, in_loop, is_of
from tidemill.brokers.postgres.encoding import prepare
from tidemill.core.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_Sync = psycopg.Connection[Any]
_Async = psycopg.AsyncConnection[Any]


def open_transaction(session: Session, txn: Any) -> Any:
    """The driver's connection of ``txn``, inside a transaction that can commit jobs later.

    Raises:
        InvalidOption: ``txn`` has no such transaction; the message says what to pass instead.
    """
    conn = driver_connection(txn)
    if is_of("asyncpg", conn) and hasattr(conn, "is_in_transaction"):
        if not conn.is_in_transaction():
            raise InvalidOption(
                "txn is a connection of asyncpg with no transaction begun; "
                "put inside: async with conn.transaction():"
            )
        return conn
    if not isinstance(conn, (psycopg.Connection, psycopg.AsyncConnection)):
        raise InvalidOption(
            f"txn for {session.address.shown} must be a connection or cursor of psycopg, a "
            "connection of asyncpg, or a session or connection of SQLAlchemy or Django on one of "
            f"these drivers, not {type(conn).__module__}.{type(conn).__qualname__}"
        )
    if _is_idle(conn) and conn.autocommit:
        raise InvalidOption(
            "txn is a connection in autocommit mode with no transaction begun; "
            "put inside: with conn.transaction():"
        )
    return conn


def run_inside(conn: Any, statement: bytes, arguments: Sequence[Any]) -> Any:
    """Run the statement and return its answer. A failed statement does not end the transaction.

    Raises:
        psycopg.Error: the server refused the statement.
        InvalidOption: the connection is async, and no event loop waits for this call.
    """
    if isinstance(conn, psycopg.Connection):
        return _run(conn, statement, arguments)
    if isinstance(conn, psycopg.AsyncConnection):
        return in_loop(_arun(conn, statement, arguments))
    from tidemill.brokers.postgres import asyncpg_transaction

    return in_loop(asyncpg_transaction.run(conn, statement, arguments))


def _is_idle(txn: _Sync | _Async) -> bool:
    return txn.info.transaction_status == pq.TransactionStatus.IDLE


def _run(txn: _Sync, statement: bytes, arguments: Sequence[Any]) -> Any:
    # Do not use txn.cursor(): ClientCursor and RawCursor have other placeholders.
    with psycopg.Cursor(txn, row_factory=tuple_row) as cursor:
        if _is_idle(txn):
            # Begin a transaction: without it, txn.transaction() would commit.
            cursor.execute("SELECT")
        prepare(cursor)
        with txn.transaction():
            row = cursor.execute(statement, arguments).fetchone()
    assert row is not None
    return row[0]


async def _arun(txn: _Async, statement: bytes, arguments: Sequence[Any]) -> Any:
    async with psycopg.AsyncCursor(txn, row_factory=tuple_row) as cursor:
        if _is_idle(txn):
            await cursor.execute("SELECT")
        prepare(cursor)
        async with txn.transaction():
            await cursor.execute(statement, arguments)
            row = await cursor.fetchone()
    assert row is not None
    return row[0]
