"""Count the silence of remote owners, in the process that receives and orders their calls.

No clocks of two machines are compared, and nothing is written. At each check, the silence of an
owner with a new sign of life is set to 0. The silence of any other owner grows by the time since
the last check. So only time counts in which this process could receive calls. After a restart of
the server, the silence of all owners is 0. All silence is also set to 0 when a check comes much
later than planned, because the process was stopped or its machine slept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from tidemill.core.clock import clock
from tidemill.core.locks import Lock, LongLock

K = TypeVar("K")
_SELDOM = 10.0  # the most seconds between checks, so that a sign of life counts soon
_LOCKS = 64  # so two owners seldom share a lock


class Turns:
    """Locks for owners: calls for one owner take turns, calls for different owners do not wait.

    A thread holds a lock over a commit. With one lock for all owners, each attach would wait for
    the commits of all attaches before it, instead of joining them in one group commit.
    """

    def __init__(self) -> None:
        self._locks = [LongLock() for _ in range(_LOCKS)]

    def of(self, owner_id: str) -> LongLock:
        return self._locks[hash(owner_id) % _LOCKS]


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
            now = clock.machine()
            between = now - self._looked
            if between > 2 * self._every:  # this process did not run, so it could hear no owner
                self._silent.clear()
            silent, self._silent = self._silent, {}
            for key, heard in owners.items():
                before, seconds = silent.get(key, (None, 0.0))
                self._silent[key] = heard, seconds + between if heard == before else 0.0
            self._every = min([_SELDOM, *(heard.lease / 4 for heard in owners.values())])
            self._looked = now
            over = [key for key, (heard, secs) in self._silent.items() if secs >= heard.lease]
            return over, self._every
