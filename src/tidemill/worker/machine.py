"""What a worker needs from its machine: processes, sleep, a thread and its lock.

A supervisor and its process pool reach the operating system only through these classes. ``Machine``
spawns real processes. ``ThisProcess`` runs jobs in a thread of the caller's process. The tests have
a third machine, with simulated processes and virtual time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.owner_loop import poll
from tidemill.brokers.registry import open_broker
from tidemill.core.files import is_mine
from tidemill.worker.child import Child
from tidemill.worker.child_protocol import Down, Hello, MessageSocket, Setup, Up, hello_of
from tidemill.worker.event_loop import ProcessEvents
from tidemill.worker.stacks import stacks_of_threads

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

log = logging.getLogger("tidemill.worker")


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
        self._kill_group()
        with contextlib.suppress(OSError):
            os.unlink(self._stacks)
        self.socket.close()


class _Thread:
    """A worker in a thread of this process. Nothing can kill it: it ends when its socket ends."""

    returncode = 0

    def __init__(self, runtime: Runtime, setup: Setup) -> None:
        events = ProcessEvents(runtime)
        events.start()
        ours, theirs = _pair()
        child = Child(runtime, setup, MessageSocket(theirs, Down), events, local=True)
        self._patience = setup.waits.reap
        self._thread = threading.Thread(target=child.serve, name="tidemill-local", daemon=True)
        self._thread.start()
        self.pid = os.getpid()
        self.socket: MessageSocket[Down, Up] = MessageSocket(ours, Up)
        self.hello: Hello | None = hello_of(runtime)

    def exited(self, patience: float = 0.0) -> bool:
        """Always True: there is no process."""
        return True

    def kill(self) -> None:
        self.socket.close()

    def stacks(self, threads: Iterable[int]) -> str:
        """Nothing: the worker in the thread prints its own stacks."""
        return ""

    def bury(self) -> None:
        self.socket.close()
        self._thread.join(self._patience)


Body = Spawned | _Thread  # what a worker process is made of


class Machine:
    """The real machine: each worker process is a process of its own."""

    local = False  # True when the jobs run in this process

    def __init__(self) -> None:
        self._guard = GuardProcess()

    def start(self, setup: Setup) -> Body:
        """Start a worker process. Raises OSError if the system cannot start a process now."""
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
        self._guard.remove(pid)

    def reap(self, reap_own: Callable[[int], bool]) -> None:
        """Reap all dead children. ``reap_own`` reaps a child of the worker and returns True.

        Process 1 of a container, or a subreaper, inherits the processes that tasks leave behind.
        Other code waits for the worker's own children and reads their exit codes.
        """
        if not hasattr(os, "waitid"):  # macOS; it has no containers to reap for
            return
        with contextlib.suppress(ChildProcessError):  # no children are left
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if not (reap_own(found.si_pid) or self._guard.reap(found.si_pid)):
                    os.waitpid(found.si_pid, 0)

    def open_broker(self, url: str) -> Store:
        return open_broker(url)

    def poll(self, fds: Sequence[int], timeout: float) -> list[int]:
        return poll(fds, timeout)

    def lock(self) -> AbstractContextManager[object]:
        """A lock of several threads, which a thread may take again."""
        return threading.RLock()

    def start_thread(self, run: Callable[[], None]) -> None:
        """Run a function in a thread that does not keep the process alive."""
        threading.Thread(target=run, name="tidemill-loop", daemon=True).start()

    def exit(self, code: int) -> None:
        """End this process at once, although a call of the store does not return."""
        logging.shutdown()
        os._exit(code)

    def close(self) -> None:
        self._guard.close()


class ThisProcess(Machine):
    """Runs the jobs in a thread of this process: for tests, notebooks and ``memory://``."""

    local = True

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    def start(self, setup: Setup) -> Body:
        """Start a thread.

        Raises:
            TidemillError: a function that the app calls at the start has raised.
        """
        return _Thread(self._runtime, setup)

    def buried(self, pid: int) -> None:
        """Nothing: there is no process."""


def _pair() -> tuple[socket.socket, socket.socket]:
    """A socket pair with large buffers for frames: the supervisor's end, and the process's end."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    return ours, theirs


PATIENCE = 5.0  # seconds to wait for the end of the guard
_CODE = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    group = int(line)
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class GuardProcess:
    """A tiny process that kills the programs that a killed supervisor leaves behind.

    When a supervisor dies, the kernel kills its worker processes, but not the programs that their
    tasks have started. The guard reads the process groups in use from a pipe. When the pipe ends,
    the guard kills all processes left in these groups. The guard has a session of its own: a signal
    to a terminal or to the worker's group does not reach the guard.
    """

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Have a process group killed when this process dies; OSError: no guard can start now."""
        self._groups.add(group)
        try:
            self._tell(group)
        except OSError:
            self._groups.discard(group)  # another group may soon have its number
            raise

    def remove(self, group: int) -> None:
        """Forget a process group that is gone; another group may soon have its number."""
        self._groups.discard(group)
        self._tell(-group)

    def _tell(self, number: int) -> None:
        if self._process is None or not self._write(f"{number}\n"):
            self._start()  # the first time, or after somebody killed the guard
            self._write("".join(f"{group}\n" for group in self._groups))

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write(self, text: str) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def reap(self, pid: int) -> bool:
        """If the process is the guard, reap the process and return True."""
        if self._process is None or self._process.pid != pid:
            return False
        self._process.wait()
        return True

    def close(self) -> None:
        """End the guard, which kills the groups that still exist."""
        if self._process is not None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
            except OSError:
                pass
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                pass  # the guard ends by itself when the pipe ends
            self._process = None


_PREFIX = "tidemill-worker-"


class RuntimeFolder:
    """A worker's temporary folder: stacks of its processes, and sometimes its scoreboard.

    The worker locks the folder while it runs and removes the folder at its end. A killed worker
    leaves its folder. The next worker that starts on the machine takes the free lock and removes
    the folder. Another worker may also remove a new folder before it is locked. Then the maker of
    the folder sees that it is gone and makes another one.
    """

    def __init__(self) -> None:
        _sweep(tempfile.gettempdir())
        while True:
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            fd = _locked(self.path, fcntl.LOCK_EX)
            if fd is not None:
                self._fd = fd
                return

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _sweep(parent: str) -> None:
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(_PREFIX) and is_mine(path):
            fd = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(fd)


def _locked(path: str, how: int) -> int | None:
    """A descriptor that holds a folder's lock; None when the lock is taken or the folder gone."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError:
        return None
    try:
        fcntl.flock(fd, how)
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
