"""The public names are sorted and documented, and each name that a module exports exists."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offences import expect_none

import tidemill
from tidemill import errors
from tidemill.schedules.declare import Schedules

MODULES = [
    module.name
    for module in pkgutil.walk_packages(tidemill.__path__, "tidemill.")
    if not module.name.endswith("__main__")
]
ROOT = "src/tidemill/__init__.py"
IN_DJANGO = [name for name in MODULES if name.startswith("tidemill.django")]

SITE = """
import sys
from collections.abc import Iterator

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
"""


def test_the_public_names_are_sorted_complete_and_documented() -> None:
    expect_none([*badly_listed(), *badly_documented(), *badly_placed_errors()])


def badly_listed() -> Iterator[str]:
    """What is wrong with the list of public names; the idea is encode/httpx's."""
    names = tidemill.__all__
    for name, wanted in zip(names, sorted(names, key=lambda n: (n.islower(), n)), strict=True):
        if name != wanted:
            yield f"{ROOT}:1 __all__ has {name} where {wanted} belongs."
            break
    seen = {
        name
        for name in dir(tidemill)
        if not name.startswith("_") and not inspect.ismodule(getattr(tidemill, name))
    } - {"Any", "TYPE_CHECKING"}
    for name in sorted(seen ^ {*names}):
        wrong = "does not name" if name in seen else "names the unknown"
        yield f"{ROOT}:1 __all__ {wrong} {name}."


def badly_documented() -> Iterator[str]:
    for name in tidemill.__all__:
        value = getattr(tidemill, name, None)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        if not value.__module__.startswith("tidemill."):
            yield f"{name} is of {value.__module__}. A public name is our own."
            continue
        if not inspect.getdoc(value):
            yield f"{place(value)} {name} has no docstring."
        for part, member in vars(value).items() if inspect.isclass(value) else ():
            function = member.fget if isinstance(member, property) else member
            if part.startswith("_") or not inspect.isfunction(function):
                continue
            if not inspect.getdoc(member):
                yield f"{place(function)} {name}.{part} has no docstring."


def badly_placed_errors() -> Iterator[str]:
    for name in errors.__all__:
        error = getattr(errors, name)
        if f" {name}" not in (errors.__doc__ or ""):
            yield f"{place(error)} the tree in the docstring does not draw {name}."
        if not issubclass(error, errors.TidemillError):
            yield f"{place(error)} {name} is no TidemillError."


def place(value: Any) -> str:
    file = inspect.getsourcefile(value) or ""
    return f"src/{file.rpartition('/src/')[2]}:{inspect.getsourcelines(value)[1]}"


def missing(modules: list[str]) -> Iterator[str]:
    """The names that modules export twice, or that do not exist."""
    import importlib
    import importlib.util

    for module in modules:
        found = importlib.import_module(module)
        names = getattr(found, "__all__", [])
        place = f"src/{str(found.__file__).rpartition('/src/')[2]}:1"
        for name in sorted(set(names)):
            if names.count(name) > 1:
                yield f"{place} __all__ names {name} twice."
            try:
                getattr(found, name)
            except AttributeError:
                yield f"{place} __all__ names {name}, which does not exist."
            except ImportError as error:
                if importlib.util.find_spec("django_tasks") or "django-tasks" not in str(error):
                    raise


def test_only_packages_and_modules_for_users_list_their_names() -> None:
    for_users = {"errors.py", "testing.py", "typing.py"}
    expect_none(
        f"{path}:1 __all__ stands in a module for which users have no import."
        for path in Path(tidemill.__file__).parent.rglob("*.py")
        if path.name not in {"__init__.py", *for_users} and "\n__all__ = " in path.read_text()
    )


def test_each_exported_name_exists() -> None:
    assert len(IN_DJANGO) > 10
    # Modules for Django need a site, so another process looks at them.
    code = f"{SITE}\n{inspect.getsource(missing)}\nprint(*missing(sys.argv[1:]), sep='\\n', end='')"
    ran = subprocess.run(
        [sys.executable, "-c", code, *IN_DJANGO], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    others = [name for name in MODULES if name not in IN_DJANGO]
    expect_none([*missing(others), *ran.stdout.splitlines()])


def test_whatever_may_wait_for_the_store_has_an_async_twin() -> None:
    expect_none(without_twin())


def without_twin() -> Iterator[str]:
    """The methods that have no async twin, which has an a in front of its name."""
    twins = {
        tidemill.Tidemill: ["enqueue", "enqueue_many", "get", "get_many"],
        tidemill.Task: ["enqueue"],
        tidemill.Job: ["refresh", "result", "cancel", "retry", "delete"],
        tidemill.JobGroup: ["refresh", "result", "cancel", "retry", "delete", "count"],
        tidemill.Queue: [*("put", "put_many", "get", "get_many", "size")],
        Schedules: ["add", "get", "pause", "resume", "remove", "run"],
        tidemill.Message: ["ack", "release", "touch", "bury"],
    }
    for owner, names in twins.items():
        for name in names:
            sync, twin = getattr(owner, name), getattr(owner, f"a{name}", None)
            if inspect.iscoroutinefunction(sync) or not inspect.iscoroutinefunction(twin):
                yield f"{place(owner)} {owner.__name__}.{name} has no async twin a{name}."
