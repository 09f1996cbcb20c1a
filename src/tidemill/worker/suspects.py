"""Suspects: the jobs of a process that gave up. Any of these may have broken the process.

Next, each suspect runs alone. Its interrupted run counts no attempt. If the job breaks a process
again, this second run counts an attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidemill.core.job import Lease, Note
from tidemill.core.scoreboard import Running
from tidemill.worker.notes import interrupted_run
from tidemill.worker.worker_process import WorkerProcess

log = logging.getLogger("tidemill.worker")


def set_aside(
    process: WorkerProcess, running: Sequence[Running], spare: list[Lease], notes: list[Note]
) -> bool:
    """Move the suspects of a dead process to the spare leases, to run alone; True if it had any."""
    if not process.gave_up:
        return False
    suspects = [
        row for row in running if row.token in process.held and row.token not in process.lost
    ]
    if len(suspects) < 2:
        return False
    log.warning(
        "%s; each job that the process still ran runs alone next (%d)",
        process.cause(),
        len(suspects),
    )
    why = f"{process.cause()}; the job runs alone next"
    for row in suspects:
        lease = process.held.pop(row.token)
        lease.losses += 1
        spare.append(lease)
        notes.append(interrupted_run(row.token, row.started, why))
    return True
