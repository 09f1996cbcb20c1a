"""Finding the app: ``module:name``, ``path/to/file.py:name``, or either without a name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from tidemill.app import Tidemill
from tidemill.errors import InvalidOption

__all__ = ["load_app"]


def load_app(spec: str) -> Tidemill:
    """Import the module and return the app in it.

    Raises:
        InvalidOption: there is no such module, no app in it, or several.
    """
    module_name, _, attribute = spec.partition(":")
    if module_name.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(module_name))
        module_name = file[:-3]
    else:
        folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise InvalidOption(
                f"no module {error.name!r} from {folder}; name the app as module:variable"
            ) from error
        raise
    if attribute:
        target: Any = module
        for name in attribute.split("."):
            target = getattr(target, name, None)
        if isinstance(target, Tidemill):
            return target
        raise InvalidOption(f"{module_name} has no Tidemill named {attribute!r}")
    apps = {id(value): value for value in vars(module).values() if isinstance(value, Tidemill)}
    if len(apps) != 1:
        names = [name for name, value in vars(module).items() if isinstance(value, Tidemill)]
        found = f"several: {', '.join(names)}" if names else "none"
        raise InvalidOption(
            f"{module_name} should have one Tidemill, it has {found}; write module:variable"
        )
    return next(iter(apps.values()))
