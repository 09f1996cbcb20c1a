"""The part of the app that every put passes through.

The app of a Django project overrides ``batch_for``, ``commit_batch`` and ``threaded_put``, so that
puts obey Django's transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tidemill.brokers.contract.features import Feature
from tidemill.client.context import is_importing
from tidemill.client.job_handle import UNCOMMITTED, Job, leave_out
from tidemill.client.pending_puts import PendingPuts
from tidemill.client.runtime import OpenBatch, Runtime
from tidemill.core.envelope import Envelope
from tidemill.core.errors import InvalidOption

T = TypeVar("T")


class Putting:
    """The methods of :class:`tidemill.Tidemill` that store jobs."""

    def put(self: Runtime, envelopes: Sequence[Envelope], txn: Any = None) -> list[Job[Any]]:
        """Store jobs now, or add them to the batch that :meth:`batch_for` returns."""
        if is_importing():
            why = leave_out(envelopes)
            return [Job(self, envelope.id, pending=why) for envelope in envelopes]
        batch = self.batch_for(txn)
        if batch is not None:
            jobs = batch.add(envelopes)
            if jobs is not None:
                return jobs
        if txn is not None:
            self.features.need(Feature.TRANSACTIONS, "txn=")
        pending = UNCOMMITTED if txn is not None else ""
        puts = self.broker.put(envelopes, txn=txn)
        return [Job(self, put.id, put.placed, pending=pending) for put in puts]

    def batch_for(self: Runtime, txn: Any = None) -> OpenBatch | None:
        """The batch that the caller's put joins; None when the put is made now.

        Raises:
            InvalidOption: ``txn`` is given inside a batch.
        """
        batch = self.current_batch
        if batch is not None and txn is not None:
            raise InvalidOption(
                "txn inside a batch: each of the two has its own commit; leave one of them out"
            )
        return batch

    def commit_batch(self: Runtime, pending: PendingPuts) -> None:
        """Store the jobs and publications of a batch, at its end."""
        pending.store()

    async def threaded_put(
        self: Runtime, put: Callable[[], T], txn: Any = None, *, waits: bool = False
    ) -> T:
        """Make a blocking put for an event loop. With ``waits`` the put may wait for room."""
        if txn is not None:
            return await self.threads.in_transaction(txn, put)
        return await (self.patiently(put) if waits else self.threaded(put))

    async def threaded(self: Runtime, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a thread of the app, not in the event loop's small pool."""
        return await self.threads.run(function, *args)

    async def patiently(self: Runtime, function: Callable[..., T], *args: Any) -> T:
        """As ``threaded``, in the pool for calls that wait."""
        return await self.waiters.run(function, *args)
