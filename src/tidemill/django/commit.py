"""Puts inside ``transaction.atomic()``: they wait for the commit, or join the transaction.

A put that waits returns at once, with the ids of the jobs. The jobs are stored after the commit of
the transaction. They are never stored after a rollback of the transaction or of a savepoint.

``TestCase`` runs each test in a transaction that never commits. No put waits for this transaction:
puts wait only for the ``atomic`` blocks that the test or the tested code opens.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction

from tidemill.client.job_handle import Job
from tidemill.client.puts import PendingPuts, Publication
from tidemill.core.envelope import Envelope
from tidemill.errors import BrokerUnavailable

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

log = logging.getLogger("tidemill.django")

Then = Callable[[Exception | None], object]
"""A function that is called with None when other processes can find the jobs of a put.

If a put after the commit fails, the function is called with the error. If the store becomes
unavailable during the put, the function is not called, because the jobs may be stored.
"""

REFUSED = "after the commit the store did not take %s"
UNSURE = "after the commit the store became unavailable, and may have stored %s"


def open_transaction(alias: str) -> Any:
    """This thread's connection to a database, if the connection is inside ``atomic``; else None."""
    connection: Any = connections[alias]
    if not connection.in_atomic_block:
        return None
    blocks = connection.atomic_blocks
    of_tests = bool(blocks) and all(getattr(block, "_from_testcase", False) for block in blocks)
    return None if of_tests else connection


class CommitRule(NamedTuple):
    """When the puts of an app are made: see :class:`tidemill.django.settings.Settings`.

    Attributes:
        on_commit: the alias of the database for whose commit a put waits, or empty.
        join: the alias of the database whose transaction stores the jobs, or empty.
        own: the alias of the database that is the store, or empty.
        robust: True logs the error of a put after the commit; False raises the error.
    """

    on_commit: str = ""
    join: str = ""
    own: str = ""
    robust: bool = False

    def concerns_here(self) -> bool:
        """True when a transaction of this thread delays a put, or stores its jobs."""
        aliases = (self.on_commit, self.join)
        return any(alias and open_transaction(alias) is not None for alias in aliases)

    def make(self, puts: PendingPuts, then: Then | None = None) -> None:
        """Make puts, now or after the commit. A put that is made now may raise TidemillError."""
        waits_for = open_transaction(self.on_commit) if self.on_commit else None
        if self.join and (connection := open_transaction(self.join)) is not None:
            puts.store(connection)
        elif waits_for is not None:
            hook = _PutAtCommit(waits_for, puts, then, robust=self.robust)
            transaction.on_commit(hook, using=self.on_commit)
            return
        else:
            puts.store()
        if then is not None:
            self._at_commit_of_store(functools.partial(then, None))

    def _at_commit_of_store(self, call: Callable[[], object]) -> None:
        """Make a call at the commit of the store's database: then other processes find the jobs."""
        alias = self.join or self.own
        if alias and open_transaction(alias) is not None:
            transaction.on_commit(call, using=alias)
        else:
            call()


class TransactionBatch:
    """The batch of a put inside ``atomic``: the commit rule decides when the batch is stored."""

    def __init__(self, runtime: Runtime, rule: CommitRule) -> None:
        self._runtime = runtime
        self._rule = rule

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]]:
        puts = PendingPuts(self._runtime)
        jobs = puts.add(envelopes)
        self._rule.make(puts)
        return jobs

    def publish(self, made: Publication) -> bool:
        puts = PendingPuts(self._runtime)
        puts.publish(made)
        self._rule.make(puts)
        return True


_numbers = itertools.count()


class _PutAtCommit:
    """The hook that makes a put after the commit. A rollback drops the hook.

    The store may refuse the put. After the error of a hook, Django calls no further hook of the
    transaction. So before this hook raises an error, it also makes the later puts. Only Django
    holds strong references to the hooks. Our list in the connection has weak references. So the
    list loses the hooks that the rollback of a savepoint has dropped.
    """

    def __init__(
        self, connection: Any, puts: PendingPuts, then: Then | None, *, robust: bool
    ) -> None:
        self._puts = puts
        self._then = then
        self._robust = robust
        self._made = False
        self._number = next(_numbers)
        self._hooks: weakref.WeakValueDictionary[int, _PutAtCommit]
        self._hooks = connection.__dict__.setdefault(
            "tidemill_hooks", weakref.WeakValueDictionary()
        )
        self._hooks[self._number] = self

    def __call__(self) -> None:
        if self._made:
            return
        error = self._store()
        if error is None:
            return
        away = error if isinstance(error, BrokerUnavailable) else None
        refused, unsure = ([], self._puts.names()) if away else (self._puts.names(), [])
        for later in self._later() if away or not self._robust else ():
            failure = later._store(away)
            if away is None and isinstance(failure, BrokerUnavailable):
                away = failure
                unsure += later._puts.names()
            elif failure is not None:
                refused += later._puts.names()
        self._tell(error, refused, unsure)

    def _tell(self, error: Exception, refused: list[str], unsure: list[str]) -> None:
        if self._robust:
            if refused:
                log.error(REFUSED, _shown(refused), exc_info=error)
            if unsure:
                log.error(UNSURE, _shown(unsure), exc_info=error)
            return
        if refused:
            error.add_note(REFUSED % _shown(refused))
        if unsure:
            error.add_note(UNSURE % _shown(unsure))
        raise error

    def _store(self, away: Exception | None = None) -> Exception | None:
        """Make the put, unless the store was ``away`` just now, and return the error."""
        self._made = True
        error = away
        if away is None:
            try:
                self._puts.store()
            except Exception as failure:
                error = failure
        is_unsure = away is None and isinstance(error, BrokerUnavailable)
        if self._then is not None and not is_unsure:
            self._then(error)
        return error

    def _later(self) -> list[_PutAtCommit]:
        """The later puts of the transaction that are not made yet, in order."""
        hooks = list(self._hooks.items())
        return [hook for number, hook in hooks if number > self._number and not hook._made]


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
