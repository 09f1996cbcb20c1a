"""The broker's own connections, apart from the connections of requests, and their transactions.

Each call takes a spare connection, and returns it. A connection that failed is closed, so that the
next call makes a new connection.

A signal ends a call that waits, for example for a lock of the database. The transaction is undone,
and the signal's handler is called. If the handler returns, the call starts again.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tidemill.brokers.django.dialects import DIALECTS, Statement
from tidemill.brokers.django.errors import Locked, full, translated
from tidemill.brokers.django.settings import Address
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.network.spare_connections import Spares
from tidemill.core.signals import InterruptibleWait, restart_on_signal
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError

T = TypeVar("T")
_PAUSE = 0.1  # seconds between two attempts to reach the database
_forked: list[Any] = []  # connections of the parent, which a child must neither use nor close


class Unsure(BrokerUnavailable):
    """The connection broke during the commit: the changes may be stored."""


@functools.lru_cache(maxsize=2000)
def _native(text: str, vendor: str) -> str:
    if vendor == "sqlite":
        return text.replace("%s", "?")
    return text.replace('"', "`") if vendor == "mysql" else text


class Connection(Rows):
    """One connection of the broker, which one thread uses at a time."""

    def __init__(self, alias: str, patience: float) -> None:
        from django.db import connections

        # Django has no type hints. Type checkers with stubs of Django need no mark here.
        self._wrapper = connections.create_connection(alias)  # type: ignore[no-untyped-call,unused-ignore]
        self._wrapper.inc_thread_sharing()
        self._patience = patience
        self._until = 0.0  # monotonic time until which a statement may wait for a lock
        self.dialect = DIALECTS[self._wrapper.vendor]
        self._cursor: Any = None
        self._joins = False  # True when several statements make one message
        self._unsent: list[Statement] = []

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the driver's errors into ours, and close a connection that may be broken."""
        from django.db import Error

        try:
            with self._wrapper.wrap_database_errors:
                yield
        except Error as error:
            self.close()
            raise translated(self._wrapper.alias, self.dialect, error) from error
        except TidemillError:
            raise
        except BaseException:  # such as a signal, or a timeout of a task
            self.close()
            raise

    def limit(self, patience: float, until: float) -> None:
        """Set how long the next statements may wait for a lock."""
        self._until = until
        if patience != self._patience:
            self._patience = patience
            if self._joins and self._cursor is not None:
                self.send(self.dialect.lock_limit(patience))

    def open(self) -> None:
        """Connect, unless the connection is open."""
        if self._cursor is None:
            self._wrapper.close()
            with InterruptibleWait():
                self._wrapper.ensure_connection()
            self.dialect.prepare(self._wrapper, self._patience)
            self._cursor, self._joins = self.dialect.cursor(self._wrapper.connection)

    def execute(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self.execute_all([(text, parameters)])[0]

    def execute_all(self, statements: Sequence[Statement]) -> list[list[Any]]:
        if self._joins:
            return self._execute_joined(statements)
        return [self._execute_one(text, parameters) for text, parameters in statements]

    def send(self, text: str, parameters: Sequence[Any] = ()) -> None:
        if self._joins:
            self._unsent.append((text, parameters))
        else:
            self._execute_one(text, parameters)

    def _execute_one(self, text: str, parameters: Sequence[Any]) -> list[Any]:
        cursor = self._cursor
        text = _native(text, self.dialect.vendor)
        while True:
            try:
                cursor.execute(text, *([parameters] if parameters else []))
                return cursor.fetchall() if cursor.description else []
            except Exception as error:
                again = self.dialect.may_repeat(error) and time.monotonic() < self._until
                if not again:
                    raise
            with InterruptibleWait():
                pass  # the signals that came during the wait are handled here

    def _execute_joined(self, statements: Sequence[Statement]) -> list[list[Any]]:
        if not statements:
            return []
        unsent, self._unsent = self._unsent, []
        whole = [*unsent, *statements]
        parameters = [value for _, values in whole for value in values]
        cursor = self._cursor
        with InterruptibleWait():
            cursor.execute("; ".join(text for text, _ in whole), parameters or None)
        answers: list[list[Any]] = []
        for _ in whole:
            answers.append(cursor.fetchall() if cursor.description else [])
            cursor.nextset()
        return answers[len(unsent) :]

    def commit(self) -> None:
        """End the transaction. If a signal comes after the commit, the call is not repeated."""
        # If a signal comes before the commit, psycopg cancels the statement. Then the transaction
        # has failed, and the call may start again.
        try:
            self.execute("COMMIT")
        except KeyboardInterrupt:
            if not self.dialect.is_idle(self._wrapper.connection):
                raise

    def roll_back(self) -> None:
        self._unsent.clear()
        self.execute("ROLLBACK")

    def execute_many(self, text: str, rows: Sequence[Sequence[Any]]) -> None:
        self._cursor.executemany(_native(text, self.dialect.vendor), rows)

    def close(self) -> None:
        self._cursor = None
        self._unsent.clear()
        with contextlib.suppress(Exception):
            self.dialect.give_up(self._wrapper)
        with contextlib.suppress(Exception):
            self._wrapper.close()


def inside(alias: str) -> Any:
    """Django's connection of this thread if it is within ``atomic``; else None."""
    from django.db import connections

    wrapper = connections[alias]
    return wrapper if wrapper.in_atomic_block else None


def joined(txn: Any, alias: str) -> Any:
    """The connection that ``txn`` names; None without ``txn``."""
    if txn is None:
        return None
    from django.db import connections

    named = txn if isinstance(txn, str) else getattr(txn, "alias", None)
    if named != alias:
        raise InvalidOption(
            f"txn must be Django's connection of the database {alias!r}, "
            "as django.db.connection, or its alias"
        )
    wrapper = connections[alias]
    if not wrapper.in_atomic_block:
        raise InvalidOption(
            "txn is Django's connection outside of a transaction; put inside: "
            "with transaction.atomic():"
        )
    return wrapper


class Borrowed(Rows):
    """A caller's Django connection: statements go through Django's own cursor, one by one."""

    # Its errors are the errors of Django, except for a full disk.

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.dialect = DIALECTS[wrapper.vendor]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Exclude other transactions that change jobs. Make no lasting change of the connection."""
        leave = self.dialect.enter(self.execute)
        try:
            yield
        except TidemillError:
            self._leave(leave)
            raise
        self._leave(leave)

    def _leave(self, statement: str) -> None:
        if statement and not self._wrapper.needs_rollback:
            self.execute(statement)

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[Any]:
        from django.db import Error

        try:
            with self._wrapper.cursor() as cursor:
                yield cursor
        except Error as error:
            if (ours := full(self._wrapper.alias, self.dialect, error)) is not None:
                raise ours from error
            raise

    def execute(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self._cursor() as cursor:
            cursor.execute(self._native(text), list(parameters) or None)
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, text: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._cursor() as cursor:
            cursor.executemany(self._native(text), rows)

    def _native(self, text: str) -> str:
        return text.replace('"', "`") if self.dialect.vendor == "mysql" else text


class Database:
    def __init__(self, address: Address) -> None:
        from django.db import connections

        vendor = connections[address.alias].vendor
        if vendor not in DIALECTS:
            raise InvalidOption(
                f"{address.text} is a database of {vendor}; django:// works on SQLite, "
                "PostgreSQL and MariaDB"
            )
        self._address = address
        self._spares = self._no_spares()
        self.since = time.monotonic()  # since this time the database has answered every call

    def _no_spares(self) -> Spares[Connection]:
        return Spares(lambda: Connection(self._address.alias, self._address.patience))

    def read(self, work: Callable[[Connection], T], *, patience: float | None = None) -> T:
        """Run statements that change nothing, each by itself."""

        def run(connection: Connection) -> T:
            with connection.errors():
                connection.open()
                return work(connection)

        return self._patiently(run, patience)

    def write(
        self, work: Callable[[Connection], T], *, lock: bool = True, patience: float | None = None
    ) -> T:
        """Run a transaction; by default it excludes all other transactions that change jobs.

        Raises:
            BrokerUnavailable: the database did not answer within ``patience``.
            Unsure: the connection broke during the commit.
        """

        def run(connection: Connection) -> T:
            dialect = connection.dialect
            with connection.errors():
                connection.open()
                try:
                    connection.send(dialect.begin)
                    if lock and dialect.lock:
                        connection.send(dialect.lock)
                    done = work(connection)
                except TidemillError:
                    connection.roll_back()
                    raise
            with _unsure(), connection.errors():
                connection.commit()
            return done

        return self._patiently(run, patience)

    def write_at_once(self, work: Callable[[Connection], T]) -> T:
        """Run one statement, which is a transaction by itself.

        Raises:
            Unsure: the connection broke; the statement may have run.
        """
        broken: list[str] = []

        def run(connection: Connection) -> T:
            if broken:
                raise Unsure(broken[0])
            with connection.errors():
                connection.open()
            try:
                with _unsure(), connection.errors():
                    return work(connection)
            except Exception:
                raise
            except BaseException:
                broken.append("a signal interrupted the statement")
                raise

        return self._patiently(run, None)

    def _patiently(self, run: Callable[[Connection], T], patience: float | None) -> T:
        patience = self._address.patience if patience is None else patience
        return self._repeat(run, patience, time.monotonic() + patience)

    @restart_on_signal
    def _repeat(self, run: Callable[[Connection], T], patience: float, until: float) -> T:
        while True:
            try:
                with self._spares.lend() as connection:
                    connection.limit(patience, until)
                    return run(connection)
            except Unsure:
                self.since = time.monotonic()
                raise
            except BrokerUnavailable as error:
                self.since = time.monotonic()
                pause = 0.0 if isinstance(error, Locked) else _PAUSE
                if time.monotonic() + pause >= until:
                    raise
            with InterruptibleWait():
                time.sleep(pause)

    def close(self) -> None:
        self._spares.close()

    def after_fork_child(self) -> None:
        _forked.append(self._spares)
        self._spares = self._no_spares()


@contextlib.contextmanager
def _unsure() -> Iterator[None]:
    """Of a connection that breaks, say that the changes may be stored; a lock has stopped them."""
    try:
        yield
    except Locked:
        raise
    except BrokerUnavailable as error:
        raise Unsure(str(error)) from error
