"""The part of the contract that reports leases before they are durable.

A lease that a crash loses costs at most a second run of its job. If the holder of the lease is lost
in the same crash, even that does not happen: a client whose connection breaks knows that its job
now belongs to another client. An owner of such clients need not wait for the disk before it hands
out its leases. Verdicts that its clients send meanwhile may join the same commit.

An owner whose clients outlive a crash must wait for the disk. Tokens that were not committed are
given out again, and a client with an old token could settle the job of another client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.job import Lease, Verdict

__all__ = ["EarlyLeases", "LeaseCallback"]

LeaseCallback = Callable[[Sequence[Lease]], Sequence[Verdict]]
"""Receives leases inside the step that makes them; returns verdicts that came meanwhile."""


@runtime_checkable
class EarlyLeases(Protocol):
    """A broker whose commit takes far longer than the rest of a step."""

    def exchange_early(self, step: Step, heard: LeaseCallback) -> Reply:
        """Exchange for a consumer, and call ``heard`` before the step is durable.

        ``heard`` receives the leases, also when there are none. It must return soon, since the
        store is locked. Its verdicts are settled in the same step, and ``settled`` lists them
        behind the verdicts of the step. Any thread may call it while the caller waits.

        When ``heard`` is called again, or this call raises, the earlier leases are lost and their
        tokens may be given to others. Verdicts that ``heard`` returned were not settled; return the
        verdicts that still count again.
        """
        ...
