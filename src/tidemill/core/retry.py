"""Retries: the backoff, the declared retries of tasks, and the exceptions that end an attempt.

A job stores only the numbers (:class:`RetryPolicy`). Backoff is exponential with full jitter: each
delay is drawn evenly from 0 to a growing bound. So jobs that failed together do not come back
together (M. Brooker, "Exponential Backoff and Jitter", 2015).
"""

from __future__ import annotations

import inspect
import pkgutil
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.errors import InvalidOption


class RetryPolicy(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The number and the times of a failed job's retries, as a job stores them.

    Attributes:
        limit: retries after the first attempt; ``Retries(0)`` never retries.
        delay: the first bound in seconds: full jitter draws the delay from 0 to the bound.
        factor: each retry multiplies the bound by this.
        cap: the largest bound in seconds.
        jitter: False waits the full bound instead of drawing from it.
        immediate: the first ``immediate`` retries have no delay; the backoff begins after them.
    """

    limit: int = 3
    delay: float = 5.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: bool = True
    immediate: int = 0

    @property
    def max_attempts(self) -> int:
        """The most attempts at the job; 0 means no limit."""
        return self.limit + 1


ENDLESS = RetryPolicy(limit=-1)
"""The policy of beanstalk jobs: retries without limit and without delay, as in the protocol."""


MESSAGE = RetryPolicy(limit=19, delay=1.0, factor=2.0, cap=300.0, jitter=False, immediate=1)
"""The policy of a message put without ``retries``.

After the first failed delivery, the message returns to its place in the line. The delays after
later failures double from 1 s to 5 minutes. The 20th failure ends the message.
"""


BY_POLICY = -1.0  # the delay of a verdict that leaves the delay to the job's policy, also for tasks


def backoff(policy: RetryPolicy, attempt: int) -> float:
    """Seconds until a job runs again after the failure of its attempt ``attempt``, from 1.

    Redis and PostgreSQL compute the same numbers: ``backoff.lua`` and ``29_backoff.sql``.
    """
    step = attempt - 1 - policy.immediate
    if policy.limit < 0 or policy.delay <= 0 or step < 0:
        return 0.0
    # The exponent ends at 64, because 2.0 ** 1024 overflows. No useful cap is reached later.
    bound = min(policy.cap, policy.delay * policy.factor ** min(step, 64))
    return random.uniform(0.0, bound) if policy.jitter else bound


ErrorType = type[BaseException] | str
"""A class of exceptions, or the dotted name of one.

A name such as ``"requests.Timeout"`` is imported when it is first needed. So the program that
declares a task need not import the library. No job stores the name of a type.
"""
ErrorTypes = ErrorType | tuple[ErrorType, ...]


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


def check_error_types(field: str, value: object) -> tuple[ErrorType, ...]:
    """Exception types as a tuple; the value may be a single type.

    Raises:
        InvalidOption: a value is neither a class of exceptions nor a dotted name.
    """
    types: tuple[Any, ...] = (value,)
    if isinstance(value, (tuple, list, set, frozenset)):
        types = tuple(value)
    for each in types:
        is_class = isinstance(each, type) and issubclass(each, BaseException)
        parts = each.split(".") if isinstance(each, str) else []
        if not is_class and (len(parts) < 2 or not all(part.isidentifier() for part in parts)):
            raise InvalidOption(
                f"{field} must be exception classes, or dotted names such as 'requests.Timeout', "
                f"not {each!r}"
            )
    return types


def is_one_of(error: BaseException, types: tuple[ErrorType, ...]) -> bool:
    """True when the error has one of the types, or a subclass of one.

    Raises:
        ImportError, AttributeError: a dotted name names nothing.
        TypeError: a dotted name names no class.
    """
    return any(
        isinstance(error, pkgutil.resolve_name(each) if isinstance(each, str) else each)
        for each in types
    )


class RetryRule(msgspec.Struct, frozen=True):
    """The rule by which a task retries some exceptions: ``on``, ``never`` and ``when``, checked.

    The rule belongs to the declaration of a task, in the code of the worker. A job stores only the
    numbers of its retries (``RetryPolicy``), because a store cannot hold functions and types.
    """

    on: tuple[ErrorType, ...] = ()
    never: tuple[ErrorType, ...] = ()
    when: Callable[[BaseException], object] | None = None

    def refusal(self, error: BaseException) -> str:
        """The reason not to retry the error; empty for a retry. ``when`` may raise an exception."""
        if is_one_of(error, self.never):
            return "the task's never= names the error"
        if self.on and not is_one_of(error, self.on):
            return "the task's on= does not name the error"
        if self.when is not None and not self.when(error):
            return "the task's when= refused the error"
        return ""


def check_retry_rule(value: object) -> RetryRule | None:
    """The rule of an option ``retries``; None when it has no rule.

    Raises:
        InvalidOption: ``on``, ``never`` or ``when`` cannot be used.
    """
    if not isinstance(value, Retries):
        return None
    when = value.when
    if when is not None and (not callable(when) or inspect.iscoroutinefunction(when)):
        raise InvalidOption(
            f"when of retries must be a plain function that takes the error, not {when!r}"
        )
    on = check_error_types("on of retries", value.on)
    never = check_error_types("never of retries", value.never)
    return RetryRule(on, never, when) if on or never or when is not None else None


DELAY_MOST = 100 * 365 * 86400.0  # a hundred years: a longer delay is a mistake of units


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
