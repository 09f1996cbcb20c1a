"""The app that workers load in a Django project: ``tidemill worker tidemill.django.worker:mill``.

``manage.py tidemill worker`` starts such a worker. The import starts Django, and imports the module
``tasks`` of each installed app and of the project.

Attributes:
    mill: the project's app.
    backends: the apps of the setting ``TASKS`` by alias, such as ``backends.default``.
"""

from __future__ import annotations

import os
from typing import Any

import django
from django.apps import apps
from django.conf import settings

from tidemill.core.suggest import hint
from tidemill.django.framework import default, mills
from tidemill.django.project import load_tasks, project_mill
from tidemill.django.q.calls import declare
from tidemill.errors import InvalidOption


def _start() -> None:
    if not settings.configured and "DJANGO_SETTINGS_MODULE" not in os.environ:
        raise InvalidOption(
            "DJANGO_SETTINGS_MODULE is not set; set it, or run: manage.py tidemill worker"
        )
    if not apps.ready:
        django.setup()
    load_tasks()


class _Backends:
    """The apps of the setting ``TASKS``, as attributes."""

    def __getattr__(self, alias: str) -> Any:
        if alias.startswith("__"):
            raise AttributeError(alias)
        handler = default().backends
        known = list(handler.settings)
        if alias not in known:
            raise InvalidOption(f"TASKS has no alias {alias!r}; {hint(alias, known)}")
        mill = getattr(handler[alias], "mill", None)
        if mill is None:
            raise InvalidOption(f"TASKS[{alias!r}] is not a backend of tidemill")
        mill.runtime.find_in_apps()
        return mill


_start()
mill = project_mill()
mill.runtime.find_in_apps()
declare(mill)
mills()  # each backend finds the tasks of the framework for its app
backends = _Backends()
