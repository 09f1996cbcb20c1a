"""Run jobs in tests of a Django project, inside the transaction of a ``TestCase``.

    from tidemill.django.testing import TidemillTestCase

    class ReceiptTests(TidemillTestCase):
        def test_a_paid_order_gets_a_receipt(self):
            with self.captureOnCommitCallbacks(execute=True):
                self.client.post("/paid/1")
            self.run_jobs()
            self.assertEqual(len(mail.outbox), 1)

While tests run, the jobs live in memory (``TEST_URL``), so no test touches the store of the
project. The jobs of ``run_jobs`` use the database connections of the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from django.db import connections
from django.test import TestCase

from tidemill.brokers.contract.inspection import Filter
from tidemill.django.connections import shared_connections
from tidemill.django.project import DjangoMill, project_mill
from tidemill.testing import run_all


def run_jobs(mill: DjangoMill | None = None, *, scheduled: bool = False) -> None:
    """Run jobs, one after the other, until no job is ready; see :func:`tidemill.testing.run_all`.

    The jobs use the caller's database connections. So the jobs see the rows of an open
    transaction of the caller.

    Args:
        mill: the app; by default the project's.
        scheduled: True also runs jobs that are scheduled for later.

    Raises:
        TidemillError: the worker could not serve, or a job did not end.
    """
    with _connections_shared():
        run_all(mill or project_mill(), concurrency=1, scheduled=scheduled)


@contextlib.contextmanager
def immediate(mill: DjangoMill | None = None) -> Iterator[None]:
    """Run each job at once, in its caller, while the block lasts; no job is stored."""
    mill = mill or project_mill()
    before, mill.sync = mill.sync, True
    try:
        yield
    finally:
        mill.sync = before


@contextlib.contextmanager
def _connections_shared() -> Iterator[None]:
    """Let jobs in other threads use the connections of this thread, while this thread waits."""
    own: dict[str, Any] = {alias: connections[alias] for alias in connections}
    for connection in own.values():
        connection.inc_thread_sharing()
    shared_connections.update(own)
    try:
        yield
    finally:
        shared_connections.clear()
        for connection in own.values():
            connection.dec_thread_sharing()


class TidemillTestMixin:
    """A mixin for test cases: each test begins with an empty store, and can run jobs."""

    tidemill_app: DjangoMill | None = None
    """The app; None for the project's app."""

    @classmethod
    def _pre_setup(cls) -> None:  # not setUp, whose override may leave out the call of its base
        super()._pre_setup()  # type: ignore[misc]
        _empty(cls.tidemill_app or project_mill())

    def run_jobs(self, *, scheduled: bool = False) -> None:
        """Run jobs until no job is ready: see :func:`run_jobs`."""
        run_jobs(self.tidemill_app, scheduled=scheduled)


class TidemillTestCase(TidemillTestMixin, TestCase):
    """Django's ``TestCase`` with :meth:`run_jobs`."""


def _empty(mill: DjangoMill) -> None:
    if mill.url.startswith("memory:"):
        mill.close()  # at its next use, ``memory://`` opens an empty store
        return
    while records := mill.broker.find(Filter(), 500).records:
        mill.broker.delete([record.envelope.id for record in records])
