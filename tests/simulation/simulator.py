"""A whole worker in virtual time: the real supervisor and pool, simulated processes.

A test says what its tasks do, enqueues jobs through an ordinary app on ``memory://``, lets time
pass, and looks at the jobs, the log, the processes and the kills. It names nothing inside the
worker, so the tests stay when the worker is built anew.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import greenlet
from fake_process import FOREVER, Behaviour, FakeApp, FakeProcess
from virtual_time import FAKE, Ended, VirtualTime, readable

from tidemill import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.core.errors import BrokerUnavailable, StoreFull
from tidemill.worker.child_protocol import Setup
from tidemill.worker.machine import Machine
from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import Supervisor

__all__ = ["FOREVER", "Behaviour", "Simulation", "Worker", "simulation"]

LIMIT = 7200.0
"""Virtual seconds within which what a test waits for must happen."""


class FakeWatchdog:
    """The supervisor's second thread, which looks while the first one waits."""

    def __init__(self, time: VirtualTime, look: Callable[[], float], signals: int) -> None:
        self._time, self._look, self._signals = time, look, signals
        self._until = float("inf")
        self._told = 0.0

    def start(self) -> None:
        self._time.looks.append(self._next)

    def _next(self) -> tuple[float, Callable[[], None]]:
        until = self._until
        if readable([self._signals]):  # the supervisor's own thread has a moment to take it first
            self._told = self._told or self._time.machine + 0.1
            until = min(until, self._told)
        return until, self._act

    def _act(self) -> None:
        self._told, self._until = 0.0, float("inf")
        self._until = min(self._look(), self._until)

    def expect(self, at: float) -> None:
        self._until = min(at, self._until)

    def close(self) -> None:
        if self._next in self._time.looks:
            self._time.looks.remove(self._next)


class FakeStore:
    """The broker that the worker opens: ``memory://``, which may stall, be away or be full."""

    def __init__(self, broker: Any, time: VirtualTime) -> None:
        self._broker, self._time = broker, time
        self.features = broker.features | {Feature.PROCESSES}
        self.stalled_until = self.away_until = self.full_until = 0.0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._broker, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            self._meet_misfortunes(name)
            return value(*args, **options)

        return call

    def exchange(self, step: Any) -> Any:
        self._meet_misfortunes("exchange")
        wants_room = step.verdicts or step.notes or (step.want and step.want.count)
        if wants_room and self._time.machine < self.full_until:
            raise StoreFull("the store has no room")
        return self._broker.exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        parked = self._broker.parked(owner_id, timeout, fds)
        try:
            until = next(parked)
            while True:
                ready = self._time.poll(until.fds, until.seconds)
                until = parked.send(ready)
        except StopIteration as end:
            return list(end.value)

    def _meet_misfortunes(self, name: str) -> None:
        self.calls.append(name)
        if self._time.over:
            raise Ended
        if self._time.machine < self.stalled_until:
            self._time.sleep(self.stalled_until - self._time.machine)
        if self._time.machine < self.away_until:
            raise BrokerUnavailable("the store does not answer")

    def close(self) -> None:
        pass


class FakeMachine(Machine):
    """Starts simulated processes, and sleeps in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation, self._time = simulation, simulation.time
        self.processes: list[FakeProcess] = []
        self.cannot_start_until = 0.0
        self.left: int | None = None

    def start(self, setup: Setup) -> Any:
        if self._time.machine < self.cannot_start_until:
            raise OSError("no more processes")
        number = len(self._simulation.processes)
        process = FakeProcess(number, setup, self._time, self._simulation.app)
        self._simulation.processes.append(process)
        self.processes.append(process)
        return process

    def buried(self, pid: int) -> None:
        pass

    def reap(self, reap_own: Callable[[int], bool]) -> None:
        for process in self.processes:
            reap_own(process.pid)

    def open_broker(self, url: str) -> Any:
        return self._simulation.store

    def poll(self, fds: Sequence[int], timeout: float) -> list[int]:
        return self._time.poll(fds, timeout)

    def watchdog(self, look: Callable[[], float], signals: int) -> Any:
        return FakeWatchdog(self._time, look, signals)

    def exit(self, code: int) -> None:
        self.left = code
        self._time.leave()


class Worker:
    """One worker of a simulation."""

    def __init__(self, simulation: Simulation, settings: Settings) -> None:
        self._simulation, self._time = simulation, simulation.time
        self._machine = FakeMachine(simulation)
        self._supervisor = Supervisor(settings, machine=self._machine)
        self.greenlet = greenlet.greenlet(self._run)

    def _run(self) -> None:
        with contextlib.suppress(Ended):
            self._machine.left = self._supervisor.run()

    # -- letting time pass ----------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Let the worker run for some seconds."""
        self._time.run(self._running, seconds)

    @property
    def _running(self) -> greenlet.greenlet | None:
        return None if self.ended else self.greenlet

    @property
    def ended(self) -> bool:
        """True when the supervisor has ended."""
        return self._machine.left is not None

    def until(self, wanted: Callable[[], object], what: str = "the wanted") -> float:
        """Let the worker run until something is true; the machine time at which it is."""
        self._time.run(self._running, LIMIT, wanted)
        assert wanted(), f"not within {LIMIT:g} s: {what}\n{self._simulation.story()}"
        return self._time.machine

    def until_ended(self) -> int:
        """Let the worker run until it has ended; its exit code."""
        self._time.run(self._running, LIMIT)
        assert self._machine.left is not None, f"it has not ended\n{self._simulation.story()}"
        return self._machine.left

    def until_serving(self) -> Worker:
        """Let the worker run until its processes have loaded the app and get jobs."""
        self.until(lambda: any("serves" in line for line in self._simulation.log()), "serving")
        self.run_for(1.0)
        return self

    # -- what happens to it ---------------------------------------------------------------------

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        self._supervisor.signals.send(signum)

    @property
    def processes(self) -> list[FakeProcess]:
        """The living processes, oldest first."""
        return [each for each in self._machine.processes if each.returncode is None]

    @property
    def started(self) -> int:
        """How many processes the worker has started so far."""
        return len(self._machine.processes)

    def cannot_start_processes(self, seconds: float) -> None:
        """The machine starts no process for some seconds."""
        self._machine.cannot_start_until = self._time.machine + seconds

    def close(self) -> None:
        """Unwind a supervisor that has not ended."""
        if self.greenlet:
            self.greenlet.throw(Ended)


class Simulation:
    """A store, an app, the time, and the workers."""

    def __init__(self, log: Callable[[], list[str]]) -> None:
        self.time = VirtualTime()
        self.mill = Tidemill("memory://")
        self.app = FakeApp(self.mill)
        self.store = FakeStore(self.mill.broker, self.time)
        self.processes: list[FakeProcess] = []
        self.workers: list[Worker] = []
        self.log = log
        self.time.fakes = lambda fds: [
            fd for fd in fds if fd >= FAKE and self.processes[fd - FAKE].readable
        ]

    def _readable(self, fds: Sequence[int]) -> list[int]:
        fakes = [fd for fd in fds if fd >= FAKE]
        return [fd for fd in fakes if self.processes[fd - FAKE].readable]

    def task(self, name: str, *, how: Behaviour | None = None, **options: Any) -> Any:
        """Declare a task; fields of ``Behaviour`` and options of the task may be mixed."""
        doing = {key: options.pop(key) for key in list(options) if key in _DOINGS}
        self.app.behaviours[name] = how or Behaviour(**doing)

        def function(*args: object) -> None:
            raise AssertionError("a simulated process calls no task")

        return self.mill.task(name=name, **options)(function)

    def worker(self, **settings: Any) -> Worker:
        """Start a worker and let it run until it serves."""
        self.workers.append(Worker(self, Settings(app="app:mill", **settings)))
        return self.workers[-1].until_serving()

    def cold_worker(self, **settings: Any) -> Worker:
        """A worker that has not begun to run."""
        self.workers.append(Worker(self, Settings(app="app:mill", **settings)))
        return self.workers[-1]

    @property
    def now(self) -> float:
        """The machine time."""
        return self.time.machine

    def starts(self, job: Any) -> list[float]:
        """The machine times at which runs of a job began."""
        return [at for job_id, at, _ in self.app.starts if job_id == job.id]

    def story(self) -> str:
        """The log, the jobs and the processes, for a failure."""
        jobs = [repr(record) for record in self.mill.find(limit=20).records]
        processes = [f"{each.pid}: {each.returncode}" for each in self.processes]
        return "\n".join(["--- log", *self.log(), "--- jobs", *jobs, "--- processes", *processes])

    def close(self) -> None:
        self.time.over = True
        for worker in self.workers:
            worker.close()
        self.mill.close()
        self.time.close()


_DOINGS = set(Behaviour.__struct_fields__)


@contextlib.contextmanager
def simulation(log: Callable[[], list[str]]) -> Iterator[Simulation]:
    """A simulation for the time of a block."""
    made = Simulation(log)
    try:
        yield made
    finally:
        made.close()
