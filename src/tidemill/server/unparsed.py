"""The bytes that connections hold before a request is parsed, and before anybody is authenticated.

Each connection holds little, but there may be thousands. So the connections of one address have a
bound together, and those of all addresses have one.
"""

from __future__ import annotations

__all__ = ["OF_ALL", "OF_ONE", "Unparsed"]

OF_ONE, OF_ALL = 16 * 1024 * 1024, 64 * 1024 * 1024
"""Bytes that the connections of one address may hold, and those of all addresses."""


class Unparsed:
    """How many bytes the connections of one server hold, by address."""

    def __init__(self) -> None:
        self.total = 0
        self._by_address: dict[str, int] = {}

    def change(self, address: str, by: int) -> bool:
        """Count bytes that came or went; False when the address holds too many now."""
        self.total += by
        size = self._by_address.get(address, 0) + by
        if size:
            self._by_address[address] = size
        else:
            self._by_address.pop(address, None)
        return by <= 0 or (size <= OF_ONE and self.total <= OF_ALL)
