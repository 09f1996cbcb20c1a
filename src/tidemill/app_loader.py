"""Find the app: ``module:name`` or ``path/to/file.py:name``. The name may be left out."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import pkgutil
import re
import sys
import threading
import traceback
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tidemill.app import Tidemill
from tidemill.brokers.registry import DriverMissing
from tidemill.client.context import LIBRARIES, app_import, users_frames
from tidemill.core.suggest import did_you_mean, hint
from tidemill.errors import BrokerUnavailable, InvalidOption

LONG = 5.0
"""Seconds after which the log has the stack of an import."""

_MAKES_APP = re.compile(rb"^(\w+)[^=\n(#]*=.*\bTidemill\(", re.MULTILINE)
"""A line of a module that assigns an app to a variable."""

log = logging.getLogger("tidemill")


def load_app(spec: str) -> Tidemill:
    """Import the module and return the app in it.

    Raises:
        InvalidOption: the module does not exist, cannot be imported, or has no app or several apps.
        DriverMissing, BrokerUnavailable: the module opens a store, and the opening failed.
    """
    module_name, _, attribute = spec.partition(":")
    if module_name == "tidemill.django":
        raise InvalidOption(f"{spec} loads no tasks of the project; run: manage.py tidemill worker")
    folder = os.getcwd()
    if module_name.endswith(".py"):
        path = os.path.abspath(module_name)
        if not os.path.isfile(path):
            raise InvalidOption(f"there is no file {path}; name the app as module:variable")
        folder, file = os.path.split(path)
        module_name = file[:-3]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(module_name, folder, spec)
    apps = {name: value for name, value in vars(module).items() if isinstance(value, Tidemill)}
    if attribute:
        target: Any = module
        for name in attribute.split("."):
            target = getattr(target, name, None)
        if isinstance(target, Tidemill):
            return target
        raise _no_app(module_name, attribute, target, apps)
    if not apps:
        raise _no_app(module_name, "", None, apps)
    if len({id(app) for app in apps.values()}) != 1:
        raise InvalidOption(
            f"{module_name} has several Tidemills: {', '.join(apps)}; write one as "
            f"{module_name}:{min(apps)}"
        )
    return next(iter(apps.values()))


def _no_app(module: str, name: str, found: Any, apps: Collection[str]) -> InvalidOption:
    """The error when no app is found: the name is missing, or names a function or another value."""
    if isinstance(found, types.FunctionType):
        return InvalidOption(
            f"{module}.{name} is a function and no Tidemill; add a line such as "
            f"mill = {name}() to a module, and name that variable"
        )
    if found is not None:
        kind = type(found).__name__
        return InvalidOption(f"{module}.{name} is of type {kind}, not Tidemill; {hint(name, apps)}")
    if not apps:
        below = _app_below(module)
        how = f"did you mean {below!r}?" if below else "name the module that makes the app"
        return InvalidOption(f"{module} has no Tidemill; {how}")
    return InvalidOption(f"{module} has no Tidemill named {name!r}; {hint(name, apps)}")


def _app_below(package: str) -> str:
    """A module of a package whose text makes an app, with the app's variable; may be empty.

    The modules are not imported.
    """
    for folder in getattr(sys.modules.get(package), "__path__", ()):
        for path in sorted(Path(folder).glob("*.py")):
            with contextlib.suppress(OSError):
                if made := _MAKES_APP.search(path.read_bytes()):
                    return f"{package}.{path.stem}:{made[1].decode()}"
    return ""


def _import(name: str, folder: str, spec: str) -> types.ModuleType:
    try:
        with app_import(), _watched_import(spec):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            how = _nearest(error.name, folder) or "name the app as module:variable"
            raise InvalidOption(f"no module {error.name!r} from {folder}; {how}") from error
        raise _not_importable(spec, error) from error
    except (DriverMissing, BrokerUnavailable):
        raise
    except (Exception, SystemExit) as error:
        raise _not_importable(spec, error) from error


@contextlib.contextmanager
def _watched_import(app: str) -> Iterator[None]:
    """Surround the import of an app in this thread."""
    timer = threading.Timer(LONG, _tell, (app, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(app: str, thread: int) -> None:
    stack = traceback.format_list(users_frames(sys._current_frames().get(thread)))
    log.warning(
        "the import of the app %s has taken %g s so far, and stands here: %s",
        app,
        LONG,
        "\n" + "".join(stack).rstrip(),
    )


def _nearest(name: str, folder: str) -> str:
    """A hint about a missing module, such as a module with a similar name; may be empty."""
    if os.sep in name:
        return f"write {name.strip(os.sep).replace(os.sep, '.')!r}, or the path of a .py file"
    parent, _, last = name.rpartition(".")
    package = sys.modules.get(parent)
    if isinstance(getattr(package, last, None), Tidemill):
        return f"did you mean '{parent}:{last}'?"
    there = pkgutil.iter_modules(getattr(package, "__path__", [folder]))
    return did_you_mean(name, [f"{parent}.{module.name}".lstrip(".") for module in there])


def _not_importable(spec: str, error: BaseException) -> InvalidOption:
    """The error of a failed import, with the lines of the user's code from its traceback."""
    lines = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):  # put the message before the file and the line
        lines = [lines[-1], *lines[:-1]]
    frames = traceback.format_list(_users_frames(error))
    text = "".join([lines[0], *frames, *lines[1:]]).rstrip()
    return InvalidOption(f"the app {spec} cannot be imported: {text}")


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the user's files, and the last frame if a library raised the error."""
    ours = os.path.dirname(__file__) + os.sep
    importing = os.path.dirname(importlib.__file__) + os.sep
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", ours, importing))
    ]
    users = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    if frames and frames[-1] not in users:
        users.append(frames[-1])
    return users
