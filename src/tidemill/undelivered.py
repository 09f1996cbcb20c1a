"""Messages with ttr=0 that were acknowledged, and then could not be handed over.

The store has forgotten such a message. The caller puts the message again, with the same id, body
and priority. The message is due at once, behind the others of its priority.
"""

from __future__ import annotations

import msgspec

from tidemill.clock import wall_time
from tidemill.job import Envelope, Lease

__all__ = ["as_new"]


def as_new(envelope: Envelope, lease: Lease) -> Envelope:
    """The message of a lease as it is put once more."""
    left = 0.0
    if envelope.expires:
        left = max(0.001, envelope.created + envelope.expires - wall_time())
    return msgspec.structs.replace(
        envelope, delay=0.0, at=0.0, rank=lease.rank, expires=left, unique=None
    )
