"""The times of retries, and the exceptions by which a task decides them itself.

Backoff is exponential with full jitter: a delay drawn evenly from nothing to the bound, so that
jobs that failed together do not come back together (M. Brooker, "Exponential Backoff and Jitter",
2015).
"""

from __future__ import annotations

import random

import msgspec

from tidemill.core.errors import InvalidOption

__all__ = [
    "BY_POLICY",
    "ENDLESS",
    "MESSAGE",
    "Fail",
    "JobTerminated",
    "JobTimeout",
    "Retries",
    "Retry",
    "Snooze",
    "WorkerStopping",
    "backoff",
]


class Retries(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The number and the times of a failed job's retries.

    Attributes:
        limit: retries after the first attempt; ``Retries(0)`` never retries.
        delay: seconds before the first retry, at most (full jitter draws from 0 to this).
        factor: by what the bound grows with each retry.
        cap: the bound never exceeds this many seconds.
        jitter: False waits the full bound instead of drawing from it.
        immediate: this many first retries have no delay; the backoff begins after them.
    """

    limit: int = 3
    delay: float = 5.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: bool = True
    immediate: int = 0

    @property
    def max_attempts(self) -> int:
        """The most runs of the job; 0 means no limit."""
        return self.limit + 1


ENDLESS = Retries(limit=-1)
"""The policy of beanstalk jobs: retries without limit and without delay, as in the protocol."""


MESSAGE = Retries(limit=19, delay=1.0, factor=2.0, cap=300.0, jitter=False, immediate=1)
"""The policy of a message put without ``retries``.

The first failed hand-out returns the message to its place, later ones delay it by 1 s doubling to
5 minutes, and the 20th ends it.
"""


BY_POLICY = -1.0
"""The delay of a verdict that leaves the delay to the job's policy, also for tasks."""


def backoff(policy: Retries, attempt: int) -> float:
    """Seconds until a job whose attempt number ``attempt`` (from 1) failed runs again.

    Redis and PostgreSQL compute the same numbers for messages: ``backoff.lua``, ``29_backoff.sql``.
    """
    step = attempt - 1 - policy.immediate
    if policy.limit < 0 or policy.delay <= 0 or step < 0:
        return 0.0
    # 2.0 ** 1024 overflows; past 64 doublings every cap has long been reached.
    bound = min(policy.cap, policy.delay * policy.factor ** min(step, 64))
    return random.uniform(0.0, bound) if policy.jitter else bound


DELAY_MOST = 100 * 365 * 86400.0
"""A hundred years: a longer time is a mistake of units."""


def _check_delay(what: str, delay: float) -> float:
    if not 0 <= delay <= DELAY_MOST:
        raise InvalidOption(f"delay of {what} must be 0 or more seconds, not {delay!r}")
    return delay


class Retry(Exception):
    """Raised by a task: this attempt failed, run the job again.

    Args:
        delay: seconds until then; the task's own backoff when not given.
        reason: what the trail says of this attempt.
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        super().__init__(reason or "retry asked for")
        self.delay = None if delay is None else _check_delay("Retry", delay)


class Fail(Exception):
    """Raised by a task: the job has failed for good, do not run it again."""


class Snooze(Exception):
    """Raised by a task: run the job again after ``delay`` seconds; no attempt is counted."""

    def __init__(self, delay: float, reason: str = "") -> None:
        super().__init__(reason or f"snoozed for {delay:g} s")
        self.delay = _check_delay("Snooze", delay)


class JobTimeout(BaseException):
    """Raised inside a running task whose ``timeout`` has passed.

    A BaseException, as KeyboardInterrupt is: a task's ``except Exception`` must not swallow it.
    """


class JobTerminated(BaseException):
    """Raised inside a running task that was cancelled with ``terminate=True``."""


class WorkerStopping(BaseException):
    """Raised inside a running task whose worker stops, shortly before the process is killed.

    The job goes back uncounted. A task may catch it, clean up and return: then its result counts.
    Async tasks get ``asyncio.CancelledError`` instead.
    """
