"""One worker process as its supervisor sees it: spawned by exec, fed, watched, killed.

    starting ──► serving ──► quiet ──► gone
                    └──► stuck ─(drain)─► killed ──► gone
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from tidemill.app import Tidemill
from tidemill.board import Board, Running
from tidemill.clock import machine_time
from tidemill.job import Command, Lease
from tidemill.worker.process import Process
from tidemill.worker.wire import Closed, Down, Hello, Line, Setup, Up

__all__ = ["Hand"]

REAP_PATIENCE = 2.0
"""Seconds a process has to exit by itself once it has closed its line."""


class Hand:
    """One worker process, and the leases it holds."""

    def __init__(self, board: Board, first_slot: int, slots: int) -> None:
        self.board = board
        self.first_slot = first_slot
        self.slots = slots
        self.held: dict[int, Lease] = {}
        self.depth = 0
        self.hello: Hello | None = None
        self.quiet = False
        self.leaving = False  # it said so itself
        self.stuck: set[int] = set()  # tokens whose verdict fell without them
        self.kill_at = float("inf")  # machine time
        self.killed = False
        self.born = machine_time()
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    # -- starting -------------------------------------------------------------------------------

    def spawn(self, setup: Setup) -> None:
        """Start it as a process of its own, leading its own process group."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        self._stacks = setup.stacks
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tidemill.worker.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,
            env={**os.environ, "TIDEMILL_SUPERVISOR": str(os.getpid())},
        )
        theirs.close()
        self.pid = self._process.pid
        self._talk(ours, setup)

    def run_here(self, mill: Tidemill, setup: Setup) -> None:
        """Start it as a thread of this process: for tests, notebooks and ``memory://``."""
        ours, theirs = socket.socketpair()
        process = Process(mill, setup, Line(theirs, Down), local=True)
        self._thread = threading.Thread(target=process.serve, name="tidemill-local", daemon=True)
        self._thread.start()
        self.pid = os.getpid()
        self.hello = Hello(mill.url, (), len(mill.tasks))
        self._talk(ours, setup)

    def _talk(self, sock: socket.socket, setup: Setup) -> None:
        self.line: Line[Down, Up] = Line(sock, Up)
        with contextlib.suppress(Closed):
            self.line.send(Down(setup=setup))

    def fileno(self) -> int:
        """For select."""
        return self.line.fileno()

    # -- talking --------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True while it may be given work."""
        return self.hello is not None and not (self.quiet or self.leaving or self.stuck or self.killed)

    @property
    def room(self) -> int:
        """How many more leases it would like to hold."""
        return max(0, self.depth - len(self.held)) if self.serving else 0

    def give(self, leases: Sequence[Lease]) -> None:
        """Hand it leases. When it is gone they stay on its account and are settled with the rest."""
        for lease in leases:
            self.held[lease.token] = lease
        with contextlib.suppress(Closed):
            self.line.send(Down(leases=list(leases)))

    def tell(self, command: Command) -> None:
        """Pass a command on."""
        with contextlib.suppress(Closed):
            self.line.send(Down(commands=[command]))

    def be_quiet(self) -> None:
        """Ask it to start nothing more and to go when what runs has ended."""
        if not self.quiet:
            self.quiet = True
            with contextlib.suppress(Closed):
                self.line.send(Down(quiet=True))

    # -- ending ---------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """What its part of the board says it runs."""
        return self.board.running(self.first_slot, self.slots)

    def overdue(self, patience: float) -> list[int]:
        """Tokens that run more than ``patience`` seconds past their deadline."""
        late = machine_time() - patience
        return [
            row.token
            for row in self.running()
            if row.deadline and row.deadline < late and row.token in self.held
        ]

    def stacks(self, patience: float = 0.3) -> str:
        """All its threads' stacks, written by a C handler that needs no interpreter lock."""
        if self._process is None:
            return ""
        try:
            before = os.path.getsize(self._stacks)
            os.kill(self.pid, signal.SIGUSR1)
            until = machine_time() + patience
            pause = threading.Event()
            while os.path.getsize(self._stacks) == before and machine_time() < until:
                pause.wait(0.005)
            pause.wait(0.005)
            with open(self._stacks, encoding="utf-8", errors="replace") as file:
                file.seek(before)
                return file.read()
        except OSError:
            return ""

    def kill(self) -> None:
        """End it and everything it started, now, and wait until it is dead."""
        self.killed = True
        if self._process is None:
            self.line.close()  # a thread cannot be killed; it notices the closed line
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def reap(self) -> None:
        """Its line has closed: wait for the end that causes it, and make sure of it."""
        if self._process is None:
            return
        try:
            self._process.wait(REAP_PATIENCE)
        except subprocess.TimeoutExpired:  # it closed its line and lives on: no use to anyone
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def cause(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode if self._process is not None else 0
        if code is not None and code < 0:
            return f"worker process {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker process {self.pid} exited with code {code}"

    def bury(self) -> None:
        """It is dead: end what it had started, free what was its."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._stacks)
        self.board.clear(self.first_slot, self.slots)
        self.line.close()
