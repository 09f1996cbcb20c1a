"""The driver's connection behind the ``txn`` of a caller: a connection, a cursor or a session.

SQLAlchemy begins a transaction before its first statement, but the statements of a put go directly
to the driver. So this module first makes SQLAlchemy begin: its commit or rollback then covers the
put. A connection of Django must be in ``transaction.atomic()``, or have autocommit off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import psycopg

from tidemill.brokers.shared.event_loops import WAITING_LOOP
from tidemill.core.errors import InvalidOption

T = TypeVar("T")


def driver_connection(txn: Any) -> Any:
    """The connection of psycopg or asyncpg that ``txn`` uses. Other objects are returned as given.

    Raises:
        InvalidOption: ``txn`` is async and not used in its event loop, or is Django's connection
            without a transaction.
    """
    if isinstance(txn, (psycopg.Cursor, psycopg.AsyncCursor)):
        return txn.connection
    if is_of("sqlalchemy", txn):
        return _of_sqlalchemy(txn)
    if is_of("django", txn):
        return _of_django(txn)
    return txn


def is_of(library: str, value: object) -> bool:
    """True when the class of an object, or one of its base classes, belongs to a library."""
    return any(kind.__module__.partition(".")[0] == library for kind in type(value).__mro__)


def in_loop(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop that waits for this call, and return its value.

    Raises:
        InvalidOption: no event loop waits.
    """
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
        return in_loop(_of_async_sqlalchemy(txn))
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
    if is_of("asyncpg", driver) and not driver.is_in_transaction():
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
