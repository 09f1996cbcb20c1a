"""The names of :mod:`tidemill.django` that belong to a tasks framework."""

from __future__ import annotations

from typing import Any

from tidemill.django.framework.backend import backend_class
from tidemill.django.framework.parts import default, load
from tidemill.django.framework.task import decorator, task_class


def public(name: str) -> Any:
    """A public name of :mod:`tidemill.django` that belongs to a framework.

    Raises:
        ImportError: the name belongs to a framework that is not installed.
    """
    if name == "BackportTaskBackend":
        return backend_class(_backport())
    framework = default()
    makers: dict[str, Any] = {"TaskBackend": backend_class, "Task": task_class, "task": decorator}
    return makers[name](framework)


def _backport() -> Any:
    try:
        return load("django_tasks")
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        raise ImportError(
            "BackportTaskBackend needs the package django-tasks: pip install django-tasks; "
            "or use TaskBackend, since Django 6 has a tasks framework of its own"
        ) from error
