"""The clocks of the test process, which a test moves. No test replaces a clock in any other way."""

from __future__ import annotations

import time

import pytest

from tidemill.core.clock import clock


class MovedClock:
    """The clocks that all code of this process reads, and the clocks of the servers it calls.

    The clocks begin at the real time, or at the given one. By themselves they go at ``speed``: 1 is
    the speed of time, with 0 they stand still. Other processes see none of this.

    A worker in the test process measures its waits by these clocks, and really waits. So beside
    such a worker the clocks go on.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        speed: float = 1.0,
        *,
        wall: float | None = None,
        machine: float | None = None,
    ) -> None:
        self._wall = clock.wall() if wall is None else wall
        self._machine = clock.machine() if machine is None else machine
        self._database = time.time()
        self._ahead, self._speed, self._since = 0.0, speed, time.monotonic()
        for name in ("wall", "machine", "server_ahead", "database"):
            monkeypatch.setattr(clock, name, getattr(self, name))

    def wall(self) -> float:
        """The wall time."""
        return self._wall + self._gone() * self._speed

    def machine(self) -> float:
        """The machine time."""
        return self._machine + self._gone() * self._speed

    def server_ahead(self) -> float:
        """Seconds by which the clocks of servers are ahead of the real time."""
        return self._ahead - self._gone() * (1.0 - self._speed)

    def database(self) -> float:
        """The time of a database that has no clock."""
        # This reads one real clock. A sum of two clocks would go back when the system stops this
        # process between the two readings.
        return self._database + self._ahead + self._gone() * self._speed

    def _gone(self) -> float:
        return time.monotonic() - self._since

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self._wall += seconds
        self._machine += seconds
        self._ahead += seconds

    def set_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock of this machine forward, or back."""
        self._wall += seconds
