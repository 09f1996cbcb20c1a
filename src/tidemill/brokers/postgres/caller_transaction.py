"""Puts inside a transaction of the caller, on the caller's own connection.

The connection may have any cursor class and row factory, and it may be async. The statement runs on
a plain cursor; on an async connection it runs in the connection's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from tidemill.brokers.postgres.encoding import prepare
from tidemill.brokers.shared.event_loops import WAITING_LOOP
from tidemill.core.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

__all__ = ["check_inside", "run_inside"]

_Sync = psycopg.Connection[Any]
_Async = psycopg.AsyncConnection[Any]


def check_inside(session: Session, txn: Any) -> None:
    """Refuse a ``txn`` without a transaction that could commit jobs later.

    Raises:
        InvalidOption: the message says what to pass instead.
    """
    if not isinstance(txn, (psycopg.Connection, psycopg.AsyncConnection)):
        raise InvalidOption(
            "txn must be a psycopg.Connection or psycopg.AsyncConnection for "
            f"{session.address.shown}, not {type(txn).__name__}"
        )
    if _is_idle(txn) and txn.autocommit:
        raise InvalidOption(
            "txn is a connection in autocommit mode with no transaction begun; "
            "put inside: with conn.transaction():"
        )
    if isinstance(txn, psycopg.AsyncConnection) and WAITING_LOOP.get() is None:
        raise InvalidOption(
            "txn is an async connection, which only its event loop can use; "
            "await aenqueue(), aput() or one of their kind with it"
        )


def run_inside(txn: _Sync | _Async, statement: bytes, arguments: Sequence[Any]) -> Any:
    """Run the statement and return its answer. If it fails, the transaction goes on without it.

    Raises:
        psycopg.Error: the server refused the statement.
    """
    if isinstance(txn, psycopg.Connection):
        return _run(txn, statement, arguments)
    loop = WAITING_LOOP.get()
    assert loop is not None
    return asyncio.run_coroutine_threadsafe(_arun(txn, statement, arguments), loop).result()


def _is_idle(txn: _Sync | _Async) -> bool:
    return txn.info.transaction_status == pq.TransactionStatus.IDLE


def _run(txn: _Sync, statement: bytes, arguments: Sequence[Any]) -> Any:
    # Do not use txn.cursor(): ClientCursor and RawCursor have other placeholders.
    with psycopg.Cursor(txn, row_factory=tuple_row) as cursor:
        if _is_idle(txn):
            cursor.execute("SELECT")  # begin, or txn.transaction() would commit
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
