"""Suspects: the jobs of a process that gave up, one of which broke it.

Each suspect runs alone next, and no attempt is counted. The job at fault breaks its process again,
with no other job beside it, and that counts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from tidemill.core.clock import wall_time
from tidemill.core.job import Lease, Note
from tidemill.worker.worker_process import WorkerProcess

__all__ = ["set_aside"]

log = logging.getLogger("tidemill.worker")


def set_aside(
    process: WorkerProcess, running: Collection[int], spare: list[Lease], notes: list[Note]
) -> bool:
    """Move the suspects of a dead process to the spare leases, to run alone.

    Returns True when the process gave up because of its jobs, and not right after its start.
    """
    if not process.gave_up:
        return False
    suspects = [token for token in running if token in process.held and token not in process.lost]
    if len(suspects) < 2:
        return process.socket.left_words
    log.warning(
        "%s; each of the %d jobs that it ran runs alone next", process.cause(), len(suspects)
    )
    line = f"interrupted: {process.cause()}; the job runs alone next"
    for token in suspects:
        lease = process.held.pop(token)
        lease.losses += 1
        spare.append(lease)
        notes.append(Note(token, line=line, time=wall_time()))
    return True
