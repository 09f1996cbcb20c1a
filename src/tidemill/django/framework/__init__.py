"""Django's tasks framework: tasks of the framework become jobs of tidemill.

The framework is ``django.tasks`` since Django 6.0, or the package ``django_tasks``. The two
packages have the same parts at different paths. A :class:`Framework` names the parts of one
package. Each framework has its own backend and its own task class.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured


class Framework(NamedTuple):
    name: str
    base: Any
    backends: Any
    signals: Any
    Backend: type[Any]
    InvalidTask: type[Exception]
    InvalidBackend: type[Exception]
    NotFound: type[Exception]
    normalize_json: Any


def default() -> Framework:
    """The framework of this Django, else ``django_tasks``, else raises ImproperlyConfigured."""
    if importlib.util.find_spec("django.tasks") is not None:
        return load("django.tasks")
    if importlib.util.find_spec("django_tasks") is not None:
        return load("django_tasks")
    raise ImproperlyConfigured(
        "this version of Django has no tasks framework; install the package django-tasks, or "
        "declare tasks with: from tidemill.django import mill"
    )


def mills() -> dict[str, Any]:
    """The apps of the aliases in ``TASKS`` whose backend is ours, by alias."""
    try:
        handler = default().backends
    except ImproperlyConfigured:  # no tasks framework is installed
        return {}
    found = {alias: getattr(handler[alias], "mill", None) for alias in handler.settings}
    return {alias: mill for alias, mill in found.items() if mill is not None}


@functools.cache
def load(name: str) -> Framework:
    """The framework in the package ``django.tasks`` or ``django_tasks``."""
    part = functools.partial(importlib.import_module, package=name)
    root, errors = importlib.import_module(name), part(".exceptions")
    old = name == "django_tasks"
    json = part(".utils") if old else importlib.import_module("django.utils.json")
    return Framework(
        name=name,
        base=part(".base"),
        backends=root.task_backends,
        signals=part(".signals"),
        Backend=part(".backends.base").BaseTaskBackend,
        InvalidTask=_error(errors, "InvalidTask"),
        InvalidBackend=_error(errors, "InvalidTaskBackend"),
        NotFound=_error(errors, "TaskResultDoesNotExist", "ResultDoesNotExist"),
        normalize_json=json.normalize_json,
    )


def _error(errors: Any, *names: str) -> Any:
    """The first exception that exists under one of the names, which differ by version."""
    for name in names:
        for spelled in (name, f"{name}Error"):
            if hasattr(errors, spelled):
                return getattr(errors, spelled)
    raise ImproperlyConfigured(f"{errors.__name__} has no {names[0]}; this version is not known")
