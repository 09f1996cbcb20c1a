"""The state of the broker in this process, and its access to the database."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.django.caller import inside
from tidemill.brokers.django.connections import Connection, Database
from tidemill.brokers.django.dialects import Statement
from tidemill.brokers.django.jobs import Facts
from tidemill.brokers.django.owners import Owners
from tidemill.brokers.django.settings import Address
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.django.transaction import Transaction, begin, create_store
from tidemill.brokers.django.waits import Waits
from tidemill.brokers.django.wakeup import OWNERS, WAITERS, ring
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.errors import BrokerUnavailable, FeatureMissing, TidemillError

T = TypeVar("T")
_facts = msgspec.msgpack.Decoder(Facts)


class ServerCalls:
    """The base of all calls of the broker."""

    def __init__(self, address: Address) -> None:
        self.url = address.text
        self._address = address
        self._alive = address.owner_lease
        self._closed = False
        self._enter()
        tell_of_forks(self)

    def _enter(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        self._pid = os.getpid()
        self._next_tick = 0.0
        self._last_queue = ""
        self._database = Database(self._address)
        self._store = self._database.store = self._facts().store or self._found()
        name = f"django-{self._store}"
        self._owners = Owners(name, self._database, self._change, self._send, self._alive)
        wakes = self._owners.wakes
        self.waits = Waits(self._read, self._look, wakes, self._address.poll)

    @property
    def identity(self) -> str:
        """The name of this store; no other store has this name."""
        return f"django {self._store}"

    @property
    def boards(self) -> str:
        """The folder for scoreboards."""
        return self._owners.boards

    # -- reading and changing -------------------------------------------------------------

    def _rows(self, connection: Connection) -> Rows:
        return Rows(connection)

    def _read(self, work: Callable[[Rows], T]) -> T:
        """Run queries without a lock."""
        return self._database.read(lambda connection: work(self._rows(connection)))

    def _change(
        self,
        work: Callable[[Transaction], T],
        *,
        patience: float | None = None,
        also: Sequence[Statement] = (),
    ) -> T:
        """Change jobs in one transaction, and wake the sleepers that the changes concern.

        ``also`` are queries that run when the transaction begins.
        """

        def run(connection: Connection) -> tuple[T, Transaction]:
            transaction = begin(connection, self._database, also)
            done = work(transaction)
            transaction.jobs.flush()
            return done, transaction

        done, transaction = self._database.write(run, patience=patience)
        self._ring(owners=transaction.jobs.news, waiters=transaction.jobs.ends)
        return done

    def _change_on_time(
        self,
        work: Callable[[Transaction], T],
        *,
        patience: float | None = None,
        also: Sequence[Statement] = (),
        with_each: Callable[[Transaction], object] = lambda transaction: None,
    ) -> T:
        """First move all jobs whose time has come; then change jobs.

        Many due jobs move in several transactions, so that each transaction is short. Each of these
        transactions also calls ``with_each``.
        """

        def run(transaction: Transaction) -> tuple[T] | None:
            if transaction.come_due():
                with_each(transaction)
                return None
            return (work(transaction),)

        while (done := self._change(run, patience=patience, also=also)) is None:
            pass
        return done[0]

    def _ring(self, *, owners: bool, waiters: bool) -> None:
        """Wake sleepers of this machine."""
        kinds = OWNERS * owners + WAITERS * waiters
        if kinds:
            ring(self._owners.wakes, kinds)

    def _look(self) -> None:
        """Move the jobs whose time has come, if there are any.

        Within a transaction of this thread, jobs that the transaction holds are left for later.
        """

        def first(connection: Connection) -> bool:
            text = "SELECT min(alarm) FROM tidemill_job WHERE alarm IS NOT NULL"
            [(alarm,)] = connection.execute(text)
            return alarm is not None and alarm <= self._database.now_of(connection.execute)

        if self._database.read(first):
            with self._no_wait_for_own_transaction() as patience:
                self._change_on_time(lambda _: None, patience=patience)

    @contextlib.contextmanager
    def _no_wait_for_own_transaction(self) -> Iterator[float | None]:
        """Leave out the change if a transaction of this thread prevents it: no wait would end."""
        if inside(self._address.alias) is None:
            yield None
        else:
            with contextlib.suppress(BrokerUnavailable):
                yield 0.0

    # -- facts ------------------------------------------------------------------------------

    def _facts(self) -> Facts:
        return self._database.read(self._facts_on)

    def _facts_on(self, connection: Connection) -> Facts:
        found = connection.execute("SELECT facts FROM tidemill_store WHERE id = 1")
        return _facts.decode(bytes(found[0][0])) if found else Facts()

    def _found(self) -> str:
        """Create the store's row with a name, unless another process was faster; return the name.

        If a transaction of this thread prevents the creation, return an empty name. The first call
        after the transaction creates the row.
        """

        def work(connection: Connection) -> None:
            if not connection.execute("SELECT id FROM tidemill_store WHERE id = 1"):
                create_store(connection.execute, self._database)

        with (
            contextlib.suppress(BrokerUnavailable),
            self._no_wait_for_own_transaction() as patience,
        ):
            self._database.write(work, patience=patience)
        return self._facts().store

    def _now(self) -> float:
        return self._database.read(lambda one: self._database.now_of(one.execute))

    # -- this process -------------------------------------------------------------------------

    def after_fork_child(self) -> None:
        """Leave connections and owners to the parent, in a forked child."""
        if not self._closed:
            self._database.after_fork_child()
            self._owners.after_fork_child()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._enter()
        elif not self._store and inside(self._address.alias) is None:
            self._database.close()
            self._enter()

    def _lacks(self, feature: Feature, what: str) -> FeatureMissing:
        return lacks(self.url, feature, what)

    # -- what broker.py defines ---------------------------------------------------------------

    def _send(self, attached: Any, step: Any, serial: int) -> Any:
        raise NotImplementedError  # DjangoBroker has it
