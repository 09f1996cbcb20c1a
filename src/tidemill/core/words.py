"""Numbers of things as text."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """A number of things: ``1 ready job``, ``2,000 ready jobs``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
