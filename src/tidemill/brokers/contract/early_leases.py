"""The part of the contract that reports leases before they are durable.

If a crash loses a lease, its job runs a second time at worst. Often the same crash also breaks the
connection of the client that holds the lease. Then the client knows that it no longer has the job.
So an owner that serves such clients need not wait for the disk before it hands out leases. Verdicts
that its clients send during the commit may join the same commit.

An owner whose clients outlive a crash must wait for the disk. After a crash the store uses
uncommitted tokens again, so a client with an old token could settle the job of another client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.job import Lease, Verdict

LeaseCallback = Callable[[Sequence[Lease]], Sequence[Verdict]]
"""Receives leases inside the step that makes them; returns verdicts to settle in this step."""


@runtime_checkable
class EarlyLeases(Protocol):
    """A broker whose commits take far longer than the rest of a step."""

    def exchange_early(self, step: Step, heard: LeaseCallback) -> Reply:
        """Exchange for a consumer, and call ``heard`` before the step is durable.

        ``heard`` receives the leases, even if the list is empty. It must return soon, since the
        store is locked. The verdicts that ``heard`` returns are settled in the same step. Their
        answers come last in ``Reply.settled``. Any thread may call ``heard`` while the caller
        waits.

        When ``heard`` is called again, or this call raises, the earlier leases are lost and other
        leases may get their tokens. The verdicts that ``heard`` returned before were not settled.
        ``heard`` must return them again if they still count.
        """
        ...
