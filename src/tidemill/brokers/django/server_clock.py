"""The offset to the database's clock. Only a test changes the offset, for its own process."""

from __future__ import annotations

__all__ = ["server_offset"]


def server_offset() -> float:
    """Return the seconds to add to the database's clock."""
    return 0.0
