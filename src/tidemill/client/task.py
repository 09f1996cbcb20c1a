"""Tasks, which can be called directly or enqueued, and calls of tasks with their hooks.

A call to enqueue is a task by its name, with arguments, options and hooks. A hook is a call that is
made when a call, chain, group or flow has ended. A hook is a job of its own, stored together with
the jobs that it watches. It becomes ready in the step in which these jobs end. So a crash neither
loses nor doubles a hook. The end of a hook changes nothing for the jobs that it watches.
"""

from __future__ import annotations

import copy
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
    Self,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.client.arguments import Arguments
from tidemill.client.context import running_job
from tidemill.client.job_handle import Job
from tidemill.client.options import CALL_OPTIONS, CallOptions, Options
from tidemill.core.config import check_name, main_module
from tidemill.core.job import RunOn, State
from tidemill.core.suggest import our_method, our_option
from tidemill.errors import InvalidOption

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
C = TypeVar("C")
log = logging.getLogger("tidemill")


HOOKS = {RunOn.SUCCESS: "on_success", RunOn.FAILURE: "on_failure", RunOn.ANY: "on_complete"}


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


class PartialCall(Hooked, Generic[R]):
    """A call that may lack its first argument: a step of a chain, or a hook.

    Only type checkers tell the two classes apart: at run time each call is a :class:`Call`.

    Attributes:
        options: the checked options of the task and of ``using``.
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

    @property
    def id(self) -> str:
        """The id that ``using(id=…)`` has chosen; empty if the put makes an id."""
        return self.options.id

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

    ``task.call(…)`` and ``mill.call(…)`` make calls. ``options`` has their checked options.
    """

    __slots__ = ()


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

    if not TYPE_CHECKING:  # for type checkers, a class with this method has every name

        def __getattr__(self, name: str) -> Any:
            said = f"{type(self).__name__!r} object has no attribute {name!r}{our_method(name)}"
            raise AttributeError(said, name=name, obj=self)

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
    runtime: Runtime, function: Callable[..., Any], name: str, options: Options
) -> Task[..., Any]:
    kind: Any = AsyncTask if inspect.iscoroutinefunction(function) else Task
    task: Task[..., Any] = kind(runtime, function, name, options)
    return task


def call_by_name(
    runtime: Runtime, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call[Any]:
    """A call of a declared task, or of a task whose options are read when the call is enqueued."""
    known = runtime.tasks.get(name)
    if known is not None:
        return known.call(*args, **kwargs)
    check_name("task", name)
    return Call(name, args, kwargs, msgspec.structs.replace(runtime.defaults, given={}))


def task_name(function: Callable[..., Any]) -> str:
    """``module.qualname``, with a name for ``__main__`` that a worker can import."""
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
    """Refuse a second function for the name of a task. The same function may be declared again."""
    if before is None:
        return
    first, second = before.function, function
    if (first.__module__, first.__qualname__) != (second.__module__, second.__qualname__):
        raise InvalidOption(
            f"task {name!r} is declared twice: by {first.__module__}.{first.__qualname__} "
            f"and by {task_name(second)}; give one of them another name="
        )


def warn_if_local(runtime: Runtime, name: str) -> None:
    """Warn once that workers may not find a task that is declared inside a function.

    A worker finds the task if the import of the app runs the outer function, as with an app
    factory. So this is no error.
    """
    here = runtime.sync or runtime.before_close or running_job.get() is not None
    if not here and Feature.PROCESSES in runtime.broker.features:
        runtime.local_tasks.discard(name)
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
