"""Prove that the arguments of a call arrive as they are.

Most calls have plain arguments and skip this proof: the codec keeps them (law 18). A dataclass, an
enum, a struct or a value with a converter travels as plain data. So the proof restores the argument
as a worker will, and refuses a part that would arrive as another type.
"""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.client.arguments import Argument, Arguments
from tidemill.core.codec import pack, unpack
from tidemill.core.converters import KEPT, converter_of, full_name, is_number, plain_base
from tidemill.core.envelope import Ref
from tidemill.core.errors import CodecError

_LEAVES = (KEPT - {list, tuple, set, frozenset, dict}) | {Ref}
_PLAIN_KINDS = KEPT | {Ref}
_SCALARS: tuple[Any, ...] = tuple(_LEAVES)
_METHOD = ". A method takes its object along: make the class a dataclass, or declare a function"
_PLAIN = {
    "_value_": "its .value",
    "__dataclass_fields__": "dataclasses.asdict(value)",
    "__struct_fields__": "msgspec.to_builtins(value)",
    "tolist": "value.tolist()",
    "model_dump": "value.model_dump()",
    "keys": "dict(value)",
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
    body = b""
    try:
        body = pack([list(args), dict(kwargs)])
        if _kinds([*args, *kwargs.values()]) <= _PLAIN_KINDS:
            return body
    except CodecError:
        pass  # the error below names the argument
    how = "annotate the parameter with the type, or "
    if arguments is None:
        how = "the task is another app's, so its annotations are not known here; "
        named = {**{str(place): value for place, value in enumerate(args, 1)}, **kwargs}
        given = [Argument(name, value, lambda data: data, None) for name, value in named.items()]
    else:
        given = [*arguments.each(args, kwargs)]
        if arguments.unresolved:
            how = f"the task's annotations cannot be read ({arguments.unresolved}); mend them, or "
    for argument in given:
        try:
            _prove(argument, how)
        except CodecError as error:
            method = _METHOD if argument.name == "self" else ""
            text = f"argument {argument.name} of task {task}: {error}{method}"
            raise CodecError(text) from error.__cause__
        except TypeError as error:  # the error names the argument
            raise TypeError(f"task {task}: {error}") from error
    return body


def _prove(argument: Argument, how: str) -> None:
    data, kinds, hint = pack(argument.value), _kinds(argument.value), argument.annotation
    if kinds <= _PLAIN_KINDS or (Ref in kinds and hint is not None):  # a result may have any type
        return
    try:
        plain = unpack(data)
    except CodecError as error:  # a set of dataclasses, for example
        raise CodecError(f"{error}; pass plain data") from error
    _compare(argument.value, argument.convert(plain), hint, how)


def _kinds(value: Any) -> set[type]:
    """The types of a value and of all its parts."""
    parts = _parts(value)
    deep = (_kinds(part) for part in parts if type(part) not in _LEAVES)
    return {type(value), *map(type, parts)}.union(*deep)


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if dataclasses.is_dataclass(value) and converter_of(type(value)) is None:
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def _compare(value: Any, back: Any, hint: Any, how: str) -> None:
    """Refuse a value if a part comes back from the worker's annotation as another type or value."""
    kind, back_kind = type(value), type(back)
    same = back_kind is kind or (back_kind in _LEAVES and isinstance(back, kind))  # as freezegun's
    if not same and not _may_change(value, back, hint):
        plain = next((f", such as {_PLAIN[name]}" for name in _PLAIN if hasattr(value, name)), "")
        how = "" if _names(hint, kind) else how
        back_name = back_kind.__name__
        text = f"a {full_name(kind)} would arrive as a {back_name}; {how}pass plain data{plain}"
        raise CodecError(text)
    is_model = getattr(converter_of(kind), "to_json", None) is not None
    if same and (is_model or plain_base(kind)) and value == value and back != value:
        raise CodecError(f"the {full_name(kind)} would not come back as it was; pass plain data")
    if isinstance(value, (set, frozenset)) or isinstance(back, (set, frozenset)):  # have no order
        kinds = {type(part): part for part in _parts(back)}
        pairs = [(part, kinds.get(type(part), next(iter(kinds.values()), None))) for part in value]
    elif isinstance(value, dict) and not isinstance(back, dict):  # the annotation names a class
        pairs = [(part, getattr(back, str(key), None)) for key, part in value.items()]
    else:
        pairs = [*zip(_parts(value), _parts(back), strict=False)]
    for part, part_back in pairs:
        _compare(part, part_back, hint, how)


def _may_change(value: Any, back: Any, hint: Any) -> bool:
    """True for plain data, numbers of numpy, and a scalar whose parameter asks for its base."""
    kind = type(value)
    if kind in KEPT or isinstance(value, pathlib.PurePath) or hasattr(value, "_fields"):
        return True
    asked = hint not in (None, Any, object) and not _names(hint, kind)
    may = is_number(kind) or (asked and isinstance(value, _SCALARS))
    return may and bool(value == back or value != value)  # NaN


def _names(hint: Any, kind: type) -> bool:
    """True when the annotation names the class."""
    return hint is kind or any(_names(part, kind) for part in typing.get_args(hint))
