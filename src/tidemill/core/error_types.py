"""Types of exceptions in options: classes, or dotted names of classes.

A name such as ``"requests.Timeout"`` is imported when it is first needed. So the program that
declares a task need not import the library. No job stores the name of a type.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from tidemill.core.errors import InvalidOption

ErrorType = type[BaseException] | str
ErrorTypes = ErrorType | tuple[ErrorType, ...]


def check_error_types(field: str, value: object) -> tuple[ErrorType, ...]:
    """Exception types as a tuple; the value may be a single type.

    Raises:
        InvalidOption: a value is neither a class of exceptions nor a dotted name.
    """
    types: tuple[Any, ...] = (value,)
    if isinstance(value, (tuple, list, set, frozenset)):
        types = tuple(value)
    for each in types:
        is_class = isinstance(each, type) and issubclass(each, BaseException)
        parts = each.split(".") if isinstance(each, str) else []
        if not is_class and (len(parts) < 2 or not all(part.isidentifier() for part in parts)):
            raise InvalidOption(
                f"{field} must be exception classes, or dotted names such as 'requests.Timeout', "
                f"not {each!r}"
            )
    return types


def is_one_of(error: BaseException, types: tuple[ErrorType, ...]) -> bool:
    """True when the error has one of the types, or a subclass of one.

    Raises:
        ImportError, AttributeError: a dotted name names nothing.
        TypeError: a dotted name names no class.
    """
    return any(
        isinstance(error, pkgutil.resolve_name(each) if isinstance(each, str) else each)
        for each in types
    )
