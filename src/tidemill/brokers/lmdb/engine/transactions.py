"""Transactions: to read, for a commit, and inside the caller's own transaction.

Each LMDB call gives up the interpreter lock. While another thread computes, each call waits a whole
switch interval (5 ms) to get the lock back. In this time the store is locked for all other
processes. One busy thread reduced 500,000 operations a second to 2,500. So the interval is 10 µs
while a write transaction is open (``pace``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lmdb

from tidemill.brokers.lmdb.engine.write_lock import named
from tidemill.core.forks import after_fork
from tidemill.errors import InvalidOption

SLOW = 1.0  # seconds that a transaction may stay open before the log says so
RESIZE_WAIT = 30.0  # seconds that a new mapping of the file waits for transactions of other threads

log = logging.getLogger("tidemill")


class Plain:
    """A context that has only the transaction."""

    __slots__ = ("txn",)

    def __init__(self, txn: lmdb.Transaction[bytes]) -> None:
        self.txn = txn

    def finish(self) -> None:
        """Do nothing: this context gathers no changes."""

    def committed(self) -> None:
        """Do nothing after the commit."""


class Writing:
    """A write transaction, as a context manager: the end commits it, an error undoes it."""

    __slots__ = ("_begun", "_env", "_place", "_txn", "committed")

    def __init__(self, env: lmdb.Environment, place: str) -> None:
        self._env = env
        self._place = place
        self.committed = False

    def __enter__(self) -> lmdb.Transaction[bytes]:
        pace.hurry()
        try:
            self._txn = begin_resized(self._env, write=True)
        except BaseException:
            pace.relax()
            raise
        self._begun = time.monotonic()
        return self._txn

    def _note(self) -> None:
        """Log when the transaction took long: all other processes waited for its end."""
        took = time.monotonic() - self._begun
        if took > SLOW:
            log.warning(
                "%s held the write lock of the store%s for %.1f s: the batch was large, the disk "
                "slow, or another thread kept Python's interpreter lock (a long call into C); "
                "every other process waited",
                named(os.getpid()),
                self._place,
                took,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        # Restore the switch interval before the commit. The commit gives up the interpreter lock
        # while the disk works, so threads that compute need no short interval.
        try:
            pace.relax()
        finally:
            try:
                if kind is None:
                    self._txn.commit()
                    self.committed = True
                    self._note()
                else:
                    self._txn.abort()
            finally:
                ended()


class _Open:
    """The open transactions of this process: nobody may move a map that a thread reads."""

    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.RLock()


_open = _Open()
after_fork(_open.__init__)  # type: ignore[misc]  # the child has no transactions


def begin_resized(env: lmdb.Environment, *, write: bool = False) -> lmdb.Transaction[bytes]:
    """Begin a transaction; call :func:`ended` at its end."""
    # If another process has made the map larger, wait for all transactions, then map the file
    # again. This thread must have no other transaction, or one that keeps the map from growing (a
    # write).
    until = 0.0
    while True:
        with _open.lock:
            _open.count += 1
        try:
            return env.begin(write=write)
        except BaseException as error:
            ended()
            until = until or time.monotonic() + RESIZE_WAIT
            if not isinstance(error, lmdb.MapResizedError) or time.monotonic() > until:
                raise
        with _open.lock:
            if not _open.count:
                env.set_mapsize(0)
                continue
        time.sleep(0.001)


def ended() -> None:
    """Count the end of a transaction."""
    with _open.lock:
        _open.count -= 1


@contextlib.contextmanager
def nested(
    env: lmdb.Environment,
    table: lmdb._Database,
    txn: Any,
    translated: Callable[[Exception], Exception],
) -> Iterator[lmdb.Transaction[bytes]]:
    """Give a transaction inside the caller's. An error in it undoes only its own changes."""
    try:
        txn.stat(table)
        inner = env.begin(parent=txn, write=True)
    except (AttributeError, TypeError, lmdb.Error) as error:
        raise InvalidOption(
            "txn must be an open write transaction of this store's own LMDB environment"
        ) from error
    try:
        with inner:
            yield inner
    except lmdb.Error as error:
        raise translated(error) from error


class Reading:
    """A read transaction, as a context manager; ``translated`` turns LMDB's errors into ours."""

    # No caller holds a read transaction for long, since its pages cannot be reused meanwhile.

    __slots__ = ("_env", "_translated", "_txn")

    def __init__(self, env: lmdb.Environment, translated: Callable[[Exception], Exception]) -> None:
        self._env = env
        self._translated = translated

    def __enter__(self) -> lmdb.Transaction[bytes]:
        try:
            self._txn = begin_resized(self._env, write=False)
        except lmdb.Error as error:
            raise self._translated(error) from error
        return self._txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._txn.abort()
        ended()
        if isinstance(error, lmdb.Error):
            raise self._translated(error) from error


_BUSY_INTERVAL = 1e-5


class _Pace:
    """Counts the writers of this process, and shortens the interval while there are writers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers = 0
        self._normal = sys.getswitchinterval()

    def hurry(self) -> None:
        """Shorten the interval: a transaction is about to begin."""
        with self._lock:
            if not self._writers:
                self._normal = sys.getswitchinterval()
                sys.setswitchinterval(_BUSY_INTERVAL)
            self._writers += 1

    def relax(self) -> None:
        """Restore the interval when the last transaction has ended."""
        with self._lock:
            self._writers -= 1
            if not self._writers:
                sys.setswitchinterval(self._normal)

    def after_fork_child(self) -> None:
        """Restore the interval in a forked child, where no thread writes yet."""
        if self._writers:
            sys.setswitchinterval(self._normal)
        self._lock = threading.Lock()
        self._writers = 0


pace = _Pace()
after_fork(pace.after_fork_child)
