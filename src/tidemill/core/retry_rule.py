"""The rule by which a task retries some exceptions and not others.

The rule belongs to the declaration of a task, in the code of the worker. A job stores only the
numbers of its retries (``RetryPolicy``), because a store cannot hold functions and types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import msgspec

from tidemill.core.error_types import ErrorType, check_error_types, is_one_of
from tidemill.core.errors import InvalidOption
from tidemill.core.retry import Retries


class RetryRule(msgspec.Struct, frozen=True):
    """``on``, ``never`` and ``when`` of :class:`Retries`, checked."""

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
