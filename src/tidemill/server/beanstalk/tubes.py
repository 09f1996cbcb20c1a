"""Tubes as this port knows them: who uses them, pauses that end, and counters.

A tube is there while somebody here uses or watches it, or the store has jobs in it. Pauses hold for
the clients of this port, and are forgotten with it.
"""

from __future__ import annotations

import time

__all__ = ["Tube", "Tubes"]

KEPT = 10_000
"""Tubes that are kept, with their counters, before those that nobody uses are forgotten."""


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
        """True while a client has it in mind."""
        return bool(self.using or self.watching)

    def pause_left(self) -> float:
        """Seconds until it hands out again."""
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
        """Forget the tubes nobody uses; look again when there are twice as many as are left."""
        idle = [n for n, t in self._tubes.items() if not t.is_in_use and not t.pause_left()]
        for name in idle:
            if name != "default":
                del self._tubes[name]
        self._most = max(KEPT, 2 * len(self._tubes))

    def places(self) -> dict[str, int]:
        """The tubes by name, numbered in order of creation."""
        return {name: place for place, name in enumerate(self._tubes)}

    def is_in_use(self, name: str) -> bool:
        """True for a tube that is there whatever the store has in it."""
        tube = self._tubes.get(name)
        return name == "default" or (tube is not None and tube.is_in_use)

    def in_use(self) -> list[str]:
        """Names of the tubes that are there whatever the store has in them."""
        return [name for name in self._tubes if self.is_in_use(name)]
