"""A call of the contract that only passes its arguments on: one line in the class of a broker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def forwarded_to(
    method: Callable[Concatenate[Any, P], R], answer: Callable[..., Any]
) -> Callable[Concatenate[Any, P], R]:
    """A call with the name and the signature of a method of the contract.

    ``answer`` gets the broker, and then the arguments by their names.
    """
    by_name = inspect.Parameter.KEYWORD_ONLY
    _, *parameters = inspect.signature(method).parameters.values()
    places = [parameter.name for parameter in parameters if parameter.kind is not by_name]

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(places):
            many = f"{len(places)} positional argument{'s' * (len(places) != 1)}"
            raise TypeError(f"{method.__name__}() takes {many}, and {len(args)} were given")
        answered: R = answer(self, **dict(zip(places, args, strict=False)), **kwargs)
        return answered

    return call
