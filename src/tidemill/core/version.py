"""The version of this package, as in ``pyproject.toml``."""

from __future__ import annotations

__version__ = "0.1.0"
