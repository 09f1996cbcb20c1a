"""The arguments of calls: fit the function, arrive as they are, become the annotated types.

Most calls have plain arguments, which the codec keeps (law 18). A dataclass, an enum, a struct or a
value with a converter travels as plain data. So before the put, such an argument is restored as a
worker will restore it. A part that would arrive as another type is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import pathlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tidemill.core.codec import pack, unpack
from tidemill.core.converters import KEPT, Converter, converter_of, full_name, is_number, plain_base
from tidemill.core.envelope import Ref
from tidemill.errors import CodecError

TEXT_MOST = 120  # the most characters of the text that shows a job's arguments

TEXT_OF_BODY = 2000
"""The most bytes of a body whose arguments get a text. Larger bodies would take too long."""

Convert = Callable[[Any], Any]


class Argument(NamedTuple):
    """An argument of a call, with the annotation and the conversion of its parameter."""

    name: str
    value: Any
    convert: Convert
    annotation: Any  # None without an annotation


class Arguments:
    """The parameters of one task's function."""

    def __init__(self, function: Callable[..., Any], task: str) -> None:
        self._function = function
        self._task = task
        self.is_async = inspect.iscoroutinefunction(function)
        self.signature = _signature(function)
        self._shapes = _shapes(self.signature)
        self.unresolved = ""
        """Why the annotations cannot be read; empty if they can."""

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments that the function does not take, before they are enqueued."""
        shape = self._shapes.get(len(args))
        if shape is None or not shape[0] <= kwargs.keys() <= shape[1]:
            self._bind(self.signature.bind, args, kwargs)

    def check_given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As ``check``, but missing arguments are allowed."""
        self._bind(self.signature.bind_partial, args, kwargs)

    def _bind(
        self, bind: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        try:
            bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{error}; task {self._task} takes {self.shown}") from None

    @property
    def shown(self) -> str:
        """The parameters as text, without annotations: ``(path, width=640)``."""
        empty = inspect.Parameter.empty
        parameters = [p.replace(annotation=empty) for p in self.signature.parameters.values()]
        return str(inspect.Signature(parameters))

    def each(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
        """The arguments of a checked call, each with its parameter."""
        by_name, by_place, rest, others = self._converters
        kinds: dict[Any, list[str]] = {}
        for name, parameter in self.signature.parameters.items():
            kinds.setdefault(parameter.kind, []).append(name)
        kind = inspect.Parameter
        places = kinds.get(kind.POSITIONAL_ONLY, []) + kinds.get(kind.POSITIONAL_OR_KEYWORD, [])
        (star,) = kinds.get(kind.VAR_POSITIONAL, [""])
        (double_star,) = kinds.get(kind.VAR_KEYWORD, [""])
        hints = self._hints
        for index, value in enumerate(args):
            if index < len(places):
                name = places[index]
                yield Argument(name, value, by_place[index], hints.get(name))
            else:
                name = f"{star}[{index - len(places)}]"
                yield Argument(name, value, rest or _same, hints.get(star))
        for name, value in kwargs.items():
            known = name in self.signature.parameters and name != double_star
            hint = hints.get(name if known else double_star)
            yield Argument(name, value, by_name.get(name, others or _same), hint)

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Convert arguments from the wire to the types of the annotations."""
        by_name, by_place, rest, others = self._converters
        if by_name or rest or others:
            places = itertools.chain(by_place, itertools.repeat(rest or _same))
            args = [convert(arg) for convert, arg in zip(places, args, strict=False)]
            kwargs = {k: by_name.get(k, others or _same)(arg) for k, arg in kwargs.items()}
        return args, kwargs

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function)
        except Exception as error:  # annotations may use names that only a type checker sees
            self.unresolved = f"{type(error).__name__}: {error}"
            return {}

    @functools.cached_property
    def result(self) -> Convert:
        """Converts a result from the store to the type of the return annotation."""
        return _conversion(self._hints.get("return"), "the result") or _same

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
            convert = _conversion(hint, f"argument {name}")
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


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature; the call itself checks
        return inspect.signature(lambda *args, **kwargs: None)


def _shapes(signature: inspect.Signature) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
    """The needed and the allowed keywords of a call, by its number of positional arguments."""
    parameters = signature.parameters.values()
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
    target: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split(".")[:-1]:
        target = getattr(target, name, None)
    return target if isinstance(target, type) else None


def _conversion(hint: Any, name: str) -> Convert | None:
    """The conversion that an annotation asks for, or None."""
    if hint is None:
        return None
    if _travels_as_plain_data(hint):
        return functools.partial(_convert, hint, name)
    kinds = [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    kind = typing.get_origin(kinds[0]) or kinds[0]
    base = plain_base(kind) if isinstance(kind, type) and len(kinds) == 1 else None
    return functools.partial(_extend, kind, base, name) if base is not None else None


def _extend(kind: type, base: type, name: str, value: Any) -> Any:
    """Make a value of a class that extends a plain type."""
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, base):
        raise TypeError(f"{name}: expected {base.__name__}, got {type(value).__name__}")
    try:
        return kind(value)
    except Exception as error:  # the class is a user's code
        raise TypeError(
            f"{name}: cannot make a {full_name(kind)} of a {base.__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _travels_as_plain_data(hint: Any) -> bool:
    """True for types whose values become plain data on the wire, and for types with such parts."""
    named = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    if named is not None:  # a NewType, or an alias
        return _travels_as_plain_data(named)
    if typing.is_typeddict(hint):
        try:
            return any(map(_travels_as_plain_data, typing.get_type_hints(hint).values()))
        except (NameError, RecursionError):
            return False
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return (
            dataclasses.is_dataclass(hint)
            or issubclass(hint, (msgspec.Struct, enum.Enum, pathlib.PurePath))
            or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
            or converter_of(hint) is not None
        )
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and _travels_as_plain_data(origin):
        return True
    return any(_travels_as_plain_data(part) for part in typing.get_args(hint))


def _convert(hint: Any, name: str, value: Any) -> Any:
    plain = isinstance(hint, type) and not isinstance(hint, types.GenericAlias)
    if plain and not typing.is_typeddict(hint) and isinstance(value, hint):
        return value
    try:
        return msgspec.convert(value, hint, dec_hook=_from_data)
    except (msgspec.ValidationError, TypeError, NotImplementedError) as error:
        text = str(error)
        if text.startswith("Enum"):  # msgspec names the enum, or the annotation with the enum
            text = (
                f"the annotation {getattr(hint, '__qualname__', hint)} names an enum whose values "
                "are not all str or all int, so no data tell which member comes back; pass the "
                "member's .value, and annotate the type of the value"
            )
        raise TypeError(f"{name}: {text}") from error


def _from_data(hint: Any, value: Any) -> Any:
    kind = typing.get_origin(hint) or hint
    if isinstance(value, kind):
        return value
    if issubclass(kind, pathlib.PurePath):
        return kind(value)
    converter = converter_of(kind)
    base = plain_base(kind)
    if converter is None and base is not None and isinstance(value, base):
        converter = Converter(base, lambda kind, data: kind(data))
    if converter is None:
        # msgspec expects this error from a hook that does not know the type.
        raise NotImplementedError(f"no way to make a {kind.__name__}")
    try:
        return converter.back(kind, value)
    except Exception as error:  # the converter is a user's code
        plain = isinstance(error, ValueError)
        raise ValueError(str(error) if plain else f"{type(error).__name__}: {error}") from error


# -- the proof before the put ----------------------------------------------------------------------

_LEAVES: frozenset[type] = (KEPT - {list, tuple, set, frozenset, dict}) | {Ref}
_PLAIN_KINDS = KEPT | {Ref}
_METHOD = ". A method takes its object along: make the class a dataclass, or declare a function"
_PLAIN = {
    "_value_": "its .value",
    "__dataclass_fields__": "dataclasses.asdict(value)",
    "__struct_fields__": "msgspec.to_builtins(value)",
    "tolist": "value.tolist()",
    "model_dump": "value.model_dump()",
    "keys": "dict(value)",
    "__html__": "str.__str__(value)",
}
"""By an attribute of the value, the expression that makes plain data of it."""


def pack_checked_call(
    task: str, arguments: Arguments | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Encode the arguments of a call. ``arguments`` is None for a task of another app.

    Raises:
        CodecError: an argument has no encoding, or would arrive as another type.
        TypeError: an argument does not fit its annotation.
    """
    try:
        body = pack([list(args), dict(kwargs)])
        if _kinds([*args, *kwargs.values()]) <= _PLAIN_KINDS:
            return body
    except CodecError:
        body = b""  # the error below names the argument
    how = "annotate the parameter with the type, or "
    if arguments is None:
        how = "the task is another app's, so its annotations are not known here; "
        named = {**{str(place): value for place, value in enumerate(args, 1)}, **kwargs}
        given = [Argument(name, value, _same, None) for name, value in named.items()]
    else:
        given = [*arguments.each(args, kwargs)]
        if arguments.unresolved:
            how = f"the task's annotations cannot be read ({arguments.unresolved}); mend them, or "
    for name, value, convert, hint in given:
        try:
            data, kinds = pack(value), _kinds(value)
            if not (kinds <= _PLAIN_KINDS or (Ref in kinds and hint is not None)):
                _compare(name, value, convert(unpack(data)), hint, how)
        except CodecError as error:
            place, said = error.args if len(error.args) > 1 else _innermost(name, value, error)
            text = f"argument {place} of task {task}: {said}{_METHOD * (place == 'self')}"
            raise CodecError(text) from error.__cause__
        except TypeError as error:  # the error names the argument
            raise TypeError(f"task {task}: {error}") from error
    return body


def _innermost(place: str, value: Any, error: CodecError) -> tuple[str, str]:
    """The place and the error of the innermost part that has no encoding."""
    parts = [] if isinstance(error.__context__, RecursionError) else _parts(value)
    for step, part in parts:
        try:
            pack(part)
        except CodecError as inner:
            return _innermost(place + step, part, inner)
    return place, f"{error}; pass plain data" if parts else str(error)  # a set of dataclasses


def _kinds(value: Any) -> set[type]:
    parts = [part for _, part in _parts(value)]
    deep = (_kinds(part) for part in parts if type(part) not in _LEAVES)
    return {type(value), *map(type, parts)}.union(*deep)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """The parts of a value after their places; keys and members of sets have no place."""
    if isinstance(value, dict):
        return [("", key) for key in value] + [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{place}]", part) for place, part in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("", part) for part in value]
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else ()
    if dataclasses.is_dataclass(kind := type(value)) and converter_of(kind) is None:
        names = tuple(field.name for field in dataclasses.fields(kind))
    return [(f".{name}", getattr(value, name)) for name in names]


def _compare(place: str, value: Any, back: Any, hint: Any, how: str) -> None:
    """Raise a place and a text if a part comes back as another type, or with another value."""
    kind, back_kind = type(value), type(back)
    same = back_kind is kind or (back_kind in _LEAVES and isinstance(back, kind))  # as freezegun's
    if not same and not _may_change(value, back, hint):
        plain = next((f", such as {_PLAIN[name]}" for name in _PLAIN if hasattr(value, name)), "")
        how = "" if _names(hint, kind) else how
        text = f"a {full_name(kind)} would arrive as a {back_kind.__name__}; {how}pass plain data"
        raise CodecError(place, text + plain)
    parts, backs = _parts(value), [part for _, part in _parts(back)]
    if same and (plain_base(kind) or not parts) and pack(back) != pack(value) and back != value:
        raise CodecError(place, f"the {full_name(kind)} would come back changed; pass plain data")
    if isinstance(value, (set, frozenset)) or isinstance(back, (set, frozenset)):  # have no order
        by: dict[Any, Any] = {type(p): p for p in backs} | {(type(p), pack(p)): p for p in backs}
        backs = [by.get((type(p), pack(p)), by.get(type(p), backs and backs[0])) for _, p in parts]
    elif isinstance(value, dict) and not isinstance(back, dict):  # the annotation names a class
        backs = [*value, *(getattr(back, str(key), None) for key in value)]
    for (step, part), part_back in zip(parts, backs, strict=False):
        _compare(place + step, part, part_back, hint, how)


def _may_change(value: Any, back: Any, hint: Any) -> bool:
    """True for plain data, numbers of numpy, and a scalar whose parameter asks for its base."""
    kind = type(value)
    if kind in KEPT or isinstance(value, pathlib.PurePath) or hasattr(value, "_fields"):
        return True
    asked = hint not in (None, Any, object) and not _names(hint, kind)
    may = is_number(kind) or (asked and isinstance(value, tuple(_LEAVES)))
    return may and pack(back) == pack(value)


def _names(hint: Any, kind: type) -> bool:
    return hint is kind or any(_names(part, kind) for part in typing.get_args(hint))
