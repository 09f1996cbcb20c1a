"""Converters turn values of a type into plain data, and plain data into values.

Data never name a type, so the annotation of the task decides which type comes back. Models of
pydantic, and arrays and numbers of numpy, have converters of their own. These converters use
libraries that the program has imported already. This module imports no library.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import sys
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidemill.errors import CodecError, InvalidOption

T = TypeVar("T")

KEPT = frozenset(
    {
        *(type(None), bool, int, float, str, bytes, list, dict, tuple, set, frozenset),
        *(decimal.Decimal, uuid.UUID, dt.datetime, dt.date, dt.time, dt.timedelta),
    }
)
"""Types that come back as themselves."""

_ARRAY_KINDS = "biufcmMSU"
"""Kinds of numpy types whose items are plain bytes: no Python objects, no records."""


_PLAIN_BASES: tuple[type, ...] = (
    *(str, int, float, bytes, bytearray, memoryview, list, tuple, set, frozenset, dict),
)


class Converter(NamedTuple):
    """``back`` gets the type and the data. ``to_json`` is tried when ``to`` gives no plain data."""

    to: Callable[[Any], Any]
    back: Callable[[Any, Any], Any]
    to_json: Callable[[Any], Any] | None = None


_registered: dict[type, Converter] = {}


def register_converter(
    kind: type[T], /, *, to: Callable[[T], Any], back: Callable[[Any], T]
) -> None:
    """Let values of a type, and of its subclasses, be arguments and results of tasks.

    Call this where the type is defined, so that both producers and workers call it. A second call
    for the type replaces the first converter.

    Args:
        kind: the type.
        to: makes plain data of a value.
        back: makes a value of the plain data. ``back`` is called where an annotation names the
            type.

    Raises:
        InvalidOption: the type needs no converter, or an argument is of a wrong type.
    """
    if not isinstance(kind, type):
        raise InvalidOption(f"register_converter takes a type, not {kind!r}")
    if not callable(to) or not callable(back):
        raise InvalidOption(f"to and back of the converter of {full_name(kind)} must be functions")
    if (
        kind in KEPT
        or dataclasses.is_dataclass(kind)
        or issubclass(kind, (enum.Enum, msgspec.Struct))
    ):
        raise InvalidOption(f"{full_name(kind)} needs no converter: tidemill knows the type")
    _registered[kind] = Converter(to, lambda _, data: back(data))


def converter_of(kind: type) -> Converter | None:
    """The converter of a type or of its nearest base class, or None."""
    if _registered:
        for base in kind.__mro__:
            if base in _registered:
                return _registered[base]
    if _is_model(kind):
        return _MODEL
    if "numpy" in sys.modules and kind is _numpy("ndarray"):
        return _ARRAY
    return _NUMBER if is_number(kind) else None


def plain_base(kind: type) -> type | None:
    """The plain type that a class extends, if the class makes its values of plain ones, or None.

    A ``defaultdict`` cannot be made of a dict: its function is no data.
    """
    if kind in KEPT or issubclass(kind, (collections.defaultdict, enum.Enum)):
        return None
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return None
    base = next((base for base in _PLAIN_BASES if issubclass(kind, base)), None)
    return bytes if base in (bytearray, memoryview) else base


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def remedy(value: Any) -> str:
    """The advice for a value that has no encoding: the value to pass instead."""
    kind = value.__class__  # of a proxy, the class that it stands for
    if hasattr(kind, "__tablename__") or (hasattr(kind, "_meta") and hasattr(kind, "pk")):
        return "pass its key, and load the object in the task"
    if kind.__name__ in ("__proxy__", "LazyString"):  # a text of Django or Flask-Babel
        return "pass str(value)"
    if hasattr(kind, "values_list"):
        return "pass plain values, such as list(value.values_list('pk', flat=True))"
    if kind.__module__.partition(".")[0] == "numpy":
        return "pass value.item() or value.tolist()"
    if hasattr(kind, "model_dump"):
        return "pass value.model_dump(mode='json')"
    return (
        "pass plain data, a dataclass or a msgspec.Struct instead, or give the type a converter "
        "by tidemill.register_converter"
    )


def _is_model(kind: type) -> bool:
    base = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    return base is not None and issubclass(kind, base)


def _model_json(model: Any) -> Any:
    """The fields as JSON, for types such as URLs. Secrets would be lost, so they are refused."""
    data = model.model_dump(mode="json", round_trip=True)
    if _model_back(type(model), data) != model:
        raise CodecError(
            f"cannot encode a {full_name(type(model))}: a field, such as a secret, does not come "
            "back from JSON as it was; pass the field's plain value"
        )
    return data


def _model_back(kind: Any, data: Any) -> Any:
    try:
        try:
            return kind.model_validate(data, by_alias=True, by_name=True)
        except TypeError:  # pydantic before 2.11 lacks an argument
            return kind.model_validate(data)
    except ValueError as error:
        errors: Any = getattr(error, "errors", list)()
        parts = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors]
        raise ValueError("; ".join(parts) or str(error)) from error


_MODEL = Converter(
    lambda model: model.model_dump(mode="python", round_trip=True), _model_back, _model_json
)


def _numpy(name: str) -> Any:
    return getattr(sys.modules.get("numpy"), name, None)


def is_number(kind: type) -> bool:
    """True for the types of numpy whose values equal a number or a bool of Python."""
    if "numpy" not in sys.modules or kind.__module__ != "numpy" or _numpy("generic") is None:
        return False
    numbers = (_numpy("bool_"), _numpy("integer"), _numpy("floating"))
    return issubclass(kind, numbers) and kind not in (_numpy("timedelta64"), _numpy("longdouble"))


def _array_data(array: Any) -> Any:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise CodecError(
            f"cannot encode a numpy.ndarray of dtype {array.dtype}: pass array.tolist()"
        )
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def _array_back(_: Any, data: Any) -> Any:
    dtype = _numpy("dtype")(data["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of dtype {dtype} is not accepted")
    shape = tuple(data["shape"])
    if not dtype.itemsize:
        return _numpy("zeros")(shape, dtype)
    return _numpy("frombuffer")(data["data"], dtype).reshape(shape).copy()


_ARRAY = Converter(_array_data, _array_back)
_NUMBER = Converter(lambda value: value.item(), lambda kind, data: kind(data))
