"""The part of the contract for stores that lend leases to a carrier (``Feature.CARRY``).

A *carrier* is a message broker that brings ready jobs to the workers. The carrier holds ready jobs;
the store holds everything else.

A lease travels in three steps:

1. A relay, an owner of the kind ``relay``, leases jobs in the ordinary way and publishes each lease
   to the carrier.
2. The relay settles the lease with ``Outcome.CARRY``. The lease, with its token, now belongs to the
   carrier, which is no owner and never dies. The job is ready again, but in no queue, and no owner
   gets a hint.
3. A worker that receives the message hands in token and id as ``Step.take``. If the reply says
   True, the lease belongs to the worker and begins now, and the job may run. If the reply says
   False, the message is stale, and the worker drops the message.

So a job that was published twice, or whose relay died before it settled, still runs once. A message
may arrive before its relay has settled the lease. Then ``Step.take`` first settles the lease, as if
the relay had done so.

A job that lies with the carrier is called *carried*. A carried job keeps its place in its limits.
When the job starts, it takes tokens from its limits; the store reserves these tokens for it. No
other job gets these tokens, so the carrier never holds more jobs than could start at once. Every
request that acts on a ready job acts on a carried job, too; the lease then leaves the carrier, and
its message is stale.
"""

from __future__ import annotations

from typing import Protocol


class Recall(Protocol):
    """Takes leases back from the carrier."""

    def recall(self) -> int:
        """Give back all leases that lie with the carrier, and count no attempt; return how many.

        For use when the carrier has lost its messages. A message that the carrier still delivers is
        stale.
        """
        ...
