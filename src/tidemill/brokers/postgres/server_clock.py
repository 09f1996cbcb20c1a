"""Time is the server's. Only a test moves it, for the broker of its own process."""

from __future__ import annotations

__all__ = ["server_offset"]


def server_offset() -> float:
    """Seconds to add to the server's clock."""
    return 0.0
