"""Hooks: calls that are made when something has ended, and what they are told of it.

Everything that can be enqueued has the three methods of :class:`Hooked`: a call, a chain, a group,
a flow. A hook is a job of its own, stored with what it watches and begun by the step that ends it:
exactly one such job runs, whatever dies when. How it ends itself changes nothing before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from tidemill.job import State, Waits

if TYPE_CHECKING:
    from tidemill.task import Call, Configured, Task

    AnyCall: TypeAlias = Call[Any] | Task[..., Any] | Configured[..., Any, Any]

__all__ = ["HOOKS", "Ended", "Hooked"]

HOOKS = {
    Waits.SUCCESS: "on_success",
    Waits.FAILURE: "on_failure",
    Waits.ANY: "on_complete",
}


class Ended:
    """How something ended: the first argument of every hook.

    Attributes:
        id: of the job; of a chain its last step's, of a group the group's.
        state: ``succeeded``, ``failed``, ``cancelled`` or ``expired``; of a chain, that of the step
            which stopped it. None when the job was deleted.
        error: why it did not succeed, or an empty string.
        failed: id of the job that did not succeed, the step of a chain perhaps, or an empty string.
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
        """True when all went well."""
        return self.state is State.SUCCEEDED

    @property
    def result(self) -> Any:
        """What it returned; of a group a list, read when first asked for, with None for failures.

        Raises:
            Fail: it is no longer kept.
        """
        if self._load is not None:
            self._result, self._load = self._load(), None
        return self._result

    def __repr__(self) -> str:
        return f"<{self.id} {self.state or 'deleted'}>"


class Hooked:
    """Something that hooks can be put on. The methods return a copy that has the hook.

    A hook is a task, or a call of one with further arguments: ``.on_failure(alert)`` calls
    ``alert(ended)``, ``.on_failure(alert.call("ops"))`` calls ``alert(ended, "ops")``.
    """

    __slots__ = ("hooks",)

    def __init__(self) -> None:
        self.hooks: tuple[tuple[Waits, Any], ...] = ()

    def on_success(self, hook: AnyCall) -> Self:
        """Call the hook once all has succeeded."""
        return self._hooked(Waits.SUCCESS, hook)

    def on_failure(self, hook: AnyCall) -> Self:
        """Call the hook once it has ended otherwise: failed for good, cancelled, or expired."""
        return self._hooked(Waits.FAILURE, hook)

    def on_complete(self, hook: AnyCall) -> Self:
        """Call the hook once it has ended, however."""
        return self._hooked(Waits.ANY, hook)

    def _hooked(self, waits: Waits, hook: Any) -> Self:
        changed = copy.copy(self)
        changed.hooks = (*self.hooks, (waits, hook))
        return changed
