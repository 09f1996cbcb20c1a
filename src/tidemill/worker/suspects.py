"""Jobs of a process that gave up: one of them broke it, and nobody knows which.

Each of them runs alone next, as jobs do that were lost without a witness. No attempt is counted.
The culprit breaks its process again, with nobody beside it, and that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from tidemill.clock import wall_time
from tidemill.job import Lease, Note
from tidemill.worker.hand import Hand

__all__ = ["set_aside"]

log = logging.getLogger("tidemill.worker")


def set_aside(hand: Hand, running: Collection[int], spare: list[Lease], notes: list[Note]) -> bool:
    """Move the suspects of a dead process to the spare leases, to run alone.

    Returns True when the process gave up because of its jobs, and not right after its start.
    """
    if not hand.gave_up:
        return False
    suspects = [token for token in running if token in hand.held and token not in hand.lost]
    if len(suspects) < 2:
        return hand.line.left_words
    log.warning("%s; each of the %d jobs that it ran runs alone next", hand.cause(), len(suspects))
    line = f"interrupted: {hand.cause()}; the job runs alone next"
    for token in suspects:
        lease = hand.held.pop(token)
        lease.losses += 1
        spare.append(lease)
        notes.append(Note(token, line=line, time=wall_time()))
    return True
