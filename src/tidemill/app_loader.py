"""Finding the app: ``module:name``, ``path/to/file.py:name``, or either without a name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import sysconfig
import traceback
import types
from typing import Any

from tidemill.app import Tidemill
from tidemill.core.errors import InvalidOption

__all__ = ["load_app"]


def load_app(spec: str) -> Tidemill:
    """Import the module and return the app in it.

    Raises:
        InvalidOption: there is no such module, it cannot be imported, it has no app, or several.
    """
    module_name, _, attribute = spec.partition(":")
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
        near = difflib.get_close_matches(attribute, apps, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(apps) or 'none'}"
        raise InvalidOption(f"{module_name} has no Tidemill named {attribute!r}; {hint}")
    if len({id(app) for app in apps.values()}) != 1:
        found = f"several: {', '.join(apps)}" if apps else "none"
        raise InvalidOption(
            f"{module_name} should have one Tidemill, it has {found}; write module:variable"
        )
    return next(iter(apps.values()))


def _import(name: str, folder: str, spec: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            hint = _nearest(error.name, folder) or "name the app as module:variable"
            raise InvalidOption(f"no module {error.name!r} from {folder}; {hint}") from error
        raise _not_importable(spec, error) from error
    except (Exception, SystemExit) as error:
        raise _not_importable(spec, error) from error


def _nearest(name: str, folder: str) -> str:
    """What a module that is not there may have been meant to be; empty when nothing is near."""
    if os.sep in name:
        return f"write {name.strip(os.sep).replace(os.sep, '.')!r}, or the path of a .py file"
    parent, _, last = name.rpartition(".")
    package = sys.modules.get(parent)
    if isinstance(getattr(package, last, None), Tidemill):
        return f"did you mean '{parent}:{last}'?"
    there = [module.name for module in pkgutil.iter_modules(getattr(package, "__path__", [folder]))]
    near = difflib.get_close_matches(last, there, 1)
    return f"did you mean {f'{parent}.{near[0]}'.lstrip('.')!r}?" if near else ""


def _not_importable(spec: str, error: BaseException) -> InvalidOption:
    """The error with the user's own lines that led to it: the last one is where it happened."""
    said = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):  # its place is in what it says
        said = [said[-1], *said[:-1]]
    frames = traceback.format_list(_users_frames(error))
    text = "".join([said[0], *frames, *said[1:]]).rstrip()
    return InvalidOption(f"the app {spec} cannot be imported: {text}")


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of the user's files, and the last one of a library when it happened there."""
    ours = os.path.dirname(__file__) + os.sep
    importing = os.path.dirname(importlib.__file__) + os.sep
    libraries = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", ours, importing))
    ]
    users = [frame for frame in frames if not frame.filename.startswith(libraries)]
    if frames and frames[-1] not in users:
        users.append(frames[-1])
    return users
