"""A job that a worker process holds and that waits for a slot."""

from __future__ import annotations

import msgspec

from tidemill.client.runtime import DeclaredTask
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease


class WaitingJob(msgspec.Struct, frozen=True, order=True, gc=False):
    """A job whose envelope is decoded and whose task is known.

    Waiting jobs sort by the position of their queue in the worker's list of queues, then by rank,
    then by sequence number. Tokens are unique, so a comparison never compares leases.
    """

    queue_place: int
    rank: int
    seq: int
    token: int
    lease: Lease
    envelope: Envelope
    task: DeclaredTask
