"""The clock of this broker: the server's time, plus an offset that tests set."""

from __future__ import annotations

__all__ = ["MICRO", "server_offset"]

MICRO = 1_000_000


def server_offset() -> float:
    """Seconds that every call adds to the server's time."""
    return 0.0
