"""Tasks: functions that can be called now or enqueued, and the calls that stand for them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import msgspec

from tidemill.config import (
    Seconds,
    check_conflict,
    check_count,
    check_known,
    check_moment,
    check_name,
    check_priority,
    check_retries,
    check_seconds,
)
from tidemill.errors import InvalidOption
from tidemill.job import rank_of
from tidemill.retry import Retries

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.handle import Job

__all__ = ["CALL_OPTIONS", "TASK_OPTIONS", "Call", "Configured", "Options", "Task", "task_name"]

P = ParamSpec("P")
R = TypeVar("R")

Key = str | Callable[..., str]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options of a task or a call; units and meanings as in :class:`tidemill.job.Envelope`."""

    queue: str = "default"
    rank: int = rank_of(0)
    retries: Retries = Retries()
    timeout: float = 0.0
    expires: float = 0.0
    key: Key = ""
    on_conflict: str = "keep"
    result_ttl: float = -1.0
    tags: tuple[str, ...] = ()
    delay: float = 0.0
    at: float = 0.0
    id: str = ""
    headers: Mapping[str, str] = {}
    txn: Any = None

    def changed(self, what: str, given: Mapping[str, Any], known: tuple[str, ...]) -> Options:
        """A copy with the user's options checked and applied."""
        check_known(what, given, known)
        changes = {}
        for name, value in given.items():
            if value is not None or name == "timeout":
                field, check = _CHECKS[name]
                changes[field] = check(value)
        options = msgspec.structs.replace(self, **changes)
        if options.delay and options.at:
            raise InvalidOption("give either delay or at, not both")
        return options


def _check_key(value: object) -> Key:
    return value if callable(value) else check_name("key", value)


def _check_tags(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidOption(f"tags must be a list of names, not {value!r}")
    return tuple(check_name("tag", tag) for tag in value)


def _check_headers(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise InvalidOption(f"headers must map strings to strings, not {value!r}")
    return dict(value)


_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "queue": ("queue", lambda v: check_name("queue", v)),
    "priority": ("rank", check_priority),
    "retries": ("retries", check_retries),
    "timeout": ("timeout", lambda v: 0.0 if v is None else check_seconds("timeout", v)),
    "expires": ("expires", lambda v: check_seconds("expires", v)),
    "key": ("key", _check_key),
    "on_conflict": ("on_conflict", check_conflict),
    "result_ttl": ("result_ttl", lambda v: check_seconds("result_ttl", v)),
    "tags": ("tags", _check_tags),
    "delay": ("delay", lambda v: check_seconds("delay", v)),
    "at": ("at", lambda v: check_moment("at", v)),
    "id": ("id", lambda v: check_name("id", v)),
    "headers": ("headers", _check_headers),
    "txn": ("txn", lambda v: v),
}
TASK_OPTIONS = (
    *("queue", "priority", "retries", "timeout", "expires"),
    *("key", "on_conflict", "result_ttl", "tags"),
)
CALL_OPTIONS = (*TASK_OPTIONS, "delay", "at", "id", "headers", "txn")
_ = check_count, Seconds


class Call(Generic[R]):
    """A call that has not been made: a task, its arguments, its options. What batches consist of."""

    __slots__ = ("args", "kwargs", "options", "task")

    def __init__(
        self, task: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Options
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.options = options

    def using(self, **options: Any) -> Call[R]:
        """The same call with other options."""
        changed = self.options.changed(f"a call of {self.task}", options, CALL_OPTIONS)
        return Call(self.task, self.args, self.kwargs, changed)

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{self.task}({', '.join(parts)})"


class Configured(Generic[P, R]):
    """A task with options set for the calls made through it."""

    __slots__ = ("_bound", "_options", "_task")

    def __init__(self, task: Task[..., R], options: Options, bound: tuple[Any, ...] = ()) -> None:
        self._task = task
        self._options = options
        self._bound = bound

    def using(self, **options: Any) -> Configured[P, R]:
        """Further options."""
        changed = self._options.changed(f"task {self._task.name}", options, CALL_OPTIONS)
        return Configured(self._task, changed, self._bound)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call, not made."""
        given = (*self._bound, *args)
        self._task.check_arguments(given, kwargs)
        return Call(self._task.name, given, kwargs, self._options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Make the call later, in a worker. Durable when this returns."""
        return self._task.mill.enqueue(self.call(*args, **kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As ``enqueue``, without blocking the event loop."""
        return await self._task.mill.aenqueue(self.call(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The plain function, here and now."""
        result: R = self._task.function(*self._bound, *args, **kwargs)
        return result


class Task(Generic[P, R]):
    """A function declared with ``@mill.task``: call it as ever, or ``enqueue`` the call.

    Attributes:
        name: what workers know it by.
        function: the function itself.
        options: its checked options.
    """

    def __init__(self, mill: Tidemill, function: Callable[P, Any], name: str, options: Options) -> None:
        self.mill = mill
        self.function = function
        self.name = name
        self.options = options
        self.is_async = inspect.iscoroutinefunction(function)
        self._arity = _arity(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The plain function, here and now."""
        result: R = self.function(*args, **kwargs)
        return result

    @overload
    def __get__(self, instance: None, owner: type) -> Task[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Configured[..., R]: ...
    def __get__(self, instance: object | None, owner: type) -> Task[P, R] | Configured[..., R]:
        """A method that is a task carries its instance as the first argument."""
        return self if instance is None else Configured(self, self.options, (instance,))

    def using(self, **options: Any) -> Configured[P, R]:
        """The task with other options for this call: ``task.using(delay=5).enqueue(…)``."""
        return Configured(self, self.options.changed(f"task {self.name}", options, CALL_OPTIONS))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call, not made: for ``enqueue_many``, chains and groups."""
        self.check_arguments(args, kwargs)
        return Call(self.name, args, kwargs, self.options)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Make the call later, in a worker. Durable when this returns."""
        return self.mill.enqueue(self.call(*args, **kwargs))

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As ``enqueue``, without blocking the event loop."""
        return await self.mill.aenqueue(self.call(*args, **kwargs))

    def check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments the function does not take, where the mistake is made.

        Raises:
            TypeError: as the call itself would.
        """
        least, most = self._arity
        if kwargs or not least <= len(args) <= most:
            self.signature.bind(*args, **kwargs)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The function's signature."""
        return inspect.signature(self.function)

    @functools.cached_property
    def converters(self) -> dict[str | int, Callable[[Any], Any]]:
        """By parameter name and position, how plain data become what the annotation says."""
        return _converters(self.function, self.signature)

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as they came from the wire, made what the annotations say."""
        converters = self.converters
        if not converters:
            return args, kwargs
        args = [converters[i](arg) if i in converters else arg for i, arg in enumerate(args)]
        kwargs = {k: converters[k](arg) if k in converters else arg for k, arg in kwargs.items()}
        return args, kwargs

    def __repr__(self) -> str:
        return f"<task {self.name}>"


def task_name(function: Callable[..., Any]) -> str:
    """``module.qualname``; a function of ``__main__`` gets the name its module really has."""
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise InvalidOption(f"a task must be a function, not {function!r}")
    if function.__name__ == "<lambda>":
        raise InvalidOption("a lambda has no name a worker could find; use def")
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name.removesuffix(".__main__")
        elif file:
            module = pathlib.Path(file).stem
    return check_name("task name", f"{module}.{function.__qualname__}".replace(".<locals>", ""))


def import_task(path: str) -> Callable[..., Any]:
    """The callable a dotted path names.

    Raises:
        ImportError, AttributeError: there is none.
    """
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name and not ".".join(parts[:split]).startswith(error.name):
                raise
            continue
        for name in parts[split:]:
            target = getattr(target, name)
        if isinstance(target, Task):
            return target.function
        if not callable(target):
            raise ImportError(f"{path} is not callable")
        return target  # type: ignore[no-any-return]
    raise ImportError(f"no module for {path}")


def _arity(function: Callable[..., Any]) -> tuple[int, int]:
    """(fewest, most) positional arguments that need no closer look; (1, 0) for none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return 0, 1_000_000
    least = most = 0
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            most += 1
            least += p.default is p.empty
        elif p.kind is p.VAR_POSITIONAL:
            most = 1_000_000
        elif p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            return 1, 0
    return least, most


def _converters(
    function: Callable[..., Any], signature: inspect.Signature
) -> dict[str | int, Callable[[Any], Any]]:
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # annotations may name what only a type checker sees
        hints = {}
    found: dict[str | int, Callable[[Any], Any]] = {}
    for position, (name, parameter) in enumerate(signature.parameters.items()):
        hint = hints.get(name)
        if position == 0 and hint is None and name == "self":
            hint = _class_of(function)
        if hint is not None and _needs_conversion(hint):
            convert = functools.partial(_convert, hint, name)
            found[name] = convert
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                found[position] = convert
    return found


def _class_of(function: Callable[..., Any]) -> Any:
    """The class a method was defined in."""
    target: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split(".")[:-1]:
        target = getattr(target, name, None)
    return target if isinstance(target, type) else None


def _needs_conversion(hint: Any) -> bool:
    """True for a type, or a type inside it, that travels as plain data."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return (
            dataclasses.is_dataclass(hint)
            or issubclass(hint, (msgspec.Struct, enum.Enum, pathlib.PurePath))
            or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
        )
    return any(_needs_conversion(part) for part in typing.get_args(hint))


def _convert(hint: Any, name: str, value: Any) -> Any:
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    try:
        return msgspec.convert(value, hint, dec_hook=_from_text)
    except (msgspec.ValidationError, TypeError) as error:
        raise TypeError(f"argument {name}: {error}") from error


def _from_text(hint: type, value: Any) -> Any:
    if issubclass(hint, pathlib.PurePath):
        return hint(value)
    raise NotImplementedError(f"no way to make a {hint.__name__}")


def run_here(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function in this thread; an async one in an event loop of its own."""
    result = function(*args, **kwargs)
    if inspect.iscoroutine(result):
        return _run_coroutine(result)
    return result


def _run_coroutine(coroutine: Coroutine[Any, Any, R]) -> R:
    import asyncio
    import threading

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    box: list[Any] = []  # a loop runs in this thread already: use another

    def target() -> None:
        try:
            box.append((True, asyncio.run(coroutine)))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    fine, value = box[0]
    if fine:
        return value  # type: ignore[no-any-return]
    raise value
