"""Measure the silence of remote owners, in one process that hears them.

No two clocks are compared, and nothing is written. At each check, the silence of an owner with a
new sign of life begins anew. The silence of any other owner grows by the time since the last check.
So only time counts in which this process could hear the owner. A server that was restarted begins
with no silence. So does a process that was stopped in between, or slept with its machine: its check
comes much later than planned.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from tidemill.core.locks import Lock

__all__ = ["SignOfLife", "Silence"]

K = TypeVar("K")
_SELDOM = 10.0  # most seconds between checks, so that a lease begins soon after its sign of life


class SignOfLife(NamedTuple):
    """An owner's lease, in seconds, and a value that changes with each of its exchanges."""

    lease: float
    word: object


class Silence(Generic[K]):
    """The silence of each remote owner, by the store's key of the owner."""

    def __init__(self) -> None:
        self._looking = Lock()
        self._looked = float("-inf")
        self._every = 0.0
        self._silent: dict[K, tuple[SignOfLife, float]] = {}

    def look(self, owners: Mapping[K, SignOfLife]) -> tuple[list[K], float]:
        """The owners that were silent for their lease, and the seconds until the next check."""
        with self._looking:
            now = time.monotonic()
            between = now - self._looked
            if between > 2 * self._every:  # no owner could be heard
                self._silent.clear()
            silent, self._silent = self._silent, {}
            for key, heard in owners.items():
                before, seconds = silent.get(key, (None, 0.0))
                self._silent[key] = heard, seconds + between if heard == before else 0.0
            self._every = min([_SELDOM, *(heard.lease / 4 for heard in owners.values())])
            self._looked = now
            over = [key for key, (heard, secs) in self._silent.items() if secs >= heard.lease]
            return over, self._every
