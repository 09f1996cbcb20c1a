"""The tubes of a port: their clients, pauses and counters.

A tube exists while a client of the port uses or watches it, or while the store has jobs in it.
A pause applies to the clients of this port, and ends when the port closes.
"""

from __future__ import annotations

import time

KEPT = 10_000
"""The number of tubes above which unused tubes and their counters are forgotten."""


class Tube:
    """One tube. Times are monotonic."""

    __slots__ = (
        *("deletes", "name", "paused_for", "paused_until", "pauses", "using", "waiting"),
        "watching",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.using = self.watching = self.waiting = 0
        self.deletes = self.pauses = 0
        self.paused_for = 0
        self.paused_until = 0.0

    @property
    def is_in_use(self) -> bool:
        """Whether a client uses or watches the tube."""
        return bool(self.using or self.watching)

    def pause_left(self) -> float:
        """Seconds until the end of the pause."""
        if not self.paused_for:
            return 0.0
        left = self.paused_until - time.monotonic()
        if left <= 0:
            self.paused_for = 0
        return max(0.0, left)


class Tubes:
    """All tubes of a port, by name."""

    def __init__(self) -> None:
        self._tubes: dict[str, Tube] = {"default": Tube("default")}  # in order of creation
        self._most = KEPT

    def __getitem__(self, name: str) -> Tube:
        tube = self._tubes.get(name)
        if tube is None:
            if len(self._tubes) > self._most:
                self._forget()
            tube = self._tubes[name] = Tube(name)
        return tube

    def _forget(self) -> None:
        """Forget unused tubes. The next call comes when there are twice as many tubes as now."""
        idle = [n for n, t in self._tubes.items() if not t.is_in_use and not t.pause_left()]
        for name in idle:
            if name != "default":
                del self._tubes[name]
        self._most = max(KEPT, 2 * len(self._tubes))

    def places(self) -> dict[str, int]:
        """The tubes by name, numbered in order of creation."""
        return {name: place for place, name in enumerate(self._tubes)}

    def is_in_use(self, name: str) -> bool:
        """Whether a tube exists even without jobs in the store."""
        tube = self._tubes.get(name)
        return name == "default" or (tube is not None and tube.is_in_use)

    def in_use(self) -> list[str]:
        """The tubes that exist even without jobs in the store."""
        return [name for name in self._tubes if self.is_in_use(name)]
