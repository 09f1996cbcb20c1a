"""End processes that run no job any more and do not end by themselves.

The usual reason is a function of ``process_stop`` that hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidemill.worker.worker_process import WorkerProcess

log = logging.getLogger("tidemill.worker")

ENDING_MOST = 8
"""The most processes that may take their time to end, for each process of the worker."""


def surplus(processes: Sequence[WorkerProcess], most: int) -> list[WorkerProcess]:
    """The processes that began to end first; the ``most`` latest processes may take their time."""
    ending = [process for process in processes if process.idle_at and not process.killed_at]
    return sorted(ending, key=lambda process: process.idle_at)[:-most]


def end_lingering(process: WorkerProcess, now: float) -> None:
    """Kill a process that runs no job and has not ended in time."""
    # Jobs still run although the process is to end: a task closed the process's descriptors.
    if process.running():
        process.kill(by_us=False)
        return
    log.warning(
        "worker process %d is killed: it has not ended %.3g s after its last job; its main "
        "thread: %s",
        process.pid,
        now - process.idle_at,
        "\n" + process.main_stack(),
    )
    process.kill()


def reason_of(process: WorkerProcess) -> str:
    """Why a process is killed; empty when the worker stops."""
    if not process.stuck.reason and process.leaving and process.closed_at:
        return "a function of process_stop or atexit has not returned"
    return process.stuck.reason
