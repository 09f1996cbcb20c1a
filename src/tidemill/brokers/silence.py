"""How long owners elsewhere have been silent, as one process that hears them has seen it.

No clock is compared with another's, and nothing is written: at each look, an owner whose word has
changed since the last begins anew, and to the silence of the others the time between the two looks
is added. So only time counts in which somebody here could have heard them. What begins to look, as
a server that was started again, begins with no silence at all; and so does one that finds it was
stopped in between, or slept with its machine, since it looks much later than it meant to.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from tidemill.locks import Lock

__all__ = ["Heard", "Silence"]

K = TypeVar("K")
_SELDOM = 10.0  # seconds between looks at most, so that nobody's lease begins long after its word


class Heard(NamedTuple):
    """An owner's lease, in seconds, and what is another with each of its words."""

    lease: float
    word: object


class Silence(Generic[K]):
    """The silence of each owner elsewhere, by what the store knows it by."""

    def __init__(self) -> None:
        self._looking = Lock()
        self._looked = float("-inf")
        self._every = 0.0
        self._silent: dict[K, tuple[Heard, float]] = {}

    def look(self, owners: Mapping[K, Heard]) -> tuple[list[K], float]:
        """Those that were silent for their lease, and seconds until the next look."""
        with self._looking:
            now = time.monotonic()
            between = now - self._looked
            if between > 2 * self._every:  # nobody could be heard
                self._silent.clear()
            silent, self._silent = self._silent, {}
            for key, heard in owners.items():
                before, seconds = silent.get(key, (None, 0.0))
                self._silent[key] = heard, seconds + between if heard == before else 0.0
            self._every = min([_SELDOM, *(heard.lease / 4 for heard in owners.values())])
            self._looked = now
            over = [key for key, (heard, secs) in self._silent.items() if secs >= heard.lease]
            return over, self._every
