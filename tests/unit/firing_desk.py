"""An app, a memory broker and a clock, for tests of schedules in a supervisor."""

from __future__ import annotations

import pytest
from moved_clock import MovedClock

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner
from tidemill.worker.child_protocol import Hello
from tidemill.worker.scheduling import Scheduling

NOON = 1_800_000_000.0  # 2027-01-15 08:00 UTC


class Desk:
    """An app, a broker, a clock, and two supervisors' ways of firing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = MovedClock(monkeypatch, speed=0.0, wall=NOON, machine=NOON)
        self.mill = Tidemill("memory://")
        self.mill.task(name="tick")(tick)
        self.broker = self.mill.broker
        for owner in ("w1", "w2"):
            self.broker.attach(Owner(id=owner, name=owner))
        self.firing = Scheduling("app:mill")

    @property
    def now(self) -> float:
        """The time of all clocks."""
        return self._clock.wall()

    @now.setter
    def now(self, time: float) -> None:
        self._clock.advance(time - self.now)

    def due(self, owner: str = "w1") -> list[str]:
        return [s.name for s in self.broker.exchange(Step(owner, fires=500)).schedules]

    def fire(self, owner: str = "w1") -> int:
        """See to all that is due; how many steps that took."""
        steps = 0
        while due := self.broker.exchange(Step(owner, fires=500)).schedules:
            self.firing.fire(self.broker, due)
            steps += 1
        return steps

    def jobs(self) -> list[Envelope]:
        records = self.broker.find(Filter(), 10_000).records
        return sorted((r.envelope for r in records), key=lambda e: e.planned and e.planned.time)

    def times(self) -> list[float]:
        """The times that jobs were put for, from the beginning on."""
        return [job.planned.time - NOON for job in self.jobs() if job.planned]

    def declare(self, firing: Scheduling | None = None) -> None:
        """A worker starts with what the app declares now."""
        hello = Hello(schedules=self.mill.runtime.code_schedules.bodies())
        (firing or Scheduling("app:mill")).declare(self.broker, hello)

    def again(self) -> Tidemill:
        """The app as a new version of its code has it: nothing is declared yet."""
        runtime = self.mill.runtime
        runtime.code_schedules = type(runtime.code_schedules)(runtime)
        return self.mill


def tick() -> None: ...
