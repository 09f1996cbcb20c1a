"""Whole workers in virtual time: the real supervisor and pool, simulated processes.

A test says what its tasks do, enqueues jobs through an ordinary app on ``memory://``, lets time
pass, and looks at the jobs, the log, the processes and the kills. A test names only what this
module offers, and nothing inside the worker. So the tests stay when the worker is built anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import greenlet
from fake_app import FOREVER, Behaviour, FakeApp, FakeRun
from fake_process import FIRST_FD, FakeProcess
from virtual_time import VirtualTime, readable

from tidemill import Job, Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Command, Outcome
from tidemill.core.scoreboard import read_scoreboard
from tidemill.errors import BrokerUnavailable, StoreFull
from tidemill.worker.child_protocol import Setup
from tidemill.worker.machine import Machine
from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import Supervisor

__all__ = ["FOREVER", "Behaviour", "Simulation", "Worker", "simulation"]

LIMIT = 2000.0
"""Virtual seconds within which what a test waits for must happen."""


class FakeLock:
    """The lock of the two threads of a supervisor. With ``chance`` the other one may come first."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._holder: greenlet.greenlet | None = None
        self._depth = 0

    def __enter__(self) -> None:
        here, chance = greenlet.getcurrent(), self._time.chance
        if chance and self._holder is not here and chance.random() < 0.1:
            self._time.sleep(0.01 * chance.random())
        while self._holder not in (None, here):
            self._time.sleep(FOREVER, lambda: [1] * (self._holder is None))
        self._holder, self._depth = here, self._depth + 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None


class FakeStore:
    """The store of all workers: ``memory://``, which may stall, be away, be full or refuse."""

    def __init__(self, broker: Any, time: VirtualTime) -> None:
        self.broker, self._time = broker, time
        self.steps = 0  # the number of exchanges so far
        self._stalled_until = self._away_until = self._full_until = self._more_until = 0.0
        self._room = 0
        self._late = 0.0
        self._poisonous: set[str] = set()
        self._jobs: dict[int, str] = {}  # token of a lease → id of its job

    # -- called by a test -----------------------------------------------------------------------

    def stall(self, seconds: float) -> None:
        """From now on and for some seconds, no call returns."""
        self._stalled_until = self._time.machine + seconds

    def be_away(self, seconds: float) -> None:
        """For some seconds, every call fails."""
        self._away_until = self._time.machine + seconds

    def be_full(self, seconds: float, room: int = 0) -> None:
        """For some seconds, a step may store ``room`` verdicts, and nothing else."""
        self._full_until, self._room = self._time.machine + seconds, room

    def answer_late(self, seconds: float) -> None:
        """Answer the next step some seconds after it was done."""
        self._late = seconds

    def has_more(self, seconds: float) -> None:
        """For some seconds, jobs are on their way from this store to its workers."""
        self._more_until = self._time.machine + seconds

    def poison(self, job: Any) -> None:
        """Refuse every step with a success of this job."""
        self._poisonous.add(job.id)

    # -- called by workers ----------------------------------------------------------------------

    def meet_misfortunes(self) -> None:
        """Wait, or raise, before a call."""
        self._time.check()
        chance = self._time.chance
        if chance and chance.random() < 0.1:
            self._time.sleep(chance.random())
        while self._time.machine < self._stalled_until:
            self._time.sleep(self._stalled_until - self._time.machine)
        if self._time.machine < self._away_until:
            raise BrokerUnavailable("the store does not answer")

    def exchange(self, step: Any) -> Any:
        self.steps += 1
        full = self._time.machine < self._full_until
        if full and (
            len(step.verdicts) > self._room or step.notes or (step.want and step.want.count)
        ):
            raise StoreFull("the store has no room")
        good = {self._jobs[v.token] for v in step.verdicts if v.outcome == Outcome.SUCCESS}
        if good & self._poisonous:
            raise ValueError("this cannot be stored")
        reply = self.broker.exchange(step)
        self._jobs |= {lease.token: lease.open().id for lease in reply.leases}
        reply.more = self._time.machine < self._more_until
        chance = self._time.chance
        late, self._late = self._late, 0.0
        if late or (chance and chance.random() < 0.1):
            self._time.sleep(late or self._time.chance.random())
        return reply


class StoreOfWorker:
    """The broker as one worker has opened it."""

    def __init__(self, store: FakeStore, machine: FakeMachine) -> None:
        self._store, self._machine = store, machine
        self.features = store.broker.features | {Feature.PROCESSES}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store.broker, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            self._store.meet_misfortunes()
            return value(*args, **options)

        return call

    def exchange(self, step: Any) -> Any:
        self._store.meet_misfortunes()
        return self._store.exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        self._store.meet_misfortunes()
        parked = self._store.broker.parked(owner_id, timeout, fds)
        try:
            until = next(parked)
            while True:
                until = parked.send(self._machine.poll(until.fds, until.seconds))
        except StopIteration as end:
            return list(end.value)

    def close(self) -> None:
        pass


class FakeMachine(Machine):
    """Starts simulated processes, and sleeps in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation, self._time = simulation, simulation.time
        self.processes: list[FakeProcess] = []
        self.child_died: Callable[[], None] = lambda: None
        self.vanishes: Callable[[], None] = lambda: None
        self.cannot_start_until = 0.0
        self.left: int | None = None
        self.threads: list[greenlet.greenlet] = []

    def start(self, setup: Setup) -> Any:
        if self._time.machine < self.cannot_start_until:
            raise OSError("no more processes")
        processes, app = self._simulation.processes, self._simulation.app
        process = FakeProcess(len(processes), setup, self._time, app, self.child_died)
        processes.append(process)
        self.processes.append(process)
        return process

    def buried(self, pid: int) -> None:
        pass

    def reap(self, reap_own: Callable[[int], bool]) -> None:
        for process in self.processes:
            reap_own(process.pid)

    def open_broker(self, url: str) -> Any:
        return StoreOfWorker(self._simulation.store, self)

    def poll(self, fds: Sequence[int], timeout: float) -> list[int]:
        fakes = [fd for fd in fds if fd >= FIRST_FD]
        real = [fd for fd in fds if fd < FIRST_FD]
        processes = self._simulation.processes

        def ready() -> list[int]:
            said = [fd for fd in fakes if processes[fd - FIRST_FD].socket.readable]
            return said + readable(real)

        return self._time.sleep(timeout, ready)

    def lock(self) -> FakeLock:
        return FakeLock(self._time)

    def start_thread(self, run: Callable[[], None]) -> None:
        self.threads.append(self._time.begin(run))

    @property
    def now(self) -> float:
        return self._time.machine

    def exit(self, code: int) -> None:
        self.left = code
        self.vanishes()
        self._time.leave(self.threads)


class Worker:
    """One worker of a simulation."""

    def __init__(self, simulation: Simulation, settings: Settings) -> None:
        self._simulation, self._time = simulation, simulation.time
        self._machine = FakeMachine(simulation)
        self._supervisor = Supervisor(settings, machine=self._machine)
        self._machine.child_died = lambda: self.signal(signal.SIGCHLD)
        self._machine.vanishes = self._vanish
        self.name = settings.name
        self._machine.start_thread(self._run)

    def _run(self) -> None:
        with contextlib.suppress(greenlet.GreenletExit):
            self._machine.left = self._supervisor.run()
            self._vanish()

    def _vanish(self, *, witness: bool = True) -> None:
        """Have other workers notice the death of this one soon, if it has not detached."""
        owner, broker = self._supervisor.owner, self._simulation.mill.broker
        rows = read_scoreboard(owner.board, owner.id) if owner.board and witness else None
        causes = None if rows is None else dict.fromkeys(rows, "its worker died")
        if any(each.id == owner.id for each in broker.owners()):
            self._time.after(0.5, lambda: broker.release(owner.id, causes))

    @property
    def ended(self) -> bool:
        """True when the supervisor has ended."""
        return self._machine.left is not None

    def until_ended(self) -> int:
        """Let time pass until the worker has ended; its exit code."""
        self._simulation.until(lambda: self.ended, "the end of the worker")
        assert self._machine.left is not None
        return self._machine.left

    def until_serving(self) -> Worker:
        """Let time pass until the processes have loaded the app and get jobs."""
        owners = self._simulation.mill.broker.owners
        self._simulation.until(lambda: any(owner.name == self.name for owner in owners()))
        self._simulation.run_for(1.0)
        return self

    # -- what happens to it ---------------------------------------------------------------------

    def signal(self, signum: int) -> None:
        """Send a signal to the supervisor."""
        self._supervisor.signals.send(signum)

    def command(self, verb: str) -> None:
        """Send a command to the worker through the store: ``quiet`` or ``stop``."""
        self._simulation.mill.broker.command(self._supervisor.owner.id, Command(verb))

    def kill(self, *, witness: bool = True) -> None:
        """Kill everything at once; other workers notice 0.5 s later.

        Without a witness the scoreboard is gone, too.
        """
        self._machine.left = -9
        self._vanish(witness=witness)
        self._kill_threads()
        for process in self.processes:
            process.die(9)

    def _kill_threads(self) -> None:
        for thread in self._machine.threads:
            self._time.kill(thread)

    def give_up(self) -> None:
        """Have the store give the jobs of this living worker to others."""
        self._simulation.mill.broker.release(self._supervisor.owner.id, None)

    def pause(self, seconds: float) -> None:
        """Hold up the supervisor for some seconds; its processes go on."""
        for thread in self._machine.threads:
            self._time.hold_up(thread, seconds)

    def cannot_start_processes(self, seconds: float) -> None:
        """The machine starts no process for some seconds."""
        self._machine.cannot_start_until = self._time.machine + seconds

    def break_main_thread(self) -> None:
        """Have the main thread of the supervisor meet an error of its own."""

        def fail(reap_own: Callable[[int], bool]) -> None:
            raise RuntimeError("the main thread is broken")

        self._machine.reap = fail  # type: ignore[method-assign]
        self.signal(signal.SIGCHLD)

    # -- what is seen of it ---------------------------------------------------------------------

    @property
    def processes(self) -> list[FakeProcess]:
        """The living processes, oldest first."""
        return [each for each in self._machine.processes if each.returncode is None]

    @property
    def started(self) -> int:
        """How many processes the worker has started so far."""
        return len(self._machine.processes)

    def close(self) -> None:
        """Unwind the supervisor if it has not ended, and free what the kernel would free."""
        self._kill_threads()
        self._supervisor.signals.close()
        if os.path.exists(self._supervisor._folder.path):
            self._supervisor._folder.remove()


class Log(logging.Handler):
    """The log lines of a simulation."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger = logging.getLogger("tidemill")
        self._before = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)
        super().close()


class Simulation:
    """A store, an app, the time, and the workers."""

    def __init__(self) -> None:
        self.time = VirtualTime()
        self.mill = Tidemill("memory://")
        self.app = FakeApp(self.mill)
        self.store = FakeStore(self.mill.broker, self.time)
        self.processes: list[FakeProcess] = []
        self.workers: list[Worker] = []
        self._log = Log()

    def be_random(self, seed: int) -> None:
        """Have things happen in a random order if they happen at one moment, and take time."""
        self.time.chance = random.Random(seed)

    # -- tasks and workers ----------------------------------------------------------------------

    def task(self, name: str, *, again: dict[str, Any] | None = None, **options: Any) -> Any:
        """Declare a task. Options are those of the task, and the attributes of ``Behaviour``.

        ``again`` has the attributes for later runs of a job that has run before.
        """
        doing = {key: options.pop(key) for key in list(options) if key in _DOINGS}
        later = None if again is None else Behaviour(**again)
        self.app.behaviours[name] = Behaviour(**doing, again=later)

        def function(*args: object) -> None:
            raise AssertionError("a simulated process calls no task")

        return self.mill.task(name=name, **options)(function)

    def worker(self, **settings: Any) -> Worker:
        """Start a worker and let it run until it serves."""
        return self.cold_worker(**settings).until_serving()

    def cold_worker(self, **settings: Any) -> Worker:
        """Start a worker that has no process yet."""
        name = f"worker-{len(self.workers)}"
        self.workers.append(Worker(self, Settings(app="app:mill", name=name, **settings)))
        return self.workers[-1]

    # -- time -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The machine time."""
        return self.time.machine

    @property
    def wall(self) -> float:
        """Seconds since 1970."""
        return self.time.wall()

    def set_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back."""
        self.time.since_1970 += seconds

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.time.run(seconds)

    def until(self, wanted: Callable[[], object], what: str = "the wanted") -> float:
        """Let time pass until something is true; the machine time at which it is."""
        self.time.run(LIMIT, wanted)
        assert wanted(), f"not within {LIMIT:g} s: {what}\n{self.story()}"
        return self.now

    def until_succeeded(self, *jobs: Job[Any]) -> float:
        """Let time pass until all these jobs have succeeded."""
        left = list(jobs)

        def none_left() -> bool:
            while left and left[-1].state == "succeeded":
                left.pop()
            return not left

        return self.until(none_left, "success")

    # -- what has happened ----------------------------------------------------------------------

    def runs(self, job: Job[Any] | None = None) -> list[FakeRun]:
        """The runs of a job, or all runs."""
        return [run for run in self.app.runs if job is None or run.job_id == job.id]

    def starts(self, job: Job[Any]) -> list[float]:
        """The machine times at which runs of a job began."""
        return [run.began for run in self.runs(job)]

    def overlaps(self) -> list[str]:
        """The ids of jobs of which two runs went on at one time."""
        before: dict[str, float] = {}
        found = []
        for run in self.app.runs:
            if run.began < before.get(run.job_id, 0.0):
                found.append(run.job_id)
            before[run.job_id] = max(run.ended, before.get(run.job_id, 0.0))
        return found

    def said(self, text: str) -> int:
        """How many lines of the log have this text."""
        return sum(text in line for line in self._log.lines)

    def story(self) -> str:
        """The log, the jobs and the processes, for a failure."""
        jobs = [repr(record) for record in self.mill.jobs().page(limit=20).records]
        processes = [f"{each.pid}: {each.returncode}" for each in self.processes]
        return "\n".join(
            ["--- log", *self._log.lines, "--- jobs", *jobs, "--- processes", *processes]
        )

    def states(self) -> Counter[str]:
        """The number of jobs in each state."""
        return Counter(str(record.state) for record in self.mill.jobs().page(limit=10_000).records)

    def close(self) -> None:
        self.time.over = True
        for worker in self.workers:
            worker.close()
        for process in self.processes:
            process.close()
        self.mill.close()
        self.time.close()
        self._log.close()


_DOINGS = set(Behaviour.__struct_fields__) - {"again"}


@contextlib.contextmanager
def simulation() -> Iterator[Simulation]:
    """A simulation for the time of a block."""
    made = Simulation()
    try:
        yield made
    finally:
        made.close()
