"""A call to enqueue: a task by its name, arguments, options and hooks.

A hook is a call that is made when a call, chain, group or flow has ended. A hook is a job of its
own, stored together with the jobs that it watches. It becomes ready in the step in which these jobs
end. So a crash neither loses nor doubles a hook. The end of a hook changes nothing for the jobs
that it watches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

from tidemill.client.options import CALL_OPTIONS, CallOptions, Options
from tidemill.core.job import RunOn, State
from tidemill.errors import InvalidOption

R = TypeVar("R")

HOOKS = {
    RunOn.SUCCESS: "on_success",
    RunOn.FAILURE: "on_failure",
    RunOn.ANY: "on_complete",
}


# -- hooks -----------------------------------------------------------------------------------------


class Ended:
    """The end of a call, chain, group or flow: the first argument of every hook.

    Attributes:
        id: the id of the job, of the chain's last step, or of the group.
        state: ``succeeded``, ``failed``, ``cancelled`` or ``expired``. The state of a chain is the
            state of the step that stopped it, or ``cancelled`` if somebody cancelled a step. None
            for a deleted job.
        error: the error, or an empty string after success.
        failed: the id of the job that did not succeed, for example a step of the chain; empty after
            success.
    """

    def __init__(
        self,
        id: str,
        state: State | None,
        *,
        result: Any = None,
        error: str = "",
        failed: str = "",
        load: Callable[[], Any] | None = None,
    ) -> None:
        self.id = id
        self.state = state
        self.error = error
        self.failed = failed
        self._result = result
        self._load = load

    @property
    def succeeded(self) -> bool:
        """True when all watched jobs succeeded."""
        return self.state is State.SUCCEEDED

    @property
    def result(self) -> Any:
        """The result. The result of a group is a list, with None for each failed member.

        A member that is no longer kept also has None in this list. The results of a group are read
        from the store at the first use.

        Raises:
            Fail: the group is no longer kept.
        """
        if self._load is not None:
            self._result, self._load = self._load(), None
        return self._result

    def __repr__(self) -> str:
        return f"<{self.id} {self.state or 'deleted'}>"


class Hook(Protocol):
    """The type of a hook: a task, a task with options, or a call."""

    def using(self, **options: Unpack[CallOptions]) -> Any:
        """The same hook with other options."""


class Hooked:
    """The base of all values with hooks. Each method returns a copy with one more hook.

    A hook is a task, or a call of a task with further arguments. ``.on_failure(alert)`` calls
    ``alert(ended)``. ``.on_failure(alert.call("ops"))`` calls ``alert(ended, "ops")``.
    """

    __slots__ = ("hooks",)

    def __init__(self) -> None:
        self.hooks: tuple[tuple[RunOn, Any], ...] = ()

    def on_success(self, hook: Hook) -> Self:
        """Call the hook after success."""
        return self._hooked(RunOn.SUCCESS, hook)

    def on_failure(self, hook: Hook) -> Self:
        """Call the hook after a final failure, a cancellation or an expiry."""
        return self._hooked(RunOn.FAILURE, hook)

    def on_complete(self, hook: Hook) -> Self:
        """Call the hook after the end, with or without success."""
        return self._hooked(RunOn.ANY, hook)

    def _hooked(self, waits: RunOn, hook: Any) -> Self:
        changed = copy.copy(self)
        changed.hooks = (*self.hooks, (waits, hook))
        return changed


# -- calls -----------------------------------------------------------------------------------------


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
        if (key := self.options.key) is not None:
            raise InvalidOption(
                f"{self!r} has the key {key.name!r}, and a job with hooks can have no key"
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
