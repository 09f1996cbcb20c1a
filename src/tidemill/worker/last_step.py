"""The last steps of a worker: they store the verdicts of the jobs that ended last.

If the store is away or full, the worker repeats the step for ``LAST_STEP`` seconds. A call of a
stalled store may never return. So the watchdog ends the process ``STALLED`` seconds after the
shutdown timeout. The scoreboard stays for the next worker, which counts an attempt for each job on
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidemill.core.clock import clock
from tidemill.worker.process_pool import ProcessPool

log = logging.getLogger("tidemill.worker")

LAST_STEP = 10.0
STALLED = LAST_STEP + 2.0


def store_last(
    pool: ProcessPool, exchange: Callable[[], object], pause: Callable[[], None]
) -> bool:
    """Store the last verdicts; False when the store does not take them in time.

    After False, the worker does not detach: by a detach, the store would give back ended jobs
    without an attempt.
    """
    until = clock.machine() + LAST_STEP
    exchange()
    while pool.verdicts and clock.machine() < until:
        pause()
        exchange()
    if not pool.verdicts:
        if pool.history.due_in < float("inf"):
            exchange()  # the numbers of the last verdicts
        return True
    left = len(pool.verdicts)
    log.error("the store did not take the outcome of %d jobs: they may run again", left)
    pool.interrupted = True
    return False
