"""The supervisor: the only part of a worker that talks to the broker. It imports no user code.

It is the broker's *owner*: it leases jobs, gives them to its processes (:mod:`.process_pool`), and
collects their verdicts. When a process dies, the supervisor knows which jobs it ran. The processes
never call the store. A step holds the store's lock: in a process that computes, or is in a C call,
the step would take long, and every other process would wait.

    exchange ──► give out ──► wait (broker, processes, signals) ──► collect ──► …

A call of the store may take as long as the store likes. Timeouts, kills and signals do not wait for
it: a second thread looks after them (:mod:`.watchdog`) and never calls the store. Both use the
processes under one lock, which is not held during a call of the store.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable

from tidemill.brokers.contract.exchange import Reply
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.store import Store
from tidemill.brokers.registry import open_broker
from tidemill.client.runtime import Runtime
from tidemill.core.clock import machine_time, new_id, wall_time
from tidemill.core.crash_points import point
from tidemill.core.errors import (
    BrokerUnavailable,
    FeatureMissing,
    InvalidOption,
    StoreFull,
    StoreMoved,
)
from tidemill.core.job import Command, Owner
from tidemill.worker import store_steps
from tidemill.worker.burst import Burst
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.runtime_folder import RuntimeFolder
from tidemill.worker.scheduling import Scheduling
from tidemill.worker.settings import Settings
from tidemill.worker.signals import Signals
from tidemill.worker.stalled_exit import StalledExit, store_last
from tidemill.worker.store_steps import StoreSteps
from tidemill.worker.watchdog import Watchdog

__all__ = ["Settings", "Supervisor", "install"]

log = logging.getLogger("tidemill.worker")

CLEAN, INTERRUPTED, UNUSABLE, UNREACHABLE = 0, 1, 2, 3
"""Exit codes."""

SAME_SIGNAL = 0.2
"""Seconds within which a second TERM or INT is ignored. Process managers signal the worker and its
group, so one order to stop arrives twice."""

_UNTAKEN = (BrokerUnavailable, StoreFull, OSError)
"""A store that is away or full: the call may be made again."""


class Supervisor:
    """One worker: an owner with some processes."""

    def __init__(self, settings: Settings, mill: Runtime | None = None) -> None:
        """With ``mill`` the jobs run in threads of this process and no process is spawned."""
        self.settings = settings
        self._mill = mill
        self._folder = RuntimeFolder()
        name = settings.name or f"{socket.gethostname()}:{os.getpid()}"
        self.pool = ProcessPool(settings, name, self._folder.path, mill)
        self.owner = Owner(
            id=new_id(),
            name=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=wall_time(),
            queues=settings.queues,
            concurrency=settings.concurrency * settings.processes,
        )
        self.broker: Store | None = None
        self._scheduling = Scheduling(settings.app, self.owner.id)
        self._stopping = 0.0  # machine time at which a graceful stop ends; 0 while serving
        self._leaving = StalledExit(INTERRUPTED)
        self._lock = threading.RLock()
        self._steps = StoreSteps(self.owner.id, settings, self.pool, self._lock)
        self._burst = Burst(settings.queues, self.pool, self._lock, self._steps)
        self._told_at = 0.0  # machine time of the first TERM or INT
        self.signals = Signals()
        self._watchdog = Watchdog(self._look, self.signals.fileno())

    # -- life -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; returns the exit code.

        0 clean, 1 jobs were interrupted, 2 the app could not be loaded, 3 the broker could not be
        reached, or has no room.
        """
        try:
            return self._run()
        except (BrokerUnavailable, StoreFull) as error:
            log.error("%s", error)
            return UNREACHABLE
        except (FeatureMissing, InvalidOption, StoreMoved) as error:
            log.error("%s", error)
            return UNUSABLE
        finally:
            self._watchdog.close()
            self.pool.close()
            if self._mill is None and self.broker is not None:
                self.broker.close()
            self._folder.remove()
            self.signals.close()

    def _run(self) -> int:
        if self._mill is not None:
            broker = self._mill.broker
            self.owner.board = self.pool.open_board(self.owner.id, broker.boards)
        elif self.pool.start_one() is None:
            return UNUSABLE
        else:
            code = self._await_first()
            if code is not None:
                return code
            hello = self.pool.processes[0].hello
            assert hello is not None
            broker = open_broker(hello.url)
            need(broker, Feature.PROCESSES, "a worker of its own")
            self.owner.board = self.pool.open_board(self.owner.id, broker.boards)
        self.broker = broker
        self.pool.replace()
        self._watchdog.start()
        broker.attach(self.owner)
        if Feature.UNKNOWN in broker.features:
            self.pool.known.begin()
        log.info(
            "worker %s serves %s of %s with %d x %d",
            self.owner.name,
            ", ".join(self.settings.queues) or "all queues",
            broker.url,
            self.settings.processes,
            self.settings.concurrency,
        )
        try:
            while not (self._stopping and self.pool.over):
                self._turn(broker)
        finally:
            with self._lock:
                self.pool.end_all()
            pause = functools.partial(self._poll, [], store_steps.RETRY_AFTER)
            if store_last(self.pool, functools.partial(self._exchange, broker), pause):
                with contextlib.suppress(*_UNTAKEN):  # the store notices our end
                    broker.detach(self.owner.id)
        how = ", jobs were interrupted" if self.pool.interrupted else ""
        log.info("worker %s is done%s", self.owner.name, how)
        return INTERRUPTED if self.pool.interrupted else CLEAN

    def _await_first(self) -> int | None:
        """Wait until the first process names the broker of its app; an exit code if none does."""
        process = self.pool.processes[0]
        while True:
            self._poll([process.fileno()], 3600.0)
            if self._stopping:
                return CLEAN
            if process.hello is not None and process.hello.error:
                return UNUSABLE
            if process not in self.pool.processes or process.closed_at:
                log.error("the app %s could not be loaded", self.settings.app)
                return UNUSABLE
            if process.hello is not None:
                return None

    def _poll(self, fds: list[int], timeout: float) -> None:
        poll = select.poll()
        for fd in (*fds, *self.signals.fds()):
            poll.register(fd, select.POLLIN)
        self._take([fd for fd, _ in poll.poll(timeout * 1000)])

    # -- one turn -------------------------------------------------------------------------------

    def _turn(self, broker: Store) -> None:
        self._declare(broker)
        reply = self._exchange(broker)
        point("worker.exchanged")
        self._fire(broker, reply)
        self._steps.lend(reply)
        with self._lock:
            self.pool.dispatch.deal(reply.leases)
            point("worker.handed")
        for command in reply.commands:
            self._obey(broker, command)
        with self._lock:
            self._watchdog.expect(self.pool.next_look())
        if self.settings.burst and self._burst.is_over(broker, reply):
            with self._lock:
                self._stop_softly()
        self._collect(broker, reply.next_due)
        point("worker.collected")

    def _look(self) -> float:
        """In the watchdog thread: do all that cannot wait for the store; returns the next look."""
        with self._lock:
            pool = self.pool
            pool.news = False
            self._take_signals()
            pool.look_after()
            if self._stopping and machine_time() >= self._stopping:
                pool.end_all()
            if pool.news:
                self.signals.ring()
            at = pool.next_look(exact=True)
            if self._stopping and pool.over:
                return self._leaving.look(pool) if self._mill is None else at
            return min(at, self._stopping) if self._stopping else at

    def _declare(self, broker: Store) -> None:
        """Store the schedules of the app, as the latest of its processes has loaded it."""
        hellos = [process.hello for process in self.pool.processes if process.hello is not None]
        if hellos and not hellos[-1].error and not self._stopping:
            try:
                self._scheduling.declare(broker, hellos[-1])
            except (BrokerUnavailable, OSError) as error:
                self._steps.trouble(error)

    def _fire(self, broker: Store, reply: Reply) -> None:
        """Fire due schedules, and look at once for the jobs that they put."""
        if reply.schedules:
            reply.next_due = 0.0
            try:
                self._scheduling.fire(broker, reply.schedules, reply.wall)
            except (BrokerUnavailable, OSError) as error:
                self._steps.trouble(error)
                reply.next_due = store_steps.RETRY_AFTER

    def _exchange(self, broker: Store) -> Reply:
        serves = not self._stopping
        fires = self._scheduling.count(broker) if serves else 0
        return self._steps.exchange(broker, fires=fires, takes=serves)

    def _collect(self, broker: Store, timeout: float) -> None:
        """Sleep until the store, a process or a signal calls, and read the frames."""
        with self._lock:
            fds = [process.fileno() for process in self.pool.processes if not process.closed_at]
        try:
            ready = broker.wait(self.owner.id, max(0.0, timeout), [*fds, *self.signals.fds()])
        except _UNTAKEN as error:
            self._steps.trouble(error)
            self._poll(fds, min(store_steps.RETRY_AFTER, max(0.0, timeout)))
        else:
            self._take(ready)

    def _take(self, ready: list[int]) -> None:
        with self._lock:
            by_fd = {process.fileno(): process for process in self.pool.processes}
            for fd in ready:
                if (process := by_fd.get(fd)) is not None:
                    self.pool.read(process)
                else:
                    self.signals.heard()
                    self._take_signals()
            self._watchdog.expect(self.pool.next_look())

    # -- orders and signals ---------------------------------------------------------------------

    def _obey(self, broker: Store, command: Command) -> None:
        if command.verb == "lost":
            self._begin_anew(broker)
            return
        with self._lock:
            if command.verb in ("cancel", "terminate"):
                self.pool.obey(command)
            elif command.verb == "quiet":
                self._stopping = self._stopping or float("inf")
                self.pool.be_quiet()
            elif command.verb == "stop":
                self._stop_softly()
            elif command.verb == "dump":
                self.pool.dump()

    def _begin_anew(self, broker: Store) -> None:
        """Drop all leases and begin anew: the broker has given them to other workers."""
        log.warning("the broker gave this worker up: others have its jobs, and it begins anew")
        with self._lock:
            self.pool.lose()
        with contextlib.suppress(*_UNTAKEN):  # then the next exchange tells it again
            broker.attach(self.owner)
        self._scheduling.forget()
        self._steps.forget()
        self.pool.known.forget()

    def stop(self) -> None:
        """Ask for a graceful stop, from any thread."""
        self.signals.send(signal.SIGTERM)

    def _take_signals(self) -> None:
        """With the lock: act on signals. Either thread takes them, whichever comes first."""
        signals = self.signals.take()
        for signum in signals:
            self._take_signal(signum)
        if signals:
            self._watchdog.expect(machine_time())
            self.signals.ring()

    def _take_signal(self, signum: int) -> None:
        gently = signum in (signal.SIGTERM, signal.SIGINT)
        if gently and machine_time() - self._told_at < SAME_SIGNAL:
            return
        if gently and self._stopping in (0.0, float("inf")):
            self._told_at = machine_time()
            self._stop_softly()
        elif gently or signum == signal.SIGQUIT:
            log.warning("stopping now; what still runs goes back")
            self._stopping = machine_time()
            self.pool.end_all()
        elif signum == signal.SIGHUP and not self._stopping:
            self.pool.roll()
        elif signum == signal.SIGCHLD and self._mill is None:
            self.pool.reap()
        elif signum == signal.SIGUSR1:
            self.pool.dump()

    def _stop_softly(self) -> None:
        if self._stopping and self._stopping != float("inf"):
            return
        if not self.settings.burst:
            log.info("stopping: up to %g s for what runs", self.settings.shutdown_timeout)
        self._stopping = machine_time() + self.settings.shutdown_timeout
        self.pool.be_quiet()
        for process in self.pool.processes:
            process.stop_in(self.settings.shutdown_timeout)


def install(supervisor: Supervisor) -> Callable[[], None]:
    """Route this process's signals to the supervisor; returns what undoes it."""
    return supervisor.signals.install()
