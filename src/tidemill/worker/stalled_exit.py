"""The end of a worker whose store does not answer.

All processes of the worker are gone, and the last step waits in a call of the store that cannot be
ended. After ``PATIENCE`` seconds the worker ends without the step. Its scoreboard stays for the
next worker, which counts an attempt for each job in it. So the worker first removes the rows of
jobs that go back without an attempt.

If the store has all verdicts, only the detach is missing. Then the worker ends within its shutdown
timeout, and other workers notice its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidemill.core.clock import clock
from tidemill.worker.process_pool import ProcessPool

log = logging.getLogger("tidemill.worker")

PATIENCE = 10.0
"""Seconds that the store has for the last step."""

DETACH = 2.0
"""Seconds for the detach, at least, if the store has all verdicts."""

LAST_STEP = 15.0
"""Seconds for which the testing worker, inside the caller's process, offers its last verdicts.

A worker in a process of its own does not wait so long: :class:`StalledExit` ends the worker."""


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
        return True
    left = len(pool.verdicts)
    log.error("the store did not take the outcome of %d jobs: they may run again", left)
    pool.interrupted = True
    return False


class StalledExit:
    """Ends a worker whose store does not take the last step.

    ``leave`` ends the process at once. ``interrupted`` is the exit code if jobs were interrupted,
    or if verdicts are lost.
    """

    def __init__(self, clean: int, interrupted: int, leave: Callable[[int], None]) -> None:
        self._clean = clean
        self._interrupted = interrupted
        self._leave = leave
        self._since = 0.0

    def look(self, pool: ProcessPool, until: float) -> float:
        """End the worker if its time is up; else return the machine time of the next look.

        Called only when all processes are gone. ``until`` is the end of the shutdown timeout.
        """
        now = clock.machine()
        self._since = self._since or now
        is_settled = not (pool.verdicts or pool.sent)
        end = self._since + PATIENCE
        if is_settled:
            end = min(end, max(until, self._since + DETACH))
        if now < end:
            return end
        pool.strike_released()
        if is_settled:
            log.warning("the store does not answer: the worker ends without detaching")
        else:
            log.error("the store takes no verdicts: the jobs that ended last may run again")
        self._leave(self._clean if is_settled and not pool.interrupted else self._interrupted)
        return float("inf")
