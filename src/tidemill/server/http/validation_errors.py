"""Messages about invalid input: the field, its valid values, and the given value.

With the schema of the input, the message lists the valid choices and suggests names of fields.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from msgspec import inspect

from tidemill.core.suggest import did_you_mean, hint
from tidemill.server.http.schemas.types import NOT_BLANK

_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})\b|(?<=\d)\.0\b")
_PLACE = re.compile(r"(.*) - at `(key in )?\$\.?(.*)`$", re.DOTALL)
_STEP = re.compile(r"\[|[^.\[\]]+(?![^\[]*\])")  # into a list or a map, or a field
_NO_CHOICE = re.compile(r"(?:invalid enum value|expected text.*, got) (.*)$", re.DOTALL)
_BLANK = f"expected str matching regex {NOT_BLANK!r}"
_NOT_WHOLE = "expected float that's a multiple of 1.0"
_NO_FIELD = re.compile(r"object contains unknown field (.*)$", re.DOTALL)


def validation_message(error: Exception, shape: Any = None) -> str:
    """The message for invalid input, with its field; ``shape`` is its struct."""
    found = _PLACE.match(str(error))
    text = found[1] if found else str(error)
    text = text.replace("`", "")
    if text.startswith("Input data was truncated"):
        text = "JSON ends too early"
    elif not text.startswith("JSON"):
        text = text[:1].lower() + text[1:]
    if text == _BLANK:
        text = "must not be blank"
    elif text == _NOT_WHOLE:
        text = "expected whole number, got number"
    elif text.startswith("expected"):
        text = _WORD.sub(lambda m: _WORDS.get(m[0], ""), text).replace("| null", "or null")
    if shape is not None:
        text = _helped(text, _at(shape, found[3] if found and not found[2] else ""))
    if found and found[3]:
        whole = f"{'a key of ' if found[2] else ''}{found[3]}"
        return f"{whole.replace('[...]', '')}: {text}"
    return text


def _helped(text: str, kinds: list[inspect.Type]) -> str:
    """The message with the valid choices, or with names of fields."""
    for kind in kinds:
        if isinstance(kind, inspect.LiteralType) and (wrong := _NO_CHOICE.match(text)):
            *most, last = map(str, kind.values)
            near = did_you_mean(wrong[1].strip("'"), [*most, last])
            text = f"expected {', '.join(most)} or {last}, got {wrong[1][:80]}"
            return f"{text}; {near}" if near else text
        if isinstance(kind, inspect.StructType) and (unknown := _NO_FIELD.match(text)):
            name, known = unknown[1][:80], [field.encode_name for field in kind.fields]
            return f"unknown field {name}; {hint(name, known)}"
    return text


def _at(shape: Any, place: str) -> list[inspect.Type]:
    """The types that a place of a schema may have, such as ``jobs[3].on_conflict``."""
    kinds = [_type_of(shape)]
    for step in _STEP.findall(place):
        kinds = [inner for kind in kinds for inner in _inside(kind, step)]
    return kinds


@functools.cache
def _type_of(shape: Any) -> inspect.Type:
    return inspect.type_info(shape)


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    found: list[inspect.Type] = []
    if isinstance(kind, inspect.StructType):
        found = [field.type for field in kind.fields if field.encode_name == step]
    elif step == "[" and isinstance(kind, inspect.ListType):
        found = [kind.item_type]
    elif step == "[" and isinstance(kind, inspect.DictType):
        found = [kind.value_type]
    return [part for one in found for part in _plain(one)]


def _plain(kind: inspect.Type) -> list[inspect.Type]:
    """The types that a field may have."""
    if isinstance(kind, inspect.Metadata):
        return _plain(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [part for one in kind.types for part in _plain(one)]
    return [kind]
