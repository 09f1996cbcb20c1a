"""Put a message with ttr=0 again if it was acknowledged, but could not be handed over.

The acknowledgement deletes such a message from the store. The copy has the same id, body and
priority. The copy is ready at once, behind the other messages of its priority.
"""

from __future__ import annotations

import msgspec

from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease


def fresh_copy(envelope: Envelope, lease: Lease) -> Envelope:
    """A copy of a leased message, for a new put."""
    left = 0.0
    if envelope.expires:
        left = max(0.001, envelope.created + envelope.expires - clock.wall())
    return msgspec.structs.replace(
        envelope, delay=0.0, at=0.0, rank=lease.rank, expires=left, unique=None
    )
