"""Declared retries of tasks, and the exceptions by which a task decides the end of its job.

:mod:`.backoff` has the numbers that a job stores, and the delays.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.core.backoff import RetryPolicy
from tidemill.core.error_types import ErrorTypes
from tidemill.core.errors import InvalidOption


class Retries(RetryPolicy, frozen=True, gc=True):
    """The retries of a task, as code declares them: ``@mill.task(retries=Retries(5, …))``.

    A job stores only the numbers. The worker reads ``on``, ``never`` and ``when`` from the task's
    declaration. These three apply to exceptions of the task. After a timeout or the death of a
    worker, only the numbers apply.

    Attributes:
        limit: retries after the first attempt, 0 to 65,000; ``Retries(0)`` never retries.
        delay: seconds before the first retry, at most.
        factor: each retry multiplies the bound by this, 1 to 1,000.
        cap: the largest bound in seconds.
        jitter: True draws each delay from 0 to the bound; False waits for the whole bound.
        immediate: the first ``immediate`` retries have no delay; the backoff begins after them.
        on: only these exceptions are retried: classes, or dotted names such as
            ``"requests.Timeout"``.
        never: these exceptions are not retried.
        when: a function of the error, called after the checks of ``on`` and ``never``. True retries
            the job.
    """

    on: ErrorTypes = ()
    never: ErrorTypes = ()
    when: Callable[[BaseException], object] | None = None

    @property
    def policy(self) -> RetryPolicy:
        """Only the numbers."""
        return RetryPolicy(*(getattr(self, name) for name in RetryPolicy.__struct_fields__))


DELAY_MOST = 100 * 365 * 86400.0
"""A hundred years: a longer delay is a mistake of units."""


def _check_delay(what: str, delay: float) -> float:
    if not 0 <= delay <= DELAY_MOST:
        raise InvalidOption(f"delay of {what} must be 0 or more seconds, not {delay!r}")
    return delay


class Retry(Exception):
    """Raised by a task: this attempt failed; run the job again.

    Args:
        reason: the text for this attempt in the trail (the events of the job).
        delay: seconds until the next attempt, 0 to a hundred years; by default the task's own
            backoff.

    Raises:
        InvalidOption: the delay is out of bounds.
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        super().__init__(reason or "retry asked for")
        self.delay = None if delay is None else _check_delay("Retry", delay)


class Fail(Exception):
    """Raised by a task: the job has failed for good; do not run it again.

    The text, ``Fail("why")``, becomes the error of the job.
    """


class Snooze(Exception):
    """Raised by a task: run the job again later; no attempt is counted.

    Args:
        delay: seconds until the next run, 0 to a hundred years.
        reason: the text in the trail.

    Raises:
        InvalidOption: the delay is out of bounds.
    """

    def __init__(self, delay: float, reason: str = "") -> None:
        super().__init__(reason or f"snoozed for {delay:g} s")
        self.delay = _check_delay("Snooze", delay)


class Skip(Exception):
    """Raised by middleware or a task: there is nothing to do.

    The job succeeds with the result None. Its trail (the events of the job) says ``skipped:`` with
    the reason.
    """


class JobTimeout(BaseException):
    """Raised inside a running task whose ``timeout`` has passed.

    The class is a BaseException, like KeyboardInterrupt, so ``except Exception`` in a task does not
    catch it.
    """


class JobTerminated(BaseException):
    """Raised inside a running task that was cancelled with ``terminate=True``.

    The class is a BaseException, for the same reason as :class:`JobTimeout`.
    """


class WorkerStopping(BaseException):
    """Raised inside a running task whose worker stops, shortly before the process is killed.

    The job goes back to its queue, and the attempt does not count. A task may catch the exception,
    clean up and return: then its result counts. Async tasks get ``asyncio.CancelledError`` instead.
    """
