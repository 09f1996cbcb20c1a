"""What a worker needs from its machine: processes, sleep, and a second thread.

A supervisor and its process pool reach the operating system only through these classes. ``Machine``
spawns real processes. ``ThisProcess`` runs jobs in a thread of the caller's process. The tests have
a third machine, with simulated processes and virtual time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tidemill.brokers.contract.store import Store
from tidemill.brokers.registry import open_broker
from tidemill.worker.child import Child
from tidemill.worker.child_protocol import Down, Hello, MessageSocket, Setup, Up
from tidemill.worker.event_loop import ProcessEvents
from tidemill.worker.guard_process import GuardProcess
from tidemill.worker.stacks import stacks_of_threads
from tidemill.worker.watchdog import Watchdog
from tidemill.worker.zombie_reaper import reap_orphans

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class Spawned:
    """A worker process at the level of the operating system, as the leader of its own group."""

    hello: Hello | None = None  # a process introduces itself later

    def __init__(self, setup: Setup) -> None:
        """Raises OSError when the system cannot start a process now."""
        ours, theirs = _pair()
        self._stacks = setup.stacks
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidemill.worker_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "TIDEMILL_SUPERVISOR": str(os.getpid())},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._popen.pid
        self.socket: MessageSocket[Down, Up] = MessageSocket(ours, Up)

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal; None before the end."""
        return self._popen.returncode

    def exited(self, patience: float = 0.0) -> bool:
        """True when the process is dead; waits up to ``patience`` seconds for its death."""
        if self._popen.poll() is not None:
            return True
        if not patience:
            return False
        try:
            self._popen.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process and everything that it started; never waits."""
        if not self.exited():
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # Also kill the process alone: a task may have moved it into another group.
        self._popen.kill()

    def stacks(self, threads: Iterable[int]) -> str:
        """The stacks of these threads, even if a task keeps the interpreter lock."""
        return stacks_of_threads(self._stacks, self.pid, threads)

    def bury(self) -> None:
        """Kill the programs that the dead process has started, and free its resources."""
        self._kill_group()
        with contextlib.suppress(OSError):
            os.unlink(self._stacks)
        self.socket.close()


class _Thread:
    """A worker in a thread of this process. Nothing can kill it: it ends when its socket ends."""

    returncode = 0

    def __init__(self, mill: Runtime, setup: Setup) -> None:
        events = ProcessEvents(mill)
        events.start()
        ours, theirs = _pair()
        child = Child(mill, setup, MessageSocket(theirs, Down), events, local=True)
        self._patience = setup.waits.reap
        self._thread = threading.Thread(target=child.serve, name="tidemill-local", daemon=True)
        self._thread.start()
        self.pid = os.getpid()
        self.socket: MessageSocket[Down, Up] = MessageSocket(ours, Up)
        known = list(mill.tasks), list(mill.allow_imports), mill.declarations.own()
        schedules = mill.schedules.declared()
        self.hello: Hello | None = Hello(mill.url, (), len(mill.tasks), "", schedules, *known)

    def exited(self, patience: float = 0.0) -> bool:
        """Always True: there is no process."""
        return True

    def kill(self) -> None:
        """Close the socket, which the thread notices."""
        self.socket.close()

    def stacks(self, threads: Iterable[int]) -> str:
        """Nothing: the worker in the thread prints its own stacks."""
        return ""

    def bury(self) -> None:
        """Close the socket and wait for the end of the thread."""
        self.socket.close()
        self._thread.join(self._patience)


Body = Spawned | _Thread
"""What a worker process is made of."""


class Machine:
    """The real machine: each worker process is a process of its own."""

    local = False  # True when the jobs run in this process

    def __init__(self) -> None:
        self._guard = GuardProcess()

    def start(self, setup: Setup) -> Body:
        """Start a worker process.

        Raises:
            OSError: the system cannot start a process now.
        """
        process = Spawned(setup)
        try:
            self._guard.add(process.pid)
        # No process may run without the guard.
        except OSError:
            process.kill()
            process.exited(setup.waits.kill)
            process.bury()
            raise
        return process

    def buried(self, pid: int) -> None:
        """Forget a process that is dead and buried."""
        self._guard.remove(pid)

    def reap(self, reap_own: Callable[[int], bool]) -> None:
        """Reap the dead processes that this process has inherited."""
        reap_orphans(lambda pid: reap_own(pid) or self._guard.reap(pid))

    def open_broker(self, url: str) -> Store:
        """Open the broker that the first process has named."""
        return open_broker(url)

    def poll(self, fds: Sequence[int], timeout: float) -> list[int]:
        """Sleep until a descriptor is readable; return the readable descriptors."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(timeout * 1000)]

    def watchdog(self, look: Callable[[], float], signals: int) -> Watchdog:
        """A second thread: see :mod:`.watchdog`."""
        return Watchdog(look, signals)

    def exit(self, code: int) -> None:
        """End this process at once, although a call of the store does not return."""
        logging.shutdown()
        os._exit(code)

    def close(self) -> None:
        """End the guard."""
        self._guard.close()


class ThisProcess(Machine):
    """Runs the jobs in a thread of this process: for tests, notebooks and ``memory://``."""

    local = True

    def __init__(self, mill: Runtime) -> None:
        super().__init__()
        self._mill = mill

    def start(self, setup: Setup) -> Body:
        """Start a thread.

        Raises:
            TidemillError: a function that the app calls at the start has raised.
        """
        return _Thread(self._mill, setup)

    def buried(self, pid: int) -> None:
        """Nothing: there is no process."""


def _pair() -> tuple[socket.socket, socket.socket]:
    """A socket pair with large buffers for frames: the supervisor's end, and the process's end."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    return ours, theirs
