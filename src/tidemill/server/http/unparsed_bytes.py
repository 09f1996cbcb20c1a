"""Bounds of the bytes that connections keep before a request is parsed and authenticated.

Each connection keeps little, but there may be thousands. So one bound holds for all connections of
an address together, and another for all addresses.
"""

from __future__ import annotations

MAX_OF_ADDRESS, MAX_TOTAL = 16 * 1024 * 1024, 64 * 1024 * 1024
"""Bytes that the connections of one address may keep, and the connections of all addresses."""


class UnparsedBytes:
    """The bytes that the connections of one server keep, by address."""

    def __init__(self) -> None:
        self.total = 0
        self._by_address: dict[str, int] = {}

    def change(self, address: str, by: int) -> bool:
        """Count bytes that came or went; False when the address or the server has too many."""
        self.total += by
        size = self._by_address.get(address, 0) + by
        if size:
            self._by_address[address] = size
        else:
            self._by_address.pop(address, None)
        return by <= 0 or (size <= MAX_OF_ADDRESS and self.total <= MAX_TOTAL)
