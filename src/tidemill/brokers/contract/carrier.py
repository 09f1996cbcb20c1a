"""The part of the contract for stores that lend leases to a carrier (``Feature.CARRY``).

A *carrier* is a message broker that brings ready jobs to the workers. The carrier holds ready jobs;
the store holds everything else.

A lease travels in three steps:

1. A relay, an owner of the kind ``relay``, leases jobs in the ordinary way and publishes each lease
   to the carrier.
2. The relay settles the lease with ``Outcome.CARRY``. The lease, with its token, now belongs to the
   carrier, which is no owner and never dies. The job is ready again, but in no queue, and no owner
   is hinted.
3. A worker that receives the message hands in token and id as ``Step.take``. If the reply says
   True, the lease is the worker's, as if made at that moment, and the job may run. If the reply
   says False, the message is stale, and the worker drops it.

So a job that was published twice, or whose relay died before it settled, still runs once. A message
may arrive before its relay has settled the lease: taking a lease from a relay settles it for the
relay first.

A carried job keeps its place in its limits and reserves the tokens that it takes when it starts.
No other job gets those tokens until then, so the carrier never holds more jobs than could start at
once. Every request that acts on a ready job acts on a carried job, too; the lease then leaves the
carrier, and its message is stale.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Recall"]


class Recall(Protocol):
    """Takes leases back from the carrier."""

    def recall(self) -> int:
        """Give back all leases that lie with the carrier, uncounted; return how many.

        For use when the carrier has lost its messages. Messages that it still brings are stale.
        """
        ...
