"""Puts inside a transaction of the caller, on the caller's own connection.

The ``txn`` of a caller is a connection, a cursor or a session, of psycopg, asyncpg, SQLAlchemy or
Django. The connection may have any cursor class and row factory, and it may be async. The statement
runs on a plain cursor; on an async connection it runs in the connection's event loop.

SQLAlchemy begins a transaction before its first statement, but the statements of a put go directly
to the driver. So this module first makes SQLAlchemy begin: its commit or rollback then covers the
put. A connection of Django must be in ``transaction.atomic()``, or have autocommit off.

asyncpg encodes arguments by the types in the statement, and numbers its placeholders. Its errors
become errors of psycopg, so that one place translates both.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import psycopg
from psycopg import pq
from psycopg.pq import DiagnosticField
from psycopg.rows import tuple_row

from tidemill.brokers.postgres.encoding import plain, prepare
from tidemill.brokers.shared.event_loops import WAITING_LOOP
from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_Sync = psycopg.Connection[Any]
_Async = psycopg.AsyncConnection[Any]


def open_transaction(session: Session, txn: Any) -> Any:
    """The driver's connection of ``txn``, inside a transaction that can commit jobs later."""
    conn = _driver_connection(txn)
    if _is_of("asyncpg", conn) and hasattr(conn, "is_in_transaction"):
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
    """Run the statement and return its answer. A failed statement does not end the transaction."""
    if isinstance(conn, psycopg.Connection):
        return _run(conn, statement, arguments)
    if isinstance(conn, psycopg.AsyncConnection):
        return _in_loop(_arun(conn, statement, arguments))
    return _in_loop(_run_of_asyncpg(conn, statement, arguments))


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


T = TypeVar("T")


def _driver_connection(txn: Any) -> Any:
    """The connection of psycopg or asyncpg that ``txn`` uses. Other objects return as given."""
    if isinstance(txn, (psycopg.Cursor, psycopg.AsyncCursor)):
        return txn.connection
    if _is_of("sqlalchemy", txn):
        return _of_sqlalchemy(txn)
    if _is_of("django", txn):
        return _of_django(txn)
    return txn


def _is_of(library: str, value: object) -> bool:
    """True when the class of an object, or one of its base classes, belongs to a library."""
    return any(kind.__module__.partition(".")[0] == library for kind in type(value).__mro__)


def _in_loop(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop that waits for this call, and return its value."""
    loop = WAITING_LOOP.get()
    if loop is None:
        steps.close()
        raise InvalidOption(
            "txn is an async connection, which only its event loop can use; "
            "await aenqueue(), aput() or one of their kind with it"
        )
    return asyncio.run_coroutine_threadsafe(steps, loop).result()


def _of_sqlalchemy(txn: Any) -> Any:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(txn, (Session, scoped_session)):
        txn = txn.connection()
    if not isinstance(txn, Connection):
        return _in_loop(_of_async_sqlalchemy(txn))
    if not txn.in_transaction():
        txn.begin()
    return txn.connection.driver_connection


async def _of_async_sqlalchemy(txn: Any) -> Any:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    if isinstance(txn, (AsyncSession, async_scoped_session)):
        txn = await txn.connection()
    if not isinstance(txn, AsyncConnection):
        return txn
    if not txn.in_transaction():
        await txn.begin()
    driver: Any = (await txn.get_raw_connection()).driver_connection
    if _is_of("asyncpg", driver) and not driver.is_in_transaction():
        await txn.exec_driver_sql("SELECT 1")  # SQLAlchemy sends its BEGIN with a statement
    return driver


def _of_django(txn: Any) -> Any:
    if not hasattr(txn, "ensure_connection"):
        return txn
    txn.ensure_connection()
    if txn.get_autocommit():
        raise InvalidOption(
            "txn is Django's connection outside of a transaction; put inside: "
            "with transaction.atomic():"
        )
    return txn.connection


_HOLE = re.compile(r"%([bs])::")


async def _run_of_asyncpg(txn: Any, statement: bytes, arguments: Sequence[Any]) -> Any:
    try:
        async with txn.transaction():  # makes a savepoint, since the caller's transaction is open
            answer = await txn.fetchval(_numbered(statement), *map(plain, arguments))
    except Exception as error:
        if not _is_of("asyncpg", error):
            raise
        raise _as_psycopg(error) from error
    return None if answer is None else msgspec.json.decode(answer)


def _numbered(statement: bytes) -> str:
    """The statement with the placeholders of asyncpg, and its answer as text."""
    # Values other than arrays go as text, since the caller may have set codecs for their types.
    numbers = itertools.count(1)
    kinds = {"b": "", "s": "text::"}
    text = _HOLE.sub(lambda hole: f"${next(numbers)}::{kinds[hole[1]]}", statement.decode())
    return f"{text}::text"


def _as_psycopg(error: Any) -> psycopg.Error:
    """The error of psycopg with the fields of an asyncpg error."""
    # Asyncpg itself refused the call, for example on a closed connection.
    if not hasattr(error, "sqlstate"):
        return psycopg.InterfaceError(str(error))
    told = {
        DiagnosticField.SQLSTATE: error.sqlstate,
        DiagnosticField.MESSAGE_PRIMARY: error.message,
        DiagnosticField.MESSAGE_DETAIL: error.detail,
        DiagnosticField.MESSAGE_HINT: error.hint,
    }
    fields: Any = dict.fromkeys(DiagnosticField)
    fields |= {field: text.encode() for field, text in told.items() if text}
    try:
        kind: type[psycopg.Error] = psycopg.errors.lookup(error.sqlstate)
    except KeyError:
        kind = psycopg.DatabaseError
    return kind(str(error), info=fields)
