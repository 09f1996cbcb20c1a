"""The differences between SQLite, PostgreSQL and MariaDB, as small functions and texts of SQL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.network.postgres_session import settings_of

Execute = Callable[[str, Sequence[Any]], list[Any]]
Row = Sequence[Any]
Statement = tuple[str, Sequence[Any]]  # the text of an SQL statement, and its parameters

_NEW_JOB = ("text", "text", "int", "bigint", *["float8"] * 3, "text", "text", "bigint")
_TYPES = {
    **dict.fromkeys(("rank", "token", "seq"), "bigint"),
    **dict.fromkeys(("due", "expires", "alarm", "prune", "finished"), "float8"),
    **dict.fromkeys(("holder", "facts", "large"), "text"),
}
"""The types of columns of jobs on PostgreSQL, other than ``int``."""


def _json(names: Sequence[str], rows: Sequence[Row]) -> str:
    """Rows as JSON, for one parameter instead of thousands; bytes become base64."""
    return msgspec.json.encode([dict(zip(names, row, strict=True)) for row in rows]).decode()


_SQLITE_FULL = 13
_POSTGRES_FULL = "53100"
_MARIADB_FULL = (1021, 1114)  # the errors of a full disk, by their numbers; 1114 is a full table

_SQLITE_BUSY, _SQLITE_STALE_VIEW = 5, 517
_POSTGRES_LOCKED = "55P03"
_MARIADB_LOCKED = 1205  # the errors of a lock that another transaction holds
_LONGEST_WAIT = 2**31 - 1  # the longest timeout that PostgreSQL accepts, in milliseconds
_SHORT_WAIT = 1.0  # seconds that one statement waits for a lock, if no signal can end the wait

_PRECISE = (
    "current_setting('extra_float_digits'), set_config('extra_float_digits', "
    "greatest(current_setting('extra_float_digits')::int, 1)::text, true)"
)
"""Makes PostgreSQL write all digits of a number until the transaction ends."""

_SHARE = "hashtextextended('tidemill.' || current_schema(), 0)"


class Dialect:
    """The operations that differ between databases, as most databases do them."""

    vendor: str
    begin: str  # begins a transaction of the broker; on SQLite it also waits for the write lock
    lock: str  # waits for all others that change jobs; empty when ``begin`` waits for them
    now: str  # an expression for epoch seconds; empty when the database uses this machine's clock
    most_parameters = 60_000
    blob = "{}"  # how a query reads the bytes in a column of :meth:`table_of`

    def prepare(self, wrapper: Any, patience: float) -> None:
        """Set up a fresh connection of the broker's own."""
        raise NotImplementedError

    def enter(self, execute: Execute) -> str:
        """Take ``lock`` within a transaction of a caller, and read numbers with all digits."""
        # Return the statement that gives the caller's connection its own setting back, if any.
        if self.lock:
            execute(self.lock, [])
        return ""

    def lock_limit(self, patience: float) -> str:
        """The statement that sets how long a connection with joined statements waits for locks."""
        raise NotImplementedError

    def give_up(self, wrapper: Any) -> None:
        """Release a connection's locks before its close, where the close does not release them."""

    def is_idle(self, connection: Any) -> bool:
        """True when the server has said that the connection is in no transaction."""
        return False

    def cursor(self, connection: Any) -> tuple[Any, bool]:
        """A cursor, and whether it runs several statements as one message."""
        return connection.cursor(), False

    def draw(self, count: int) -> Statement | None:
        """One statement whose rows are new numbers; None where several statements are needed."""
        return None

    def numbers(self, execute: Execute, count: int) -> list[int]:
        """Draw numbers of the sequence that orders jobs."""
        raise NotImplementedError

    def last_number(self, execute: Execute) -> int:
        """The last number that was drawn."""
        raise NotImplementedError

    def advance(self, execute: Execute, number: int) -> None:
        """Draw only numbers above this number from now on."""
        raise NotImplementedError

    def upsert(self, table: str, keys: Sequence[str], columns: Sequence[str]) -> tuple[str, str]:
        """The text before and after the rows of an insert that replaces rows of the same key."""
        sets = ", ".join(f'"{c}" = excluded."{c}"' for c in columns if c not in keys)
        names = ", ".join(f'"{c}"' for c in columns)
        return (
            f"INSERT INTO {table} ({names}) VALUES ",
            f" ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {sets}",
        )

    def table_of(self, rows: Sequence[Row]) -> tuple[str, list[Any]]:
        """New jobs as a table with the columns ``column1`` to ``column10``, and its parameters."""
        raise NotImplementedError

    def update_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> Statement | None:
        """One statement that writes these columns of jobs; each row ends with the job's number."""
        # None when the database has no quick form.
        return None

    def quick_insert(self, insert: str, rest: str) -> str:
        """An insert that leaves out taken ids, and returns the ids that it stored."""
        return f"{insert} {rest} ON CONFLICT (id) DO NOTHING RETURNING id"

    def is_full(self, error: BaseException) -> bool:
        """True when an error of the driver says that the disk has no room."""
        raise NotImplementedError

    def is_locked(self, error: BaseException) -> bool:
        """True when an error of the driver says that another transaction holds a lock."""
        raise NotImplementedError

    def may_repeat(self, error: BaseException) -> bool:
        """True when the statement waited for a lock, and may be run again in its transaction."""
        # Most servers have undone the transaction, or may have.
        return False


class SQLite(Dialect):
    """One file; one writer at a time. The database uses this machine's clock."""

    vendor = "sqlite"
    begin = "BEGIN IMMEDIATE"
    lock = ""
    now = ""
    most_parameters = 30_000

    def prepare(self, wrapper: Any, patience: float) -> None:
        cursor = wrapper.connection.cursor()
        # During a wait in SQLite, Python handles no signal: so wait in short pieces.
        cursor.execute("PRAGMA busy_timeout = 250")
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.fetchall()
        except Exception as error:
            if not self.is_locked(error):
                raise
            # Another connection, perhaps of this thread, writes now. The next connection tries it.

    def give_up(self, wrapper: Any) -> None:
        # A traceback may keep a statement alive. Then the closed connection still has its lock.
        if wrapper.connection is not None:
            wrapper.connection.rollback()

    def numbers(self, execute: Execute, count: int) -> list[int]:
        text = "UPDATE sqlite_sequence SET seq = seq + %s WHERE name = 'tidemill_job' RETURNING seq"
        rows = execute(text, [count])
        if not rows:
            execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('tidemill_job', %s)", [count])
            rows = [(count,)]
        last = rows[0][0]
        return list(range(last - count + 1, last + 1))

    def last_number(self, execute: Execute) -> int:
        rows = execute("SELECT seq FROM sqlite_sequence WHERE name = 'tidemill_job'", [])
        return rows[0][0] if rows else 0

    def advance(self, execute: Execute, number: int) -> None:
        if number > self.last_number(execute):
            self.numbers(execute, number - self.last_number(execute))

    def table_of(self, rows: Sequence[Row]) -> tuple[str, list[Any]]:
        mark = "(" + ", ".join(["%s"] * 10) + ")"
        values = [value for row in rows for value in row]
        return "(VALUES " + ", ".join([mark] * len(rows)) + ")", values

    def is_full(self, error: BaseException) -> bool:
        return getattr(error, "sqlite_errorcode", None) == _SQLITE_FULL

    def is_locked(self, error: BaseException) -> bool:
        code = getattr(error, "sqlite_errorcode", 0)
        return code & 0xFF == _SQLITE_BUSY and code != _SQLITE_STALE_VIEW

    def may_repeat(self, error: BaseException) -> bool:
        return self.is_locked(error)


_IDLE, _ACTIVE = 0, 1  # states of a connection of libpq, which both drivers report by these numbers


def _is_psycopg_3(connection: Any) -> bool:
    return hasattr(connection, "pgconn")


def _sqlstate(error: BaseException) -> object:
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)  # psycopg 3, 2


class Postgres(Dialect):
    """A server with sequences and advisory locks."""

    vendor = "postgresql"
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
    lock = f"SELECT pg_advisory_xact_lock({_SHARE})"
    now = "extract(epoch FROM clock_timestamp())::float8"
    blob = "decode({}, 'base64')"
    _sequence = "pg_get_serial_sequence('tidemill_job', 'seq')"

    def prepare(self, wrapper: Any, patience: float) -> None:
        connection = wrapper.connection
        cursor = connection.cursor()
        cursor.execute(settings_of(connection.info.backend_pid))
        # During a wait in psycopg 2, Python handles no signal: so wait in short pieces.
        limit = patience if _is_psycopg_3(connection) else min(patience, _SHORT_WAIT)
        cursor.execute(self.lock_limit(limit))

    def enter(self, execute: Execute) -> str:
        [(_, digits, _)] = execute(f"{self.lock}, {_PRECISE}", [])
        return "" if int(digits) > 0 else f"SET LOCAL extra_float_digits = {digits}"

    def lock_limit(self, patience: float) -> str:
        millis = int(max(1.0, patience) * 1000)
        return f"SET lock_timeout = {min(millis, _LONGEST_WAIT)}"

    def give_up(self, wrapper: Any) -> None:
        # A server that waits for a lock does not notice that the client hangs up.
        connection = wrapper.connection
        if connection is not None and connection.info.transaction_status == _ACTIVE:
            connection.cancel()

    def is_idle(self, connection: Any) -> bool:
        return connection is not None and connection.info.transaction_status == _IDLE

    def cursor(self, connection: Any) -> tuple[Any, bool]:
        if not _is_psycopg_3(connection):
            return connection.cursor(), False
        from psycopg import ClientCursor

        return ClientCursor(connection), True

    def draw(self, count: int) -> Statement:
        return f"SELECT nextval({self._sequence}) FROM generate_series(1, %s)", [count]

    def numbers(self, execute: Execute, count: int) -> list[int]:
        return [row[0] for row in execute(*self.draw(count))]

    def last_number(self, execute: Execute) -> int:
        text = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM tidemill_job_seq_seq"
        return int(execute(text, [])[0][0])

    def advance(self, execute: Execute, number: int) -> None:
        if number > self.last_number(execute):
            execute(f"SELECT setval({self._sequence}, %s)", [number])

    def table_of(self, rows: Sequence[Row]) -> tuple[str, list[Any]]:
        names = [f"column{number}" for number in range(1, 11)]
        types = zip(names, _NEW_JOB, strict=True)
        listed = ", ".join(f"{name} {kind}" for name, kind in types)
        return f"json_to_recordset(%s::json) AS v({listed})", [_json(names, rows)]

    def update_jobs(self, columns: Sequence[str], rows: Sequence[Row]) -> Statement | None:
        names = [*columns, "seq"]
        listed = ", ".join(f"{name} {_TYPES.get(name, 'int')}" for name in names)
        sets = ", ".join(
            f"{name} = " + (self.blob if name in ("facts", "large") else "{}").format(f"v.{name}")
            for name in columns
        )
        text = (
            f"UPDATE tidemill_job AS job SET {sets} "
            f"FROM json_to_recordset(%s::json) AS v({listed}) WHERE job.seq = v.seq"
        )
        return text, [_json(names, rows)]

    def is_full(self, error: BaseException) -> bool:
        return _sqlstate(error) == _POSTGRES_FULL

    def is_locked(self, error: BaseException) -> bool:
        return _sqlstate(error) == _POSTGRES_LOCKED


class MariaDB(Dialect):
    """A server that quotes names with backquotes, and draws numbers from a table."""

    vendor = "mysql"
    begin = "START TRANSACTION"
    lock = "SELECT id FROM tidemill_store WHERE id = 1 FOR UPDATE"
    now = "(UNIX_TIMESTAMP(SYSDATE(6)) + 0e0)"

    def prepare(self, wrapper: Any, patience: float) -> None:
        cursor = wrapper.connection.cursor()
        # During a wait in these drivers, Python handles no signal: so wait in short pieces.
        cursor.execute("SET innodb_lock_wait_timeout = 1, lock_wait_timeout = 1")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def numbers(self, execute: Execute, count: int) -> list[int]:
        execute("INSERT INTO tidemill_number VALUES " + ", ".join(["(NULL)"] * count), [])
        first = int(execute("SELECT LAST_INSERT_ID()", [])[0][0])
        # The deletion does not reset the table's counter, so the table can stay empty.
        between = "DELETE FROM tidemill_number WHERE n BETWEEN %s AND %s"
        execute(between, [first, first + count - 1])
        return list(range(first, first + count))

    def last_number(self, execute: Execute) -> int:
        text = (
            "SELECT AUTO_INCREMENT FROM information_schema.TABLES "
            "WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'tidemill_number'"
        )
        return int(execute(text, [])[0][0]) - 1

    def advance(self, execute: Execute, number: int) -> None:
        if number > self.last_number(execute):
            execute("INSERT INTO tidemill_number VALUES (%s)", [number])

    def upsert(self, table: str, keys: Sequence[str], columns: Sequence[str]) -> tuple[str, str]:
        sets = ", ".join(f"`{c}` = VALUES(`{c}`)" for c in columns if c not in keys)
        names = ", ".join(f"`{c}`" for c in columns)
        return f"INSERT INTO {table} ({names}) VALUES ", f" ON DUPLICATE KEY UPDATE {sets}"

    def table_of(self, rows: Sequence[Row]) -> tuple[str, list[Any]]:
        # A union of plain literals cuts off envelopes (the ninth column) above 64 KiB.
        marks = ["%s"] * 8 + ["CAST(%s AS BINARY)", "%s"]
        first = "SELECT " + ", ".join(f"{m} AS column{n}" for n, m in enumerate(marks, 1))
        others = [f"SELECT {', '.join(marks)}"] * (len(rows) - 1)
        values = [value for row in rows for value in row]
        return "(" + " UNION ALL ".join([first, *others]) + ") AS v", values

    def quick_insert(self, insert: str, rest: str) -> str:
        return f"{insert.replace('INSERT', 'INSERT IGNORE', 1)} {rest} RETURNING id"

    def is_full(self, error: BaseException) -> bool:
        number = error.args[0] if error.args else None
        return number in _MARIADB_FULL or "No space left on device" in str(error)

    def is_locked(self, error: BaseException) -> bool:
        return bool(error.args and error.args[0] == _MARIADB_LOCKED)


DIALECTS: dict[str, Dialect] = {one.vendor: one for one in (SQLite(), Postgres(), MariaDB())}
"""The dialects by Django's names of the vendors."""
