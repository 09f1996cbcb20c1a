"""The part of the seam that is about leases told of before they are durable.

A lease that is lost with a crash costs at most a second run of its job, and where whoever holds it
is lost with it, not even that: a client of a line that breaks knows that its job is another's. Such
an owner need not wait for the disk before it hands out what it has leased, and what its clients say
of those jobs meanwhile may go into the same commit.

An owner whose clients outlive a crash must not: tokens that were not committed are given away once
more, and a client that had been told of one could settle the job of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from tidemill.brokers.steps import Reply, Step
from tidemill.job import Lease, Verdict

__all__ = ["Early", "Heard"]

Heard = Callable[[Sequence[Lease]], Sequence[Verdict]]
"""Is told of leases inside the step that makes them; what has been said of leases meanwhile."""


@runtime_checkable
class Early(Protocol):
    """A broker whose commit takes far longer than the rest of a step."""

    def exchange_early(self, step: Step, heard: Heard) -> Reply:
        """As ``exchange``, for a consumer; but ``heard`` is called before the step is durable.

        It gets the leases, also when there are none, and has to return soon: the store is locked.
        The verdicts that it returns are settled in the same step; ``settled`` has theirs behind
        those of the step. It is called from any thread, while the caller waits.

        When it is called once more, or this call raises, what was leased before is lost: the same
        tokens may be given to others. Of verdicts that it returned nothing was done, and those
        that still count have to be returned again.
        """
        ...
