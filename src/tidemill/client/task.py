"""Tasks: functions that can be called directly or enqueued."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import types
from collections.abc import Callable, Coroutine, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.client.arguments import Arguments
from tidemill.client.call import Call, PartialCall
from tidemill.client.context import running_job
from tidemill.client.job_handle import Job
from tidemill.client.options import CALL_OPTIONS, CallOptions, Options
from tidemill.core.config import check_name, main_module
from tidemill.core.suggest import our_option
from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
C = TypeVar("C")
log = logging.getLogger("tidemill")


class Configured(Generic[P, R, C]):
    """A task as it is called: with its options, and perhaps bound to an instance.

    ``R`` is the type of the job's result. ``C`` is the type that a plain call returns: a
    coroutine for an async task.
    """

    def __init__(
        self,
        runtime: Runtime,
        function: Callable[..., Any],
        name: str,
        options: Options,
        arguments: Arguments,
        bound: tuple[Any, ...] = (),
    ) -> None:
        self.runtime = runtime
        self.function = function
        self.name = name
        self.options = options
        self.arguments = arguments
        self.is_async = arguments.is_async
        self._bound = bound

    def using(self, **options: Unpack[CallOptions]) -> Configured[P, R, C]:
        """The task with other options for this call: ``task.using(delay=5).enqueue(…)``.

        Raises:
            InvalidOption: there is no such option, or a value cannot be used.
        """
        changed = self.options.changed(f"task {self.name}", options, CALL_OPTIONS)
        return self._configured(changed, self._bound)

    def _configured(self, options: Options, bound: tuple[Any, ...]) -> Configured[Any, R, Any]:
        return Configured(self.runtime, self.function, self.name, options, self.arguments, bound)

    @overload
    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]: ...
    @overload
    def call(
        self: Configured[Concatenate[S, Q], R, C], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> PartialCall[R]: ...  # a step of a chain, or a hook, gets its first argument later
    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """The call as a value, for ``enqueue_many``, chains and groups.

        Raises:
            TypeError: the task does not take these arguments.
        """
        args, missing = (*self._bound, *args), None
        try:
            self.arguments.check(args, kwargs)
        except TypeError as error:
            missing = error
            self._refuse_options(kwargs, error)
            self.arguments.check_given(args, kwargs)
        return Call(self.name, args, kwargs, self.options, missing)

    def _refuse_options(self, kwargs: Mapping[str, Any], error: TypeError) -> None:
        """Refuse an option among the arguments with a text that says how to give options."""
        names = self.arguments.signature.parameters
        for name in kwargs:
            option = f"{name}=" if name in CALL_OPTIONS else our_option(name)
            if name not in names and option.endswith("="):
                how = f"{self.function.__name__}.using({option}…).enqueue(…)"
                raise TypeError(f"{error}; an option goes before the call: {how}") from None

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Have a worker make the call. The job is durable when this returns.

        Raises:
            TypeError: the task does not take these arguments.
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
            CodecError: an argument has no encoding.
            BrokerUnavailable: the store cannot be reached; the job may be stored.
        """
        return self.runtime.enqueue_call(self.call(*args, **kwargs))

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As ``enqueue``, without blocking the event loop."""
        job: Job[R] = await self.runtime.aenqueue(self.call(*args, **kwargs))
        return job

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> C:
        """Call the plain function, here and now."""
        result: C = self.function(*self._bound, *args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<task {self.name}, configured>"


class Task(Configured[P, R, R]):
    """A function declared with ``@mill.task``: call it directly, or ``enqueue`` the call.

    A call of a method that is a task has the instance as its first argument.

    Attributes:
        name: the name by which workers find the task.
        function: the function itself.
        options: its checked options.
        arguments: its parameters.
        is_async: whether the function is async.
    """

    def __init__(
        self, runtime: Runtime, function: Callable[..., Any], name: str, options: Options
    ) -> None:
        functools.update_wrapper(self, function)  # first, so that copied names are replaced below
        super().__init__(runtime, function, name, options, Arguments(function, name))

    @overload
    def __get__(self, instance: None, owner: type) -> Task[P, R]: ...
    @overload
    def __get__(
        self: Task[Concatenate[S, Q], R], instance: S, owner: type
    ) -> Configured[Q, R, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Bind a task that is a method to its instance, which becomes the first argument."""
        return self if instance is None else self._configured(self.options, (instance,))

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class AsyncTask(Task[P, R]):
    """An async function as a task: a plain call returns a coroutine, a job has the return value."""

    # A plain call still returns a coroutine, so the type differs from the base class.
    def __call__(  # type: ignore[override]
        self, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        """Call the plain coroutine function, here and now."""
        result: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return result

    if TYPE_CHECKING:  # the same methods with other types
        # As above: the subclass returns an awaitable.
        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: type) -> AsyncTask[P, R]: ...
        @overload
        def __get__(
            self: AsyncTask[Concatenate[S, Q], R], instance: S, owner: type
        ) -> Configured[Q, R, Coroutine[Any, Any, R]]: ...
        def __get__(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, instance: Any, owner: type
        ) -> Any: ...

        # As above: the calls of this Configured return awaitables.
        def using(  # type: ignore[override]
            self, **options: Unpack[CallOptions]
        ) -> Configured[P, R, Coroutine[Any, Any, R]]: ...


class Declare(Protocol):
    """The decorator that ``mill.task(queue=…)`` returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


def make_task(
    mill: Runtime, function: Callable[..., Any], name: str, options: Options
) -> Task[..., Any]:
    """A ``Task``, or an ``AsyncTask`` for an async function."""
    kind: Any = AsyncTask if inspect.iscoroutinefunction(function) else Task
    task: Task[..., Any] = kind(mill, function, name, options)
    return task


def call_by_name(
    mill: Runtime, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call[Any]:
    """A call of a declared task, or of a task whose options are read when the call is enqueued."""
    known = mill.tasks.get(name)
    if known is not None:
        return known.call(*args, **kwargs)
    check_name("task", name)
    return Call(name, args, kwargs, msgspec.structs.replace(mill.defaults, given={}))


def task_name(function: Callable[..., Any]) -> str:
    """``module.qualname``, with a name for ``__main__`` that a worker can import.

    Raises:
        InvalidOption: the function cannot be a task.
    """
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise InvalidOption(f"a task must be a function, not {function!r}")
    if isinstance(function, type):
        raise InvalidOption(f"a task must be a function, not the class {function.__qualname__}")
    if function.__name__ == "<lambda>":
        raise InvalidOption("a lambda has no name by which a worker could find it; use def")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOption(
            f"{function.__qualname__} is a generator, whose result cannot be stored; "
            "return a list, or enqueue one job for each item"
        )
    module = function.__module__
    if module == "__main__":
        module = main_module() or module
    return check_name("task name", f"{module}.{function.__qualname__}".replace(".<locals>", ""))


def refuse_second_declaration(
    before: Task[..., Any] | None, name: str, function: Callable[..., Any]
) -> None:
    """Refuse a second function for the name of a task. The same function may be declared again.

    Raises:
        InvalidOption: another function has the name.
    """
    if before is None:
        return
    first, second = before.function, function
    if (first.__module__, first.__qualname__) != (second.__module__, second.__qualname__):
        raise InvalidOption(
            f"task {name!r} is declared twice: by {first.__module__}.{first.__qualname__} "
            f"and by {task_name(second)}; give one of them another name="
        )


def warn_if_local(mill: Runtime, name: str) -> None:
    """Warn once that workers may not find a task that is declared inside a function.

    A worker finds the task if the import of the app runs the outer function, as with an app
    factory. So this is no error.
    """
    here = mill.sync or mill.before_close or running_job.get() is not None
    if not here and Feature.PROCESSES in mill.broker.features:
        mill.local_tasks.discard(name)
        log.warning(
            "task %s is declared inside a function, so a worker finds it only if importing the app "
            "runs that function; declare the task at the top of its module, or give it a name= to "
            "keep it there",
            name,
        )


class NoSuchTask(ImportError):
    """A dotted path names no callable; the modules on the path can be imported."""


def import_task(path: str) -> Callable[..., Any]:
    """Import the callable at a dotted path.

    Modules that a module imports do not belong to it: ``app.os.system`` is not in ``app``.

    Raises:
        NoSuchTask: there is no such callable.
        Exception: the module cannot be imported.
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
            if not hasattr(target, name):
                raise NoSuchTask(f"{prefix} has no {'.'.join(parts[split:])}")
            target = getattr(target, name)
            if isinstance(target, types.ModuleType) or name.startswith("__"):
                raise NoSuchTask(f"{path} leads out of {prefix}")
        if isinstance(target, Task):
            return target.function
        if not callable(target):
            raise NoSuchTask(f"{path} is not callable")
        found: Callable[..., Any] = target
        return found
    raise NoSuchTask(f"no module for {path}")
