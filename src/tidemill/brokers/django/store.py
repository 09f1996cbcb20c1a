"""The store in this process: its transactions, and the wake-ups that follow a transaction.

Each transaction that changes jobs excludes all other transactions of this kind. Only puts of plain
jobs need no lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.brokers.django.connections import Borrowed, Database, inside
from tidemill.brokers.django.dialects import Statement
from tidemill.brokers.django.due import come_due
from tidemill.brokers.django.jobs import Facts, StoredJobs, decode_facts
from tidemill.brokers.django.settings import Address
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.django.wakeup import OWNERS, WAITERS, ring
from tidemill.brokers.shared.owners import folder_here
from tidemill.core.clock import new_id
from tidemill.errors import BrokerUnavailable

T = TypeVar("T")
_FIRST = "(SELECT min({0}) FROM tidemill_job WHERE {0} IS NOT NULL)"
_OPEN = (
    "SELECT {now}, facts, "
    + _FIRST.format("alarm")
    + ", "
    + _FIRST.format("prune")
    + " FROM tidemill_store WHERE id = 1"
)


class Store:
    """The store, and the access of this process to its database."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.database = Database(address)
        self.last_queue = ""  # the queue that served the last fair want in this process
        # No other store has this name. It is empty while a transaction of this thread prevents the
        # creation of the store.
        self.name = ""
        self.name = self.facts().store or self._found()
        self.wakes = os.path.join(self.folder(), "wake")  # the folder of the sockets of sleepers

    def folder(self, *path: str) -> str:
        """A folder of this user's processes that use the store on this machine."""
        return folder_here(f"django-{self.name}", *path)

    def facts(self) -> Facts:
        text = "SELECT facts FROM tidemill_store WHERE id = 1"
        found = self.read(lambda rows: rows.execute(text))
        return decode_facts(bytes(found[0][0])) if found else Facts()

    def _create(self, rows: Rows) -> None:
        facts = Facts(store=self.name or new_id(), born=rows.now())
        text = "INSERT INTO tidemill_store (id, departs, facts) VALUES (1, 0, %s)"
        rows.execute(text, [msgspec.msgpack.encode(facts)])

    def _found(self) -> str:
        """Create the store's row with a name, unless another process was faster; return it."""
        # If a transaction of this thread prevents the creation, return an empty name. The first
        # call after the transaction creates the row.

        def work(rows: Rows) -> None:
            if not rows.execute("SELECT id FROM tidemill_store WHERE id = 1"):
                self._create(rows)

        with (
            contextlib.suppress(BrokerUnavailable),
            self._no_wait_for_own_transaction() as patience,
        ):
            self.database.write(work, patience=patience)
        return self.facts().store

    def read(self, work: Callable[[Rows], T], *, patience: float | None = None) -> T:
        """Run queries without a lock."""
        return self.database.read(work, patience=patience)

    def change(
        self,
        work: Callable[[StoredJobs], T],
        *,
        rings: str = "",
        patience: float | None = None,
        also: Sequence[Statement] = (),
    ) -> T:
        """Change jobs in one transaction, and wake the sleepers that the changes concern."""
        # ``rings`` are kinds of sleepers to wake in any case. ``also`` are queries that run when
        # the transaction begins.

        def run(rows: Rows) -> tuple[T, StoredJobs]:
            jobs = self._begin(rows, also)
            done = work(jobs)
            jobs.flush()
            return done, jobs

        done, jobs = self.database.write(run, patience=patience)
        self.ring(rings + OWNERS * jobs.news + WAITERS * jobs.ends)
        return done

    def change_on_time(
        self,
        work: Callable[[StoredJobs], T],
        *,
        rings: str = "",
        patience: float | None = None,
        also: Sequence[Statement] = (),
        with_each: Callable[[StoredJobs], object] = lambda jobs: None,
    ) -> T:
        """First move all jobs whose time has come; then change jobs."""
        # Many due jobs move in several transactions, so that each transaction is short. Each of
        # these transactions also calls ``with_each``.

        def run(jobs: StoredJobs) -> tuple[T] | None:
            if come_due(jobs):
                with_each(jobs)
                return None
            return (work(jobs),)

        while (done := self.change(run, rings=rings, patience=patience, also=also)) is None:
            pass
        return done[0]

    def change_within(self, wrapper: Any, work: Callable[[StoredJobs], T]) -> T:
        """Change jobs within a caller's transaction, on the caller's connection."""
        rows = Borrowed(wrapper)
        with rows.entered():
            jobs = self._begin(rows)
            come_due(jobs)
            done = work(jobs)
            jobs.flush()
        return done

    def _begin(self, rows: Rows, also: Sequence[Statement] = ()) -> StoredJobs:
        """The state of the store in a transaction that has just begun."""
        opening = _OPEN.format(now=rows.dialect.now or "0"), ()
        opened, *found = rows.execute_all([opening, *also])
        if not opened:  # ``flush`` has emptied the tables: the store begins anew, with its name
            self._create(rows)
            opened, *found = rows.execute_all([opening, *also])
        return StoredJobs(rows, self.address.retention, opened[0], found)

    def ring(self, kinds: str) -> None:
        """Wake sleepers of this machine."""
        ring(self.wakes, kinds)

    def look(self) -> None:
        """Move the jobs whose time has come, if there are any."""
        # Within a transaction of this thread, jobs that the transaction holds are left for later.

        def first(rows: Rows) -> bool:
            text = "SELECT min(alarm) FROM tidemill_job WHERE alarm IS NOT NULL"
            [(alarm,)] = rows.execute(text)
            return alarm is not None and alarm <= rows.now()

        if self.read(first):
            with self._no_wait_for_own_transaction() as patience:
                self.change_on_time(lambda _: None, patience=patience)

    @contextlib.contextmanager
    def _no_wait_for_own_transaction(self) -> Iterator[float | None]:
        """Leave out the change if a transaction of this thread prevents it: no wait would end."""
        if inside(self.address.alias) is None:
            yield None
        else:
            with contextlib.suppress(BrokerUnavailable):
                yield 0.0
