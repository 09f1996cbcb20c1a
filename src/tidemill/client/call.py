"""A call to enqueue: a task by its name, arguments, options and hooks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar, Unpack

from tidemill.client.callbacks import Hooked
from tidemill.client.options import CALL_OPTIONS, CallOptions, Options
from tidemill.core.errors import InvalidOption
from tidemill.core.job import RunOn

R = TypeVar("R")


class PartialCall(Hooked, Generic[R]):
    """A call that may lack its first argument: a step of a chain, or a hook.

    Only type checkers tell the two classes apart: at run time each call is a :class:`Call`.

    Attributes:
        missing: the error of a call that lacks an argument, or None. A step of a chain gets its
            first argument later.
    """

    __slots__ = ("args", "kwargs", "missing", "options", "task")

    def __init__(
        self,
        task: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        missing: TypeError | None = None,
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.missing = missing
        self.hooks = ()

    def _hooked(self, waits: RunOn, hook: Any) -> Self:
        if self.options.key:
            raise InvalidOption(
                f"{self!r} has the key {self.options.key!r}, and a job with hooks can have no key"
            )
        return super()._hooked(waits, hook)

    def using(self, **options: Unpack[CallOptions]) -> Self:
        """The same call with other options.

        Raises:
            InvalidOption: there is no such option, or a value cannot be used.
        """
        changed = copy.copy(self)
        changed.options = self.options.changed(f"a call of {self.task}", options, CALL_OPTIONS)
        return changed

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{self.task}({', '.join(parts)})"


class Call(PartialCall[R]):
    """A call to enqueue: a task, its arguments, its options and its hooks.

    ``task.call(…)`` and ``mill.call(…)`` make calls.
    """

    __slots__ = ()
