"""A simulated app: what its tasks do, how its processes load it, and what they have run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.worker.child_protocol import Hello
from tidemill.worker.execute import Run

if TYPE_CHECKING:
    from fake_process import FakeProcess

    from tidemill.app import Tidemill

FOREVER = math.inf


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What a task does.

    Attributes:
        seconds: how long the task runs.
        result: what it returns.
        raises: the error that it raises instead.
        ignores: True when nothing interrupts it, as a blocking system call in a thread.
        holds_lock: True when it keeps the interpreter lock while it runs.
        kills: the signal by which it then ends its whole process.
        breaks: True when it then makes its process give up.
        cleans_up: seconds that it runs on after an interruption.
        heeds_cancel: True when it ends by itself after a cancellation.
        keeps_process: True when, once it has ended, its process never exits by itself.
        grows: True when its process is over the memory limit afterwards.
        says: a line that it logs when it begins.
        awaits: the task of a job that it enqueues, and whose end it waits for.
        again: what later runs in other processes do; None for the same.
    """

    seconds: float = 0.1
    result: Any = None
    raises: BaseException | None = None
    ignores: bool = False
    holds_lock: bool = False
    kills: int = 0
    breaks: bool = False
    cleans_up: float = 0.0
    heeds_cancel: bool = False
    keeps_process: bool = False
    grows: bool = False
    says: str = ""
    awaits: Any = None
    again: Behaviour | None = None


class FakeApp:
    """The app that the processes load: its tasks behave as told.

    Attributes:
        boot: seconds from the start of a process until the app is loaded.
        error: why the app cannot be loaded.
        dies: the signal by which a process dies while it loads the app; 0 for none.
        stops: seconds for which functions run after the last job of a process.
        lacks: tasks that the code of the app does not declare.
    """

    def __init__(self, mill: Any) -> None:
        self.mill: Tidemill = mill
        self.behaviours: dict[str, Behaviour] = {}
        self.boot, self.stops = 0.2, 0.05
        self.error = ""
        self.dies = 0
        self.lacks: set[str] = set()
        self.runs: list[FakeRun] = []

    def hello(self) -> Hello:
        """The report of a process that has loaded the app."""
        if self.error:
            return Hello(error=self.error)
        mill = self.mill
        names = [name for name in mill.tasks if name not in self.lacks]
        declared = [(name, body) for name, body in mill.runtime.declarations.own() if name in names]
        known = names, list(mill.runtime.allow_imports), declared
        return Hello(mill.url, "", mill.runtime.code_schedules.bodies(), *known)


class FakeRun:
    """One run of a job, with what its task does."""

    def __init__(self, run: Run, how: Behaviour, process: FakeProcess, began: float) -> None:
        self.run, self.how, self.process, self.began = run, how, process, began
        self.over_at = math.inf  # the machine time at which the task has returned
        self.stuck = False

    @property
    def over(self) -> bool:
        return self.over_at < math.inf

    @property
    def job_id(self) -> str:
        return self.run.envelope.id

    @property
    def planned(self) -> float:
        """The time of the schedule that put the job."""
        return self.run.envelope.planned.time

    @property
    def succeeded(self) -> bool:
        """True when the task returned in its time."""
        timeout, good = self.run.lease.timeout, not (self.run.interrupted or self.how.raises)
        return self.over and good and (not timeout or self.over_at - self.began < timeout)

    @property
    def ended(self) -> float:
        """The machine time at which the task returned, or its thread or its process died."""
        thread_died = math.inf if self.how.ignores else self.process.struck_at
        return min(self.over_at, self.process.died_at, thread_died)
