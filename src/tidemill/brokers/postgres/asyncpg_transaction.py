"""Puts inside a transaction of the caller on a connection of asyncpg.

asyncpg encodes arguments by the types in the statement, and numbers its placeholders. Its errors
become errors of psycopg, so that one place translates both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg
from psycopg.pq import DiagnosticField

from tidemill.brokers.postgres.caller_connection import is_of
from tidemill.brokers.postgres.encoding import plain

_HOLE = re.compile(r"%([bs])::")


async def run(txn: Any, statement: bytes, arguments: Sequence[Any]) -> Any:
    """Run the statement and return its answer. A failed statement does not end the transaction.

    Raises:
        psycopg.Error: the server refused the statement.
    """
    try:
        async with txn.transaction():  # makes a savepoint, since the caller's transaction is open
            answer = await txn.fetchval(_numbered(statement), *map(plain, arguments))
    except Exception as error:
        if not is_of("asyncpg", error):
            raise
        raise _as_psycopg(error) from error
    return None if answer is None else msgspec.json.decode(answer)


def _numbered(statement: bytes) -> str:
    """The statement with the placeholders of asyncpg, and its answer as text.

    Values other than arrays go as text, since the caller may have set codecs for their types.
    """
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
