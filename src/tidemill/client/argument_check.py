"""Check that the arguments of a call can travel, and that their types come back.

Most calls have plain arguments and skip this check. A dataclass, an enum, a struct or a value with
a converter travels as plain data. So the check restores the argument as a worker will, and refuses
a value that would arrive as another type. Each error names the task and the argument.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import pathlib
import typing
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.client.arguments import Argument, Arguments
from tidemill.core.codec import pack, unpack
from tidemill.core.converters import converter_of, full_name, is_number, plain_base
from tidemill.core.envelope import Ref
from tidemill.core.errors import CodecError

_LEAVES = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, decimal.Decimal, uuid.UUID),
        *(dt.datetime, dt.date, dt.time, dt.timedelta),
    }
)
_METHOD = (
    "A method that is a task takes its object along: make the class a dataclass, or declare a "
    "function of the module as the task"
)
_CONTAINERS = frozenset({list, tuple, set, frozenset})
_KEPT = _LEAVES | _CONTAINERS | {dict, Ref}
_SCALARS = (
    *(str, int, float, bytes, decimal.Decimal, uuid.UUID),
    *(dt.datetime, dt.date, dt.time, dt.timedelta),
)
_PLAIN_FORMS = (
    (enum.Enum, "its .value"),
    (msgspec.Struct, "msgspec.to_builtins(value)"),
)


class _Refused(Exception):
    """A part of an argument has no encoding, or would change its type; ``path`` names the part."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path = ""


def pack_checked_call(
    task: str, arguments: Arguments | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Encode the arguments of a call. ``arguments`` is None for a task of another app.

    Raises:
        CodecError: an argument has no encoding, or would arrive as another type.
        TypeError: an argument does not fit its annotation.
    """
    if all(map(_is_untyped, (*args, *kwargs.values()))):
        try:
            return pack([list(args), dict(kwargs)])
        except CodecError:
            pass  # the steps below find the argument, and their error names it
    given = _by_position(args, kwargs) if arguments is None else arguments.each(args, kwargs)
    for argument in given:
        try:
            _check(argument, arguments)
        except _Refused as refusal:
            text = f"argument {argument.name}{refusal.path} of task {task}: {refusal}"
            if argument.name == "self":
                text = f"{text}. {_METHOD}"
            raise CodecError(text) from refusal.__cause__
        except TypeError as error:  # the error names the argument
            raise TypeError(f"task {task}: {error}") from error
    return pack([list(args), dict(kwargs)])


def _by_position(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Argument]:
    named = [*((str(place), value) for place, value in enumerate(args, 1)), *kwargs.items()]
    for name, value in named:
        yield Argument(name, value, lambda data: data, None)


def _check(argument: Argument, arguments: Arguments | None) -> None:
    value, convert, hint = argument.value, argument.convert, argument.annotation
    try:
        typed, refers = _survey(value)
        data = pack(value)
    except RecursionError:
        raise _Refused("the value is nested too deeply, or contains itself") from None
    except CodecError as error:
        raise _Refused(str(error)) from error
    if not typed or (refers and hint is not None):  # a result may have any type
        return
    try:
        plain = unpack(data)
    except CodecError as error:  # raised for a set of dataclasses, for example
        raise _Refused(f"{error}; pass plain data") from error
    _compare(value, convert(plain), hint, _how(arguments))


def _how(arguments: Arguments | None) -> str:
    """The part of an error that says how to tell the worker the type of an argument."""
    if arguments is None:
        return "the task is another app's, so its annotations are not known here; "
    if arguments.unresolved:
        return f"the task's annotations cannot be read ({arguments.unresolved}); mend them, or "
    return "annotate the parameter with the type, or "


def _is_untyped(value: Any) -> bool:
    """True for a value that every encoding restores unchanged, with all its parts."""
    kind = type(value)
    if kind in _LEAVES or kind is Ref:
        return True
    try:
        if kind is dict:
            return _are_untyped(value) and _are_untyped(value.values())
        return kind in _CONTAINERS and _are_untyped(value)
    except RecursionError:
        return False


def _are_untyped(parts: Collection[Any]) -> bool:
    # issuperset is one loop in C: for thousands of numbers it takes less time than their encoding.
    return _LEAVES.issuperset(map(type, parts)) or all(map(_is_untyped, parts))


# -- can the value travel? -----------------------------------------------------------------------


def _survey(value: Any) -> tuple[bool, bool]:
    """Whether a part of the value has a type to restore, and whether a part is a job's result.

    Raises:
        _Refused: a part has no encoding.
    """
    kind = type(value)
    if kind in _LEAVES:
        return False, False
    if kind is Ref:
        return False, True
    typed, refers = _is_typed(value), False
    parts = _parts(value)
    if parts is None:
        _survey_leaf(value)
        return typed, False
    for label, part in parts:
        try:
            part_typed, part_refers = _survey(part)
        except _Refused as refusal:
            refusal.path = label + refusal.path
            raise
        typed, refers = typed or part_typed, refers or part_refers
    return typed, refers


def _survey_leaf(value: Any) -> None:
    try:
        pack(value)
    except CodecError as error:
        for name, part in _fields_of_model(value):
            try:
                _survey(part)
            except _Refused as refusal:
                refusal.path = f".{name}{refusal.path}"
                raise
        raise _Refused(str(error)) from error


def _fields_of_model(value: Any) -> Iterable[tuple[str, Any]]:
    converter = converter_of(type(value))
    if converter is None or converter.to_json is None:
        return ()
    fields = converter.to(value)
    return fields.items() if isinstance(fields, dict) else ()


def _is_typed(value: Any) -> bool:
    """True for a value that only an annotation can restore.

    Without an annotation, a path arrives as text and a named tuple as a tuple, as the guide says.
    """
    if type(value) in _KEPT or isinstance(value, (type, pathlib.PurePath)):
        return False
    return not (isinstance(value, tuple) and hasattr(value, "_fields"))


def _parts(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The parts of a value with their places; None for a value without parts."""
    if isinstance(value, (enum.Enum, type)) or converter_of(type(value)) is not None:
        return None
    if isinstance(value, msgspec.Struct):
        return ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return ((f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, dict):
        return ((f"[{key!r}]", part) for key in value for part in (key, value[key]))
    if isinstance(value, (list, tuple)):
        return ((f"[{index}]", part) for index, part in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return (("[…]", part) for part in value)
    return None


# -- does the type come back? --------------------------------------------------------------------


def _compare(value: Any, back: Any, hint: Any, how: str) -> None:
    """Compare a value with the value that a worker will restore by the annotation ``hint``.

    Raises:
        _Refused: a part of the value would arrive as another type.
    """
    if _is_typed(value) and not _is_same_type(value, back):
        if not _is_asked_for(value, back, hint):
            raise _Refused(_lost(value, back, "" if _names(hint, type(value)) else how))
        return
    converter = converter_of(type(value))
    if converter is not None and converter.to_json is not None and back != value:
        raise _Refused(
            f"a field of {full_name(type(value))} does not come back as it was: an excluded field, "
            "or a subclass in a field; pass the field's plain value"
        )
    for label, part, part_back in _pairs(value, back):
        try:
            _compare(part, part_back, hint, how)
        except _Refused as refusal:
            refusal.path = label + refusal.path
            raise
    if plain_base(type(value)) is not None and value == value and back != value:
        raise _Refused(f"the {full_name(type(value))} would not come back as it was; {how}")


def _is_same_type(value: Any, back: Any) -> bool:
    """True for values of one class, also if it passes for another, as a date of freezegun does."""
    return type(back) is type(value) or (type(back) in _LEAVES and isinstance(back, type(value)))


def _is_asked_for(value: Any, back: Any, hint: Any) -> bool:
    """True for a number of numpy, and for a ``StrEnum`` whose parameter asks for text."""
    if is_number(type(value)):
        return bool(value == back or value != value)
    asked = hint not in (None, Any, object) and not _names(hint, type(value))
    return asked and isinstance(value, _SCALARS) and bool(value == back)


def _names(hint: Any, kind: type) -> bool:
    """True when the annotation names the class."""
    return hint is kind or any(_names(part, kind) for part in typing.get_args(hint))


def _pairs(value: Any, back: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of a value, each with the part that a worker restores in its place."""
    parts = _parts(value)
    if parts is None:
        return
    if isinstance(value, (set, frozenset)) or isinstance(back, (set, frozenset)):
        kinds = {type(part): part for part in back or ()}
        other = next(iter(kinds.values()), None)
        for label, part in parts:
            yield label, part, kinds.get(type(part), other)
    elif isinstance(value, dict) and not isinstance(back, dict):  # the annotation names a class
        for key, part in value.items():
            yield f"[{key!r}]", part, getattr(back, str(key), None)
    else:
        restored = [part for _, part in _parts(back) or ()]
        for index, (label, part) in enumerate(parts):
            yield label, part, restored[index] if index < len(restored) else None


def _lost(value: Any, back: Any, how: str) -> str:
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        plain = "dataclasses.asdict(value)"
    elif isinstance(value, (list, tuple, set, frozenset, dict, bytearray, memoryview)):
        plain = f"{type(back).__name__}(value)"
    elif hasattr(value, "tolist"):
        plain = "value.tolist()"
    elif hasattr(value, "model_dump"):
        plain = "value.model_dump()"
    else:
        plain = next((form for base, form in _PLAIN_FORMS if isinstance(value, base)), "")
    return (
        f"a {full_name(kind)} would arrive as a {type(back).__name__}; {how}pass plain data"
        f"{plain and f', such as {plain}'}"
    )
