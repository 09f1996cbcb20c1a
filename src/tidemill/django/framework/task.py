"""Tasks of Django's framework with the options of tidemill, and the decorator for them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable
from typing import Any

from django.utils import timezone

from tidemill.client.options import CALL_OPTIONS, TASK_OPTIONS
from tidemill.core.suggest import hint
from tidemill.django.framework.parts import Framework

_NAMED_OTHERWISE = ("queue", "priority", "delay", "at", "txn")

OPTIONS = tuple(
    name for name in dict.fromkeys((*TASK_OPTIONS, *CALL_OPTIONS)) if name not in _NAMED_OTHERWISE
)
"""The options of tidemill that a task of the framework has, besides the framework's options."""


def moment(run_after: Any) -> Any:
    """The time ``run_after``: a ``timedelta`` counts from now."""
    return timezone.now() + run_after if isinstance(run_after, dt.timedelta) else run_after


class _Options:
    """Our methods of the framework's ``Task``. :func:`task_class` adds the fields."""

    __slots__ = ()

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: dt.datetime | dt.timedelta | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        """A copy of the task with other options of the framework and of tidemill.

        Raises:
            TypeError: there is no such option.
            InvalidTask: the backend refuses a value.
        """
        given = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": moment(run_after),
            "backend": backend,
        }
        for name in options:
            if name not in OPTIONS:
                near = hint(name, (*given, *OPTIONS))
                raise TypeError(f"using() has no option {name!r}; {near}")
        changes = {name: value for name, value in given.items() if value is not None}
        task: Any = self
        return dataclasses.replace(task, **changes, **options)


@functools.cache
def task_class(framework: Framework) -> Any:
    """The framework's ``Task`` with a field for each option of tidemill."""
    made = dataclasses.make_dataclass(
        "Task",
        [(name, Any, dataclasses.field(default=None)) for name in OPTIONS],
        bases=(_Options, framework.base.Task),
        frozen=True,
        kw_only=True,
        slots=True,
    )
    made.__module__ = "tidemill.django"
    return made


def decorator(framework: Framework) -> Any:
    """The framework's decorator ``@task``, which takes the options of tidemill on each version."""

    def task(
        function: Callable[..., Any] | None = None,
        *,
        priority: int = 0,
        queue_name: str = "default",
        backend: str = "default",
        takes_context: bool = False,
        **options: Any,
    ) -> Any:
        """Declare a task of Django's framework, with the options of tidemill.

        Raises:
            TypeError: there is no such option.
            InvalidTask: the backend refuses the function, or a value.
        """
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"@task has no option {name!r}; {hint(name, OPTIONS)}")
        kind = framework.backends[backend].task_class
        own = {"priority": priority, "queue_name": queue_name, "backend": backend}

        def declare(function: Callable[..., Any]) -> Any:
            plain = not issubclass(kind, _Options)  # another backend, such as the immediate backend
            more = {} if plain else options
            return kind(func=function, takes_context=takes_context, run_after=None, **own, **more)

        return declare(function) if function is not None else declare

    return task
