"""The end of a worker whose store does not answer.

All processes are gone, and the last step waits in a call of the store that nobody can end. After
``PATIENCE`` the worker ends without the step. Its scoreboard stays for the next worker, by which
jobs that ended used an attempt. Jobs that go back uncounted are taken off the scoreboard before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from tidemill.core.clock import machine_time
from tidemill.worker.process_pool import ProcessPool

__all__ = ["StalledExit", "store_last"]

log = logging.getLogger("tidemill.worker")

PATIENCE = 10.0
"""Seconds that the store has for the last step."""

LAST_STEP = 15.0
"""Seconds for which the testing worker, inside the caller's process, offers its last verdicts.

:class:`StalledExit` ends a worker in a process of its own before that."""


def store_last(
    pool: ProcessPool, exchange: Callable[[], object], pause: Callable[[], None]
) -> bool:
    """Store the last verdicts; False when the store does not take them in time.

    Then the worker leaves without detaching: jobs that ended are not given back uncounted.
    """
    until = machine_time() + LAST_STEP
    exchange()
    while pool.verdicts and machine_time() < until:
        pause()
        exchange()
    if not pool.verdicts:
        return True
    left = len(pool.verdicts)
    log.error("the store did not take the outcome of %d jobs: they may run again", left)
    pool.interrupted = True
    return False


class StalledExit:
    """When a worker ends without its store, and how."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._since = 0.0

    def look(self, pool: ProcessPool) -> float:
        """With all processes gone: machine time of the next look, unless it ends the worker."""
        now = machine_time()
        self._since = self._since or now
        if now - self._since >= PATIENCE:
            pool.strike_released()
            log.error("the store takes no verdicts: the jobs that ended last may run again")
            logging.shutdown()
            os._exit(self._code)
        return self._since + PATIENCE
