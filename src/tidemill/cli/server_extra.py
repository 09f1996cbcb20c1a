"""The packages of the extra ``server``. An old or missing package is reported in one sentence."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from tidemill.core.errors import InvalidOption

OLDEST = {"starlette": (0, 40), "uvicorn": (0, 30)}
"""The oldest versions that the server runs with, as in ``pyproject.toml``."""


def load_server() -> tuple[Any, Any]:
    """Import the server: its function ``serve``, and the class of its settings.

    Raises:
        InvalidOption: a package is missing or too old.
    """
    try:
        _check_versions()
        from tidemill.server.run import serve
        from tidemill.server.settings import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tidemill"):
            raise
        raise InvalidOption(
            f"the server needs {error.name}; install it with: pip install 'tidemill[server]'"
        ) from None
    return serve, Settings


def _check_versions() -> None:
    for name, oldest in OLDEST.items():
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the import reports the missing package
        if tuple(map(int, re.findall(r"\d+", text)[:2])) < oldest:
            raise InvalidOption(
                f"the server needs {name} {oldest[0]}.{oldest[1]} or later, and {text} is "
                "installed; install a later version, or run the server in an environment of its own"
            )
