"""Tasks: functions that can be called now or enqueued, and the calls that stand for them."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import inspect
import logging
import pathlib
import sys
import types
from collections.abc import Callable, Coroutine, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

from tidemill.arguments import Arguments
from tidemill.brokers.base import Feature
from tidemill.config import check_name
from tidemill.context import running_job
from tidemill.elsewhere import attribute_elsewhere, option_elsewhere
from tidemill.errors import InvalidOption
from tidemill.hooks import Hooked
from tidemill.job import Waits
from tidemill.options import CALL_OPTIONS, Options

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.handle import Job

__all__ = [
    "AsyncTask",
    "Call",
    "Configured",
    "Declare",
    "Task",
    "doubt",
    "import_task",
    "make_task",
    "no_such_task",
    "task_name",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
C = TypeVar("C")
log = logging.getLogger("tidemill")


class Call(Hooked, Generic[R]):
    """A call that has not been made: a task, its arguments, its options, its hooks.

    Attributes:
        lacks: the error if it lacks arguments; as a step of a chain it may yet get the first.
    """

    __slots__ = ("args", "kwargs", "lacks", "options", "task")

    def __init__(
        self,
        task: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        lacks: TypeError | None = None,
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.lacks = lacks
        self.hooks = ()

    def _hooked(self, waits: Waits, hook: Any) -> Self:
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


class Configured(Generic[P, R, C]):
    """A task with options set, or bound to an instance, for the calls made through it.

    ``R`` is what the job's result will be, ``C`` what a plain call returns: an async task's a
    coroutine.
    """

    __slots__ = ("_bound", "_options", "_task")

    def __init__(self, task: Task[..., R], options: Options, bound: tuple[Any, ...] = ()) -> None:
        self._task = task
        self._options = options
        self._bound = bound

    def using(self, **options: Any) -> Configured[P, R, C]:
        """Further options."""
        changed = self._options.changed(f"task {self._task.name}", options, CALL_OPTIONS)
        return Configured(self._task, changed, self._bound)

    @overload
    def call(self) -> Call[R]: ...  # as a step of a chain it gets its argument yet
    @overload
    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
    def call(self, *args: Any, **kwargs: Any) -> Call[R]:
        """The call, not made."""
        given = (*self._bound, *args)
        return _call(self._task, given, kwargs, self._options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Make the call later, in a worker. Durable when this returns."""
        return self._task.mill.enqueue(self.call(*args, **kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As ``enqueue``, without blocking the event loop."""
        return await self._task.mill.aenqueue(self.call(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """The plain function, here and now."""
        result: C = self._task.function(*self._bound, *args, **kwargs)
        return result

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise _no_attribute(self, name)

    def __repr__(self) -> str:
        return f"<task {self._task.name}, configured>"


class Task(Generic[P, R]):
    """A function declared with ``@mill.task``: call it as ever, or ``enqueue`` the call.

    Attributes:
        name: what workers know it by.
        function: the function itself.
        options: its checked options.
        arguments: its parameters.
        is_async: whether it is an async function.
    """

    def __init__(
        self, mill: Tidemill, function: Callable[..., Any], name: str, options: Options
    ) -> None:
        functools.update_wrapper(self, function)  # first: it copies the function's own attributes
        self.mill = mill
        self.function = function
        self.name = name
        self.options = options
        self.arguments = Arguments(function)
        self.is_async = inspect.iscoroutinefunction(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The plain function, here and now."""
        result: R = self.function(*args, **kwargs)
        return result

    if not TYPE_CHECKING:  # a checker would take it for leave to use any name

        def __getattr__(self, name: str) -> Any:
            raise _no_attribute(self, name)

    @overload
    def __get__(self, instance: None, owner: type) -> Task[P, R]: ...
    @overload
    def __get__(
        self: Task[Concatenate[S, Q], R], instance: S, owner: type
    ) -> Configured[Q, R, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """A method that is a task carries its instance as the first argument."""
        return self if instance is None else Configured(self, self.options, (instance,))

    def using(self, **options: Any) -> Configured[P, R, R]:
        """The task with other options for this call: ``task.using(delay=5).enqueue(…)``."""
        return Configured(self, self.options.changed(f"task {self.name}", options, CALL_OPTIONS))

    @overload
    def call(self) -> Call[R]: ...  # as a step of a chain it gets its argument yet
    @overload
    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
    def call(self, *args: Any, **kwargs: Any) -> Call[R]:
        """The call, not made: for ``enqueue_many``, chains and groups."""
        return _call(self, args, kwargs, self.options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Make the call later, in a worker. Durable when this returns."""
        return self.mill.enqueue(self.call(*args, **kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As ``enqueue``, without blocking the event loop."""
        return await self.mill.aenqueue(self.call(*args, **kwargs))

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments from the wire as the annotations say: see :class:`Arguments`."""
        return self.arguments.bind(args, kwargs)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class AsyncTask(Task[P, R]):
    """A task that is an async function: a plain call gives its coroutine, a job its result."""

    # A plain call must stay what it was before the decorator, so here the subclass differs.
    def __call__(  # type: ignore[override]
        self, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        """The plain coroutine function, here and now."""
        result: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return result

    if TYPE_CHECKING:  # the same methods, as seen from outside

        # As above: what the subclass gives is awaited.
        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type) -> AsyncTask[P, R]: ...
        @overload
        def __get__(
            self: AsyncTask[Concatenate[S, Q], R], instance: S, owner: type
        ) -> Configured[Q, R, Coroutine[Any, Any, R]]: ...
        def __get__(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, instance: Any, owner: type
        ) -> Any: ...

        def using(  # type: ignore[override]
            self, **options: Any
        ) -> Configured[P, R, Coroutine[Any, Any, R]]: ...


class Declare(Protocol):
    """What ``mill.task(queue=…)`` returns: the decorator."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


def _no_attribute(target: object, name: str) -> AttributeError:
    """The error for a name that a task does not have; one of another queue's is translated."""
    here = attribute_elsewhere(name)
    text = (
        f"a tidemill task has no .{name}; write {here}"
        if here
        else f"{type(target).__name__!r} object has no attribute {name!r}"
    )
    return AttributeError(text, name=name, obj=target)


def _call(
    task: Task[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
) -> Call[R]:
    """A call whose arguments fit, as far as there are any.

    Arguments the function does not take are refused, an option among them with the way to give it.
    """
    lacks = None
    try:
        task.arguments.check(args, kwargs)
    except TypeError as error:
        lacks = error
        names = task.arguments.signature.parameters
        for name in kwargs:
            option = f"{name}=" if name in CALL_OPTIONS else option_elsewhere(name)
            if name not in names and option.endswith("="):
                how = f"{task.function.__name__}.using({option}…).enqueue(…)"
                raise TypeError(f"{error}; an option is given before: {how}") from None
        task.arguments.signature.bind_partial(*args, **kwargs)
    return Call(task.name, args, kwargs, options, lacks)


def make_task(
    mill: Tidemill, function: Callable[..., Any], name: str, options: Options
) -> Task[..., Any]:
    """A task of the right kind."""
    kind: Any = AsyncTask if inspect.iscoroutinefunction(function) else Task
    task: Task[..., Any] = kind(mill, function, name, options)
    return task


def no_such_task(mill: Tidemill, name: str) -> InvalidOption:
    """The error for a name that an app does not know."""
    near = difflib.get_close_matches(name, mill.tasks, 1)
    hint = f"did you mean {near[0]!r}?" if near else "declare it with @mill.task"
    return InvalidOption(
        f"{name!r} is no task of this app and matches none of allow_imports; {hint}"
        + ("" if near else ", or pass allow_imports=[…] to Tidemill")
    )


def task_name(function: Callable[..., Any]) -> str:
    """``module.qualname``; a function of ``__main__`` gets the name its module really has.

    Raises:
        InvalidOption: it is nothing that could be a task.
    """
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise InvalidOption(f"a task must be a function, not {function!r}")
    if isinstance(function, type):
        raise InvalidOption(f"a task must be a function, not the class {function.__qualname__}")
    if function.__name__ == "<lambda>":
        raise InvalidOption("a lambda has no name a worker could find; use def")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOption(
            f"{function.__qualname__} is a generator, whose result could not be kept; "
            "return a list, or enqueue a job for each part"
        )
    module = function.__module__
    if module == "__main__":
        module = _main_module() or module
    return check_name("task name", f"{module}.{function.__qualname__}".replace(".<locals>", ""))


def doubt(mill: Tidemill, name: str) -> None:
    """Say once that a worker may not know a task that is declared inside a function.

    It does when what it imports calls that function, an app factory perhaps: hence no error.
    """
    here = mill.sync or mill.before_close or running_job.get() is not None
    if not here and Feature.PROCESSES in mill.broker.features:
        mill.inner.discard(name)
        log.warning(
            "task %s is declared inside a function, so a worker knows it only if what it imports "
            "calls that function; declare it at the top of its module, or give it a name= if that "
            "is meant",
            name,
        )


def _main_module() -> str | None:
    """What a worker will import the running script as."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name: str = spec.name
        return name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return pathlib.Path(file).stem if file else None


def import_task(path: str) -> Callable[..., Any]:
    """The callable a dotted path names.

    A module that a module happens to import is no part of it: ``app.os.system`` is not in ``app``.

    Raises:
        ImportError, AttributeError: there is none.
    """
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:split])
        try:
            target: Any = importlib.import_module(prefix)
        except ModuleNotFoundError as error:
            if error.name and not f"{prefix}.".startswith(f"{error.name}."):
                raise
            continue
        for name in parts[split:]:
            target = getattr(target, name)
            if isinstance(target, types.ModuleType) or name.startswith("__"):
                raise ImportError(f"{path} leads out of {prefix}")
        if isinstance(target, Task):
            return target.function
        if not callable(target):
            raise ImportError(f"{path} is not callable")
        found: Callable[..., Any] = target
        return found
    raise ImportError(f"no module for {path}")
