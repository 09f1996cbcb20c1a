"""The offset to the server's clock. Only tests change the offset, for brokers in their process."""

from __future__ import annotations

__all__ = ["server_offset"]


def server_offset() -> float:
    """Return the seconds to add to the server's clock."""
    return 0.0
