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
    parameters = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answered: R = answer(self, **dict(zip(parameters, args, strict=False)), **kwargs)
        return answered

    return call
