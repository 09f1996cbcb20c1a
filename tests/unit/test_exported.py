"""Each exported name of the package exists, is our own, is sorted, and has a docstring."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import tidemill
from tidemill.schedules.declare import Schedules

MODULES = [
    module.name
    for module in pkgutil.walk_packages(tidemill.__path__, "tidemill.")
    if not module.name.endswith("__main__")
]
IN_DJANGO = [name for name in MODULES if name.startswith("tidemill.django")]

CHECK = """
import importlib, importlib.util, sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=[
        *("django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"),
        *("django.contrib.messages", "tidemill.django"),
    ],
    TIDEMILL={"URL": "memory://"},
    Q_CLUSTER={},
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()
for module in sys.argv[1:]:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [])
    assert len(names) == len(set(names)), module
    for name in names:
        if name == "BackportTaskBackend" and importlib.util.find_spec("django_tasks") is None:
            try:
                getattr(found, name)
            except ImportError as error:
                assert "needs the package django-tasks" in str(error)
                continue
        assert hasattr(found, name), f"{module}.__all__ names {name}"
"""


def test_the_public_names_are_sorted_and_complete() -> None:
    # the idea is encode/httpx's
    assert tidemill.__all__ == sorted(tidemill.__all__, key=lambda name: (name.islower(), name))
    seen = {
        name
        for name, value in vars(tidemill).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert seen == set(tidemill.__all__)


@pytest.mark.parametrize("name", tidemill.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(tidemill, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return
    assert value.__module__.startswith("tidemill.")
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for part, member in vars(value).items():
            if not part.startswith("_") and (
                inspect.isfunction(member) or isinstance(member, property)
            ):
                assert inspect.getdoc(member), f"{name}.{part} has no docstring"


@pytest.mark.parametrize("module", [name for name in MODULES if name not in IN_DJANGO])
def test_each_exported_name_exists(module: str) -> None:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [])
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(found, name), f"{module}.__all__ names {name}"


def test_each_exported_name_of_the_django_modules_exists() -> None:
    assert len(IN_DJANGO) > 10
    ran = subprocess.run(
        [sys.executable, "-c", CHECK, *IN_DJANGO], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_every_error_is_exported_and_drawn_in_the_tree() -> None:
    from tidemill.core import errors

    for name in errors.__all__:
        assert getattr(tidemill, name) is getattr(errors, name)
        assert f" {name}" in (errors.__doc__ or "")
        assert issubclass(getattr(errors, name), errors.TidemillError)


def test_async_twins() -> None:
    """Whatever may wait for the store has an async twin with an a in front."""
    twins = {
        tidemill.Tidemill: ["enqueue", "enqueue_many", "get", "get_many"],
        tidemill.Task: ["enqueue"],
        tidemill.Job: ["refresh", "result", "cancel", "retry", "delete"],
        tidemill.Queue: [
            *("put", "put_many", "get", "get_many", "size"),
            *("ack", "release", "touch", "bury"),
        ],
        Schedules: ["add", "get", "pause", "resume", "remove", "run"],
        tidemill.Message: ["ack", "release", "touch", "bury"],
    }
    for owner, names in twins.items():
        for name in names:
            sync, twin = getattr(owner, name), getattr(owner, f"a{name}")
            assert inspect.iscoroutinefunction(twin), f"{owner.__name__}.a{name}"
            assert not inspect.iscoroutinefunction(sync)
