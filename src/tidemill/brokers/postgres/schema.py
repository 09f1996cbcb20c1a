"""The tables and functions in a database: making them, changing them, and checking their version.

The files ``sql/migrations/NNNN_name.sql`` change the tables, each once and in order. The files
``sql/NN_name.sql`` have the functions; a change in any of these files replaces all functions. A
migration is one transaction under a lock, so any number of processes may migrate at once. In the
files, ``tidemill`` stands for the schema's name.

A release works on stores of its own version alone, and never migrates a store of a newer version.

A migration locks its tables. While a migration waits for a transaction that uses a table, all later
users of the table wait for the migration. So the migration waits half a second at most, lets other
users through, and tries again while its patience lasts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import random
import re
import time
from collections.abc import Sequence
from importlib.resources.abc import Traversable

import msgspec
import psycopg
from psycopg import sql

from tidemill.brokers.postgres.errors import (
    NOT_MIGRATED,
    Refused,
    Unfit,
    is_worth_repeating,
    translated,
)
from tidemill.brokers.postgres.settings import Address
from tidemill.brokers.postgres.timed_connection import connect
from tidemill.core.clock import new_id
from tidemill.errors import BrokerUnavailable

_LOCK = 0x7469_6465  # "tide"
_PAUSE = 0.5  # seconds between two tries of a migration
LOCK_TIMEOUT = 500  # milliseconds that a migration waits for a lock before it lets others through

_NAME = re.compile(r"\btidemill\b")


class Installed(msgspec.Struct, frozen=True):
    """The contents of a schema: the version of its tables, and a digest of its functions."""

    version: int
    functions: str
    store: str = ""
    born: float = 0.0


def _folder() -> Traversable:
    return importlib.resources.files("tidemill.brokers.postgres") / "sql"


def _texts(folder: Traversable) -> list[tuple[str, str]]:
    files = [file for file in folder.iterdir() if file.name.endswith(".sql")]
    return [(f.name, f.read_text("utf-8")) for f in sorted(files, key=lambda file: file.name)]


@functools.cache
def _migrations() -> list[str]:
    return [text for _, text in _texts(_folder() / "migrations")]


@functools.cache
def _functions() -> tuple[str, str]:
    text = "\n".join(text for _, text in _texts(_folder()))
    return text, hashlib.sha256(text.encode()).hexdigest()[:16]


VERSION = len(_migrations())  # of the tables; a release that changes a function adds a migration


def installed(conn: psycopg.Connection, schema: str) -> Installed | None:
    """Return the contents of a schema; None when it holds no store."""
    found = conn.execute("SELECT to_regclass(%s)", [f"{schema}.meta"]).fetchone()
    if not found or found[0] is None:
        return None
    # As JSON, since the columns differ between versions.
    query = sql.SQL("SELECT to_jsonb(m) FROM {} AS m").format(sql.Identifier(schema, "meta"))
    row = conn.execute(query).fetchone()
    return msgspec.convert(row[0], Installed) if row else None


def version_of(conn: psycopg.Connection, schema: str) -> int:
    """Return the version of the tables in a schema; 0 without tables."""
    found = installed(conn, schema)
    return found.version if found else 0


def check(conn: psycopg.Connection, schema: str, where: str) -> Installed:
    """Return the contents of a schema, if this code can work on it."""
    found = installed(conn, schema)
    if found is None:
        raise Refused(f"there is no store in schema {schema!r} at {where} yet; {NOT_MIGRATED}")
    if found.version != VERSION:
        remedy = NOT_MIGRATED if found.version < VERSION else "upgrade tidemill here"
        raise Refused(
            f"the store in schema {schema!r} at {where} has version {found.version}, "
            f"this tidemill needs version {VERSION}; {remedy}"
        )
    if found.functions != _functions()[1]:
        raise Refused(
            f"the store in schema {schema!r} at {where} has functions of another build of "
            f"version {VERSION}; {NOT_MIGRATED}"
        )
    return found


def migrate(
    conn: psycopg.Connection, schema: str, migrations: Sequence[str] | None = None
) -> tuple[int, int]:
    """Bring a schema to this version; return the versions before and after.

    Raises:
        Refused: a newer release has migrated the schema; nothing was changed.
        psycopg.errors.LockNotAvailable: others use the tables; nothing was changed.
    """
    steps = _migrations() if migrations is None else migrations
    functions, digest = _functions()
    with conn.transaction():
        # A process that waited for the lock sees the migration of the lock's holder.
        conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        conn.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT}".encode())
        conn.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [_LOCK, schema])
        conn.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        path = sql.SQL("SET LOCAL search_path = {}, pg_temp").format(sql.Identifier(schema))
        conn.execute(path)
        conn.execute("SET LOCAL client_min_messages = warning")
        found = installed(conn, schema)
        before = found.version if found else 0
        if before > len(steps):
            raise Refused(
                f"schema {schema!r} has version {before}, which a newer release made; this "
                f"tidemill makes version {len(steps)} and never goes back: upgrade tidemill here, "
                "or run tidemill migrate with the newer release"
            )
        if found and (found.version, found.functions) == (len(steps), digest):
            return before, before  # up to date: lock no tables, since other processes may use them
        for step in steps[before:]:
            _run(conn, step, schema)
        if not before:
            conn.execute(
                "INSERT INTO meta VALUES (0, '', %s, extract(epoch FROM now()))", [new_id()]
            )
        # Only a test asks for fewer steps, and the functions do not fit these tables.
        if len(steps) >= VERSION:
            _run(conn, functions, schema)
        conn.execute("UPDATE meta SET version = %s, functions = %s", [len(steps), digest])
    return before, len(steps)


def _run(conn: psycopg.Connection, text: str, schema: str) -> None:
    # Many statements in one message need libpq's simple protocol, which takes no parameters.
    conn.execute(_NAME.sub(f'"{schema}"', text).encode())


def bring_up(address: Address) -> tuple[int, int]:
    """Bring a store to this version; return the versions before and after."""
    until = time.monotonic() + address.limit
    while True:
        try:
            return _try(address)
        except (Refused, Unfit):
            raise
        except BrokerUnavailable:
            if time.monotonic() + _PAUSE >= until:
                raise
        time.sleep(_PAUSE * random.uniform(0.5, 1.0))


def _try(address: Address) -> tuple[int, int]:
    conn = connect(address, direct=True)
    conn.until = None  # a migration takes its time
    try:
        return migrate(conn, address.schema)
    except psycopg.errors.LockNotAvailable as error:
        raise BrokerUnavailable(_in_use(address)) from error
    except psycopg.Error as error:
        if is_worth_repeating(error):
            raise BrokerUnavailable(_in_use(address)) from error
        raise translated(error, address.where) from error
    finally:
        conn.close()


def _in_use(address: Address) -> str:
    return (
        f"the store in schema {address.schema!r} at {address.where} could not be migrated within "
        f"{address.limit:g} s: another migration is under way, or a transaction that stays open "
        "uses its tables (pg_stat_activity shows it); end the transaction, or raise patience= in "
        "the url, then run it again"
    )
