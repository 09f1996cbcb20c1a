"""Check that arguments fit a function, and convert plain data to the types of its annotations."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["TEXT_OF_BODY", "Arguments", "summary"]

TEXT_MOST = 120
"""Characters of a text of arguments."""

TEXT_OF_BODY = 2000
"""Larger bodies, in bytes, get no text: to write them out would take too long."""

Convert = Callable[[Any], Any]


class Arguments:
    """The parameters of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._shapes = _shapes(function)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments that the function does not take, in the caller.

        Raises:
            TypeError: the error that the call itself would raise.
        """
        shape = self._shapes.get(len(args))
        if shape is None or not shape[0] <= kwargs.keys() <= shape[1]:
            self.signature.bind(*args, **kwargs)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The function's signature."""
        try:
            return inspect.signature(self._function)
        except (TypeError, ValueError):  # some builtins have none: the call itself will tell
            return _ANYTHING

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Convert arguments from the wire to the types of the annotations.

        Raises:
            TypeError: a value cannot be converted.
        """
        by_name, by_place, rest, others = self._converters
        if by_name or rest or others:
            places = _places(by_place, rest)
            args = [convert(arg) for convert, arg in zip(places, args, strict=False)]
            kwargs = {k: by_name.get(k, others or _same)(arg) for k, arg in kwargs.items()}
        return args, kwargs

    def result(self, value: Any) -> Any:
        """Convert a result from the store to the type of the return annotation.

        Raises:
            TypeError: the value cannot be converted.
        """
        return self._convert_result(value)

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function)
        except Exception:  # annotations may use names that only a type checker sees
            return {}

    @functools.cached_property
    def _convert_result(self) -> Convert:
        hint = self._hints.get("return")
        needed = hint is not None and _travels_as_plain_data(hint)
        return functools.partial(_convert, hint, "the result") if needed else _same

    @functools.cached_property
    def _converters(
        self,
    ) -> tuple[dict[str, Convert], list[Convert], Convert | None, Convert | None]:
        """The conversions by name, by position, of ``*args`` and of ``**kwargs``."""
        by_name: dict[str, Convert] = {}
        by_place: list[Convert] = []
        rest = others = None
        for name, parameter in self.signature.parameters.items():
            hint = self._hints.get(name)
            if hint is None and not by_place and name == "self":
                hint = _class_of(self._function)
            needed = hint is not None and _travels_as_plain_data(hint)
            convert = functools.partial(_convert, hint, f"argument {name}") if needed else None
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest = convert
            elif parameter.kind is parameter.VAR_KEYWORD:
                others = convert
            else:
                if convert is not None:
                    by_name[name] = convert
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    by_place.append(convert or _same)
        return by_name, by_place, rest, others


def summary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Arguments as a short text, for searches and displays."""
    try:
        if len(args) == 1 and not kwargs:  # the common case
            text = repr(args[0])
        else:
            parts = [repr(arg) for arg in args]
            text = ", ".join(parts + [f"{name}={kwargs[name]!r}" for name in kwargs])
    except Exception as error:  # repr runs the values' own code
        return f"<cannot be shown: {type(error).__name__}>"
    return text if len(text) <= TEXT_MOST else text[: TEXT_MOST - 1] + "…"


def _same(value: Any) -> Any:
    return value


def _places(by_place: list[Convert], rest: Convert | None) -> typing.Iterator[Convert]:
    yield from by_place
    while True:
        yield rest or _same


_ANYTHING = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def _shapes(function: Callable[..., Any]) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
    """The needed and the allowed keywords, by number of positional arguments.

    A number that is not in the table, or a function with ``*args`` or ``**kwargs``, is left to
    ``inspect``.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return {}
    places = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    shapes = {}
    for given in range(len(places) + 1):
        left = [*places[given:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
        needed = {p.name for p in left if p.default is p.empty}
        allowed = {p.name for p in left if p.kind is not p.POSITIONAL_ONLY}
        if needed <= allowed:
            shapes[given] = frozenset(needed), frozenset(allowed)
    return shapes


def _class_of(function: Callable[..., Any]) -> Any:
    """The class in which a method was defined."""
    target: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split(".")[:-1]:
        target = getattr(target, name, None)
    return target if isinstance(target, type) else None


def _travels_as_plain_data(hint: Any) -> bool:
    """True for a type whose values become plain data on the wire, and for types that hold such."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return (
            dataclasses.is_dataclass(hint)
            or issubclass(hint, (msgspec.Struct, enum.Enum, pathlib.PurePath))
            or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
        )
    return any(_travels_as_plain_data(part) for part in typing.get_args(hint))


def _convert(hint: Any, name: str, value: Any) -> Any:
    plain = isinstance(hint, type) and not isinstance(hint, types.GenericAlias)
    if plain and isinstance(value, hint):
        return value
    try:
        return msgspec.convert(value, hint, dec_hook=_from_text)
    except (msgspec.ValidationError, TypeError) as error:
        raise TypeError(f"{name}: {error}") from error


def _from_text(hint: type, value: Any) -> Any:
    if issubclass(hint, pathlib.PurePath):
        return hint(value)
    # msgspec expects this error from a hook that does not know the type.
    raise NotImplementedError(f"no way to make a {hint.__name__}")
