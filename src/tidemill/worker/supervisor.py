"""The supervisor: the only part of a worker that talks to the broker. It imports no user code.

For the broker, the supervisor is an *owner*. The supervisor leases jobs, gives them to its
processes (:mod:`.pool`), and collects their verdicts. When a process dies, the supervisor
knows which jobs ran there.

The processes never call the store. A step holds the lock of the store. In a process whose tasks
compute or are in C calls, a step would take long, and every other process would wait for the lock.

Two threads use the processes, under one lock:

    loop    collect ──► exchange ──► give out ──► wait for the store ──► … (:mod:`.steps`)
    main    wait for processes and signals ──► read ──► look after the processes ──► …

A call of the store may take any time, and the lock is free meanwhile. So timeouts, kills and
signals do not wait for the store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.contract.exchange import Reply
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store, clock_ahead
from tidemill.client.worker_reports import question_of
from tidemill.core import __version__
from tidemill.core.clock import clock, new_id
from tidemill.core.crash_points import point
from tidemill.core.job import Command, Owner
from tidemill.core.signals import Signals
from tidemill.core.words import counted
from tidemill.errors import (
    BrokerUnavailable,
    FeatureMissing,
    InvalidOption,
    StoreFull,
    StoreMoved,
    TidemillError,
)
from tidemill.worker.child_protocol import Hello
from tidemill.worker.declarations import TaskDeclarations
from tidemill.worker.machine import Machine, RuntimeFolder, ThisProcess
from tidemill.worker.parts import Burst, DeployNote, Part, Snapshots
from tidemill.worker.pool import ProcessPool
from tidemill.worker.process import State, WorkerProcess
from tidemill.worker.scheduling import Scheduling
from tidemill.worker.settings import Settings
from tidemill.worker.steps import LAST_STEP, WorkerLoop

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

log = logging.getLogger("tidemill.worker")

CLEAN, INTERRUPTED, UNUSABLE, UNREACHABLE = 0, 1, 2, 3  # exit codes
SAME_SIGNAL = 0.2
"""Seconds within which a second TERM or INT is ignored. Process managers signal the worker and its
group, so one order to stop arrives twice."""

STALLED = LAST_STEP + 2.0
"""Seconds from the shutdown timeout to the end of a worker whose call of the store does not return.
The scoreboard stays for the next worker, which counts an attempt for each job on it."""

FIRST_STARTS = 3  # the most processes started for the first one, if each is killed at its start
FIRST_PAUSE = 0.25  # seconds between two looks whether the next first process may start
LONGEST_SLEEP = 3600.0  # seconds that the main thread sleeps at most
TASKS_MOST = 30  # tasks that the banner names
PATIENCE = 30.0  # seconds for running jobs at the end of a worker in the caller's process


class Start(msgspec.Struct, frozen=True):
    """A worker that begins to serve. ``url`` has no password."""

    worker: str
    url: str
    settings: Settings
    hello: Hello

    def log(self, extra: Mapping[str, object] | None = None) -> None:
        log.info(
            "worker %s serves %s of %s with %d x %d",
            self.worker,
            ", ".join(self.settings.queues) or "all queues",
            self.url,
            self.settings.processes,
            self.settings.concurrency,
            extra=extra,
        )

    def log_details(self) -> None:
        """Log the start with all details of the banner as extras, for JSON."""
        settings = self.settings
        self.log(
            {
                "app": settings.app,
                "store": self.url,
                "queues": settings.queues,
                "order": str(settings.mode),
                "tasks": sorted(self.hello.names),
                "imports": self.hello.imports,
                "processes": settings.processes,
                "slots": settings.concurrency,
            }
        )

    def print(self) -> None:
        if sys.stderr is not None:  # a process may start without stderr
            with contextlib.suppress(OSError, ValueError):  # nobody reads stderr
                sys.stderr.write(self.banner())
                sys.stderr.flush()

    def banner(self) -> str:
        settings = self.settings
        lines = {
            "store": self.url,
            "queues": f"{', '.join(settings.queues) or 'all'} ({settings.mode} order)",
            "tasks": self._tasks(),
            "slots": f"{settings.processes} x {settings.concurrency} (processes x jobs at a time)",
            "stop": f"Ctrl-C finishes running jobs within {settings.shutdown_timeout:g} s; "
            "Ctrl-C twice stops now",
        }
        parts = [f"tidemill worker {self.worker} serves {settings.app}"]
        for name, text in lines.items():
            parts += textwrap.wrap(
                text,
                100,
                initial_indent=f"  {name:8}",
                subsequent_indent=" " * 10,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(parts) + "\n"

    def _tasks(self) -> str:
        names = sorted(self.hello.names)
        parts = [", ".join(names[:TASKS_MOST])] if names else []
        if len(names) > TASKS_MOST:
            parts.append(f"and {len(names) - TASKS_MOST:,} more")
        if self.hello.imports:
            parts.append(f"and by name: {', '.join(self.hello.imports)}")
        return "; ".join(parts) or "none"


class Supervisor:
    """One worker: an owner of leases, with its processes."""

    def __init__(
        self, settings: Settings, runtime: Runtime | None = None, machine: Machine | None = None
    ) -> None:
        """With ``runtime`` the jobs run in threads of this process and no process is spawned."""
        self.settings = settings
        self._runtime = runtime
        self._machine = machine or (Machine() if runtime is None else ThisProcess(runtime))
        self._folder = RuntimeFolder()
        name = settings.name or f"{socket.gethostname()}:{os.getpid()}"
        self.signals = Signals()
        self.pool = ProcessPool(settings, name, self._folder.path, self._machine, self.signals.ring)
        self.owner = Owner(
            id=new_id(),
            name=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=clock.wall(),
            queues=settings.queues,
            concurrency=settings.concurrency * settings.processes,
            version=__version__,
        )
        self.broker: Store | None = None
        self.parts: list[Part] = [
            Snapshots(),
            DeployNote(settings.release),
            TaskDeclarations(),
            Scheduling(settings.app, self.owner.id),
            self.pool.reports,
            self.pool.history,
        ]
        if settings.burst:
            self.parts.append(Burst(self.pool, self._stop_softly))
        self._loop: WorkerLoop | None = None
        self._error: BaseException | None = None  # what has ended the thread of the loop
        self._served = False  # True when this thread has ended
        self._broken = False  # True when an error has ended the main thread
        self._look_due = 0.0  # machine time of the next look at the processes
        self._stopping = 0.0  # machine time at which a graceful stop ends; 0 before a stop
        self._left = False  # True when the store moves, or no longer serves this version
        self._exit_at = 0.0  # machine time at which a worker with a stalled store ends; 0 if open
        self._told_at = 0.0  # machine time of the first TERM or INT
        self.announce: Callable[[Start], None] = Start.log

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; returns the exit code.

        The code is 0 for a clean end, and 1 when jobs were interrupted. Code 2 says that the app
        could not be loaded. Code 3 says that the broker is away, has no room, has moved, or has
        another version.
        """
        try:
            return self._run()
        except (BrokerUnavailable, StoreFull, StoreMoved) as error:
            log.error("the worker ends: %s", error)
            return UNREACHABLE
        except (FeatureMissing, InvalidOption) as error:
            log.error("the worker ends: %s", error)
            return UNUSABLE
        finally:
            if self._loop is not None:
                self._loop.free()
            self.pool.close()
            if self._runtime is None and self.broker is not None:
                self.broker.close()
            self._folder.remove()
            self.signals.close()

    def _run(self) -> int:
        broker = self._runtime.broker if self._runtime is not None else None
        if broker is None:
            if (code := self._start_first()) is not None:
                return code
            assert self.pool.hello is not None
            broker = self._machine.open_broker(self.pool.hello.url)
        self.broker = broker
        if self._runtime is None and Feature.PROCESSES not in broker.features:
            raise FeatureMissing(
                f"{broker.url} is inside one process, so no worker can have its jobs; give the "
                "app another url, or run the worker in the program: with mill.worker()"
            )
        if Feature.HISTORY in broker.features:
            self.pool.history.on = True
        self.owner.board = self.pool.open_board(self.owner.id, broker.boards)
        self.pool.replace()
        loop = self._loop = WorkerLoop(self, broker, self._machine)
        self._machine.start_thread(lambda: self._serve(loop, broker))
        try:
            while not self._served:
                self._watch(loop)
        except BaseException as error:
            self._end_loop(loop)
            self._error = error
            if self.pool.verdicts or not self._served:
                log.error("the worker ends by an error of its own", exc_info=error)
                self._leave_board()
        if self._error is not None:
            raise self._error
        if self._stopping == math.inf:  # the store may have moved since somebody wanted the end
            self._leave_if_moved()
        how = ", jobs were interrupted" if self.pool.interrupted else ""
        log.info("worker %s is done%s", self.owner.name, how)
        if self.pool.verdicts:
            self._leave_board()
        if self._left:
            return UNREACHABLE
        return INTERRUPTED if self.pool.interrupted else CLEAN

    def _serve(self, loop: WorkerLoop, broker: Store) -> None:
        """Call the store until the worker has stopped; this runs in a thread of its own."""
        try:
            if Feature.SCHEDULES in broker.features:
                self.owner.ahead = clock_ahead(broker)
            broker.attach(self.owner)
            hello = self.pool.hello or Hello()  # the first process may have died
            self.announce(Start(self.owner.name, broker.url, self.settings, hello))
            try:
                while not self.over:
                    loop.turn()
            finally:
                with self.pool.lock:
                    self.pool.end_all()
                loop.end()
        except BaseException as error:
            self._error = error
        finally:
            self._served = True
            self.signals.ring()

    def _end_loop(self, loop: WorkerLoop) -> None:
        """After an error of this thread, have the loop kill all processes and make a last step."""
        # A store that does not answer has the same time as at the end of a healthy worker.
        self._broken = True
        loop.wake()
        until = clock.machine() + STALLED
        while not self._served and clock.machine() < until:
            self._machine.poll([self.signals.fileno()], until - clock.machine())
            self.signals.take()

    def _leave_board(self) -> None:
        """End this process: owner and scoreboard stay, so that the ended jobs use an attempt."""
        if self._runtime is None:
            self._machine.exit(INTERRUPTED)

    @property
    def over(self) -> bool:
        """True when the worker has been told to stop, and all its processes are gone."""
        # True also when the main thread has failed.
        if self._broken:
            return True
        if not self._stopping:
            return False
        with self.pool.lock:
            return self.pool.over

    def _start_first(self) -> int | None:
        """Start a process that names the broker. Return an exit code if the worker ends."""
        # A SIGKILL comes from outside, as when memory runs out. So another process starts then.
        for left in reversed(range(FIRST_STARTS)):
            while self.pool.held_back and not self._stopping:
                self._poll([], FIRST_PAUSE)
            if self._stopping:
                return CLEAN
            first = next(iter(self.pool.processes), None)  # the pool may have started it
            if (process := first or self.pool.start_one()) is None:
                return UNUSABLE
            code = self._await_first(process)
            if code != UNUSABLE or (process.hello is not None and process.hello.error):
                return code
            cause = process.cause()
            if not left or not process.was_killed:
                app = self.settings.app
                log.error("the worker ends: its app %s could not be loaded: %s", app, cause)
                break
            log.warning("%s while it loaded the app; another starts", cause)
            with self.pool.lock:
                self.pool.look_after()  # takes the dead process off the pool
        return UNUSABLE

    def _await_first(self, process: WorkerProcess) -> int | None:
        while True:
            self._poll([process.fileno()], 3600.0)
            if self._stopping:
                return CLEAN
            if process.hello is not None and process.hello.error:
                return UNREACHABLE if process.hello.unreachable else UNUSABLE
            if process.state >= State.CLOSED:
                # So far the process may only have closed its socket: wait for its end.
                process.exited(1.0)
                return UNUSABLE
            if process.hello is not None:
                if not (process.hello.names or process.hello.imports):
                    log.warning(
                        "the app %s declares no task; import the modules of its tasks below the "
                        "line that makes the app",
                        self.settings.app,
                    )
                return None

    def _poll(self, fds: list[int], timeout: float) -> None:
        ready = self._machine.poll([*fds, self.signals.fileno()], timeout)
        with self.pool.lock:
            by_fd = {process.fileno(): process for process in self.pool.processes}
            for fd in ready:
                if (process := by_fd.get(fd)) is not None:
                    self.pool.read(process)
                else:
                    self._take_signals()

    # -- in the thread of the loop --------------------------------------------------------------

    def hand_out(self, reply: Reply) -> None:
        """Give the leases of a reply to processes, and obey its commands."""
        point("worker.exchanged")
        told = bool(reply.commands) and not self._stopping
        with self.pool.lock:
            self.pool.dispatch.deal(reply.leases)
            point("worker.handed")
            for command in reply.commands:
                self._obey(command)
            self._look_by(self.pool.plan_look())
        if told and self._stopping == math.inf and not self._left:
            self._say_quiet()

    def _say_quiet(self) -> None:
        """Log why this worker takes no more jobs: its store moves, or somebody wants it."""
        self._leave_if_moved()
        if not self._left:
            log.info("the worker takes no more jobs, and ends after its running jobs")

    def _leave_if_moved(self) -> None:
        where = None
        with contextlib.suppress(TidemillError):
            where = self.broker.info().get("moves_to") if self.broker is not None else None
        if where and not self._left:
            self._left = True
            log.error("the worker ends: this store moves to %s; use that url", where)

    # -- in the main thread ---------------------------------------------------------------------

    def _watch(self, loop: WorkerLoop) -> None:
        """Sleep until a process or a signal comes; look after the processes when a look is due."""
        with self.pool.lock:
            open_ones = [one for one in self.pool.processes if one.state < State.CLOSED]
            fds = [process.fileno() for process in open_ones]
            self._look_due = min(self._look_due, self.pool.plan_look())
        self._poll(fds, min(LONGEST_SLEEP, max(0.0, self._look_due - clock.machine())))
        point("worker.collected")
        if clock.machine() >= self._look_due:
            self._look_after()
        if self.pool.news:
            loop.wake()

    def _look_by(self, at: float) -> None:
        """Look after the processes no later than at this machine time. The lock is held."""
        if at < self._look_due:
            self._look_due = at
            self.signals.ring()

    def _look_after(self) -> None:
        with self.pool.lock:
            pool = self.pool
            pool.look_after()
            if self._stopping and not self._exit_at and clock.machine() >= self._stopping:
                self._end_all()
            if self._exit_at and clock.machine() >= self._exit_at:
                log.error("the store does not answer: jobs that ended last may run again")
                self._machine.exit(INTERRUPTED)
            end = self._exit_at or self._stopping or math.inf
            self._look_due = min(pool.plan_look(exact=True), end)

    def _end_all(self) -> None:
        """Kill all processes. Their verdicts are then stored, unless the store stalls."""
        self.pool.end_all()
        if not self._exit_at:
            self._exit_at = math.inf if self._runtime else clock.machine() + STALLED

    # -- orders and signals ---------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        if command.verb in ("cancel", "terminate"):
            self.pool.obey(command)
        elif command.verb == "quiet":
            self._stop_at(self._stopping or math.inf)
        elif command.verb.startswith("outgrown "):
            self._leave(command.verb.removeprefix("outgrown "))
        elif command.verb == "stop":
            self._stop_softly()
        elif (question := question_of(command.verb)) is not None:
            self.pool.ask(question)

    def _leave(self, why: str) -> None:
        if not self._left:
            log.error("%s; this worker stops; jobs whose verdicts it cannot report run again", why)
        self._left = True

    def stop(self) -> None:
        """Ask for a graceful stop, from any thread."""
        self.signals.send(signal.SIGTERM)

    def _take_signals(self) -> None:
        """Act on signals, with the lock held."""
        signals, now = self.signals.take(), clock.machine()
        for signum in signals:
            self._take_signal(signum, now)
        if signals:
            self.pool.news = True
            self._look_due = 0.0

    def _take_signal(self, signum: int, now: float) -> None:
        gently = signum in (signal.SIGTERM, signal.SIGINT)
        # ``now`` is the time before the log line of the first order, which a slow disk may delay.
        if gently and now - self._told_at < SAME_SIGNAL:
            return
        if gently and self._stopping in (0.0, float("inf")):
            self._told_at = now
            self._stop_softly("Ctrl-C" if signum == signal.SIGINT else "TERM")
        elif gently or signum == signal.SIGQUIT:
            log.warning("stopping now: %s", _what_goes_back(self.pool.running))
            self._stop_at(clock.machine())
            self._end_all()
        elif signum == signal.SIGHUP and not self._stopping:
            self.pool.roll()
        elif signum == signal.SIGCHLD and not self._machine.local:
            self.pool.reap()
        elif signum == signal.SIGUSR1:
            self.pool.dump()

    def _stop_softly(self, by: str = "TERM") -> None:
        if self._stopping and self._stopping != float("inf"):
            return
        running = self.pool.running
        if running:
            log.info(
                "stopping: waiting up to %g s for %s; %s again stops now",
                *(self.settings.shutdown_timeout, _jobs(running), by),
            )
        elif not self.settings.burst:
            log.info("stopping: no job is running")
        self._stop_at(clock.machine() + self.settings.shutdown_timeout)
        for process in self.pool.processes:
            process.stop_in(self.settings.shutdown_timeout)

    def _stop_at(self, at: float) -> None:
        """Take no more jobs, and end the worker at this machine time at the latest."""
        self._stopping = at
        self._look_by(at)
        self.pool.be_quiet()
        if self._loop is not None:
            self._loop.rest()


def _jobs(running: int) -> str:
    return counted(running, "running job")


def _what_goes_back(running: int) -> str:
    if not running:
        return "no job is running"
    back = "goes back to its queue" if running == 1 else "go back to their queues"
    return f"{_jobs(running)} {back}"


def install(supervisor: Supervisor) -> Callable[[], None]:
    """Route this process's signals to the supervisor; return a function that undoes this."""
    return supervisor.signals.install()


@contextlib.contextmanager
def running_worker(runtime: Runtime, settings: Settings) -> Iterator[Supervisor]:
    """Run a worker during a block, which begins when it serves. Raises TidemillError."""
    supervisor = Supervisor(settings, runtime)
    outcome: list[int | BaseException] = []
    begun = threading.Event()
    announce = supervisor.announce

    def serves(start: Start) -> None:
        announce(start)
        begun.set()

    def serve() -> None:
        try:
            outcome.append(supervisor.run())
        except BaseException as error:
            outcome.append(error)
        begun.set()

    supervisor.announce = serves

    thread = threading.Thread(target=serve, name="tidemill-worker", daemon=True)
    thread.start()

    def end() -> None:
        supervisor.stop()
        thread.join(2 * PATIENCE)

    begun.wait(PATIENCE)
    if outcome:
        judge(outcome)
    runtime.before_close.append(end)  # end the worker if the app is closed inside the block
    try:
        yield supervisor
    finally:
        runtime.before_close.remove(end)
        end()
    judge(outcome)


def judge(outcome: Sequence[int | BaseException]) -> None:
    """Raise the TidemillError of a worker by its exit code, or its own exception."""
    if not outcome:
        raise TidemillError("the worker did not end: one of its jobs still runs")
    (how,) = outcome
    if isinstance(how, BaseException):
        raise how
    if how == 1:
        raise TidemillError(f"jobs still ran {PATIENCE:g} s after the worker was told to stop")
    if how:
        raise TidemillError("the worker could not serve, or its store has moved; the log says why")
