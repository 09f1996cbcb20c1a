"""A call to enqueue: a task by its name, arguments, options and hooks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from tidemill.client.callbacks import Hooked
from tidemill.client.options import CALL_OPTIONS, Options
from tidemill.core.errors import InvalidOption
from tidemill.core.job import RunOn

__all__ = ["Call"]

R = TypeVar("R")


class Call(Hooked, Generic[R]):
    """A call to enqueue: a task, its arguments, its options and its hooks.

    Attributes:
        missing: the error of a call without all its arguments. A step of a chain gets its first
            argument later.
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
                f"{self!r} has the key {self.options.key!r}, and a job with hooks can have none"
            )
        return super()._hooked(waits, hook)

    def using(self, **options: Any) -> Call[R]:
        """The same call with other options."""
        changed = copy.copy(self)
        changed.options = self.options.changed(f"a call of {self.task}", options, CALL_OPTIONS)
        return changed

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{self.task}({', '.join(parts)})"
