"""The basis of all parts: jobs, errors, encodings, clocks, files, signals; without a store."""

from __future__ import annotations

__version__ = "0.1.0"
"""The version of this package, as in ``pyproject.toml``."""
