"""One transaction of the store: the rows, the jobs, and the times at which something is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.django.connections import Connection, Database
from tidemill.brokers.django.dialects import Dialect, Statement
from tidemill.brokers.django.due import come_due
from tidemill.brokers.django.jobs import Facts, StoredJobs
from tidemill.brokers.django.tables import Rows
from tidemill.core.clock import clock, new_id

_FIRST = "(SELECT min({0}) FROM tidemill_job WHERE {0} IS NOT NULL)"
_OPEN = (
    "SELECT {now}, facts, "
    + _FIRST.format("alarm")
    + ", "
    + _FIRST.format("prune")
    + " FROM tidemill_store WHERE id = 1"
)


def time_of(dialect: Dialect, now: float) -> float:
    """The time in the database's answer, or of this machine if the database uses its clock."""
    # Not ``clock.wall``: ``server_ahead`` has what a test adds to the clock of a database.
    return (now if dialect.now else time.time()) + clock.server_ahead()


class Transaction:
    """The state of the store in one transaction.

    The argument ``also`` has further queries to run at the beginning. The attribute :attr:`also`
    has the rows of each.
    """

    def __init__(self, rows: Rows, database: Database, also: Sequence[Statement] = ()) -> None:
        opening = _OPEN.format(now=database.dialect.now or "0")
        opened, *self.also = rows.execute_all([(opening, []), *also])
        if not opened:  # ``flush`` has emptied the tables: the store begins anew, with its name
            create_store(rows.execute, database)
            opened, *self.also = rows.execute_all([(opening, []), *also])
        [(now, facts, alarm, self.prune)] = opened
        self.rows = rows
        now = time_of(rows.dialect, now)
        self.jobs = StoredJobs(rows, database.address.retention, now, bytes(facts))
        self.alarm = self.jobs.alarm = alarm

    @property
    def is_late(self) -> bool:
        """True when jobs had come due before the transaction began."""
        return self.alarm is not None and self.alarm <= self.jobs.now

    def come_due(self) -> bool:
        """Move some of the jobs whose time has come; True when more such jobs may be left."""
        return come_due(self.rows, self.jobs, self.alarm)


def create_store(execute: Callable[..., list[Any]], database: Database) -> None:
    """Add the row of the store."""
    facts = Facts(store=database.store or new_id(), born=database.now_of(execute))
    text = "INSERT INTO tidemill_store (id, departs, facts) VALUES (1, 0, %s)"
    execute(text, [msgspec.msgpack.encode(facts)])


def begin(
    connection: Connection, database: Database, also: Sequence[Statement] = ()
) -> Transaction:
    """Begin on a connection of the broker."""
    return Transaction(Rows(connection), database, also)
