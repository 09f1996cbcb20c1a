"""One worker process as its supervisor sees it: spawned by exec, fed, watched, killed::

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
from tidemill.worker.wire import Down, Hello, Line, Setup, Up

__all__ = ["WITNESS_PATIENCE", "Hand"]

WITNESS_PATIENCE = 0.55
"""Seconds past a deadline after which a process that says nothing is taken to be stuck."""

REAP_PATIENCE = 2.0
"""Seconds a process has to exit by itself once it has closed its line."""


class Hand:
    """One worker process, and the leases it holds."""

    def __init__(self, first_slot: int, slots: int, *, extra: bool = False) -> None:
        self.extra = extra  # started for jobs that must run alone
        self.alone = 0  # token of the latest of these
        self.board: Board | None = None
        self.first_slot = first_slot
        self.slots = slots
        self.held: dict[int, Lease] = {}
        self.lost: set[int] = set()  # tokens among them that are others' by now
        self.timed = False  # it may hold jobs that have a timeout
        self.doomed: dict[int, float] = {}  # terminated tokens, and when they count as stuck
        self.depth = 0
        self.hello: Hello | None = None
        self.replaces: Hand | None = None  # who goes once this one serves
        self.quiet = False
        self.leaving = False  # it said so itself
        # Tokens whose verdict fell without them → machine time at which they are to run again.
        self.stuck: dict[int, float] = {}
        self.kill_at = float("inf")  # machine time
        self.killed = False
        self.closed_at = 0.0  # machine time at which its line ended
        self.born = machine_time()
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    # -- starting -------------------------------------------------------------------------------

    def spawn(self, setup: Setup) -> None:
        """Start it as a process of its own, leading its own process group."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        self._stacks = setup.stacks
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidemill.worker", str(theirs.fileno())],
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
        self.pid = self._process.pid
        self._talk(ours, setup)

    def run_here(self, mill: Tidemill, setup: Setup) -> None:
        """Start it as a thread of this process: for tests, notebooks and ``memory://``."""
        ours, theirs = socket.socketpair()
        process = Process(mill, setup, Line(theirs, Down), local=True)
        self._thread = threading.Thread(target=process.serve, name="tidemill-local", daemon=True)
        self._thread.start()
        self.pid = os.getpid()
        schedules = mill.schedules.declared()
        self.hello = Hello(mill.url, (), len(mill.tasks), schedules=schedules)
        self._talk(ours, setup)

    def introduce(self, board: Board, setup: Setup) -> None:
        """Show it the board, as it was started without."""
        self.board = board
        self.line.post(Down(setup=setup))

    def _talk(self, sock: socket.socket, setup: Setup) -> None:
        self.line: Line[Down, Up] = Line(sock, Up)
        self.line.post(Down(setup=setup))

    def fileno(self) -> int:
        """For select."""
        return self.line.fileno()

    # -- talking --------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True while it works, and nothing says that it goes."""
        return self.hello is not None and not self.hello.error and self.staying

    @property
    def staying(self) -> bool:
        """True while nothing says that it goes."""
        return not (self.quiet or self.leaving or self.stuck or self.killed or self.closed_at)

    @property
    def room(self) -> int:
        """How many more leases it would like to hold."""
        return max(0, self.depth - len(self.held)) if self.open else 0

    @property
    def open(self) -> bool:
        """True while it may be given any work."""
        return self.serving and not self.extra and not self.isolates

    @property
    def isolates(self) -> bool:
        """True while it holds a job that must run alone."""
        return self.alone in self.held

    def give(self, leases: Sequence[Lease]) -> None:
        """Hand it leases; when it goes, what it still holds is settled for it."""
        for lease in leases:
            self.held[lease.token] = lease
            if lease.timeout:
                self.timed = True
            if lease.losses:
                self.alone = lease.token
        self.line.post(Down(leases=list(leases)))

    def tell(self, command: Command) -> None:
        """Pass a command on. What is to be terminated and does not end counts as stuck."""
        if command.verb == "terminate":
            self.doomed[command.token] = machine_time() + WITNESS_PATIENCE
        self.line.post(Down(commands=[command]))

    def lose(self) -> None:
        """Its leases are lost: what has not started it gives back, and what runs is told."""
        self.lost = set(self.held)
        self.line.post(Down(commands=[Command("lost")]))

    def be_quiet(self) -> None:
        """Ask it to start nothing more and to go when what runs has ended."""
        if not self.quiet:
            self.quiet = True
            self.line.post(Down(quiet=True))

    # -- watching -------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """What its part of the board says it runs."""
        return self.board.running(self.first_slot, self.slots) if self.board else []

    def neighbours(self) -> list[Running]:
        """What it runs and is still expected to end by itself."""
        return [row for row in self.running() if row.token in self.held]

    def strike_stuck(self) -> None:
        """Take what is stuck off the board."""
        if self.board is not None:
            for row in self.running():
                if row.token in self.stuck:
                    self.board.end(row.slot)

    def overdue(self, now: float) -> list[Running]:
        """What runs so long past its time that the process itself should have said so."""
        doomed = self.doomed
        return [
            row
            for row in self.neighbours()
            if (row.deadline and now > row.deadline + WITNESS_PATIENCE)
            or (doomed and now > doomed.get(row.token, now))
        ]

    def next_look(self, now: float) -> float:
        """Machine time at which to look at it again, as far as its silence says something."""
        times = [self.kill_at]
        if self.closed_at:
            times.append(now + 0.02)
        if not self.line.push():
            times.append(now + 0.005)
        if self.doomed:
            self.doomed = {t: at for t, at in self.doomed.items() if t in self.held}
            times += self.doomed.values()
        if self.timed:
            # Boards are written silently: while jobs with a timeout are out, look now and then.
            times.append(now + 0.25)
            times += [row.deadline + WITNESS_PATIENCE for row in self.running() if row.deadline]
        return min(times)

    def stacks(self, patience: float = 0.3) -> str:
        """All its threads' stacks, written by a C handler that needs no interpreter lock."""
        if self._process is None or self._process.poll() is not None or self.hello is None:
            return ""
        try:
            before = size = os.path.getsize(self._stacks)
            os.kill(self.pid, signal.SIGUSR1)
            until = machine_time() + patience
            pause = threading.Event()
            while machine_time() < until:
                pause.wait(0.005)
                last, size = size, os.path.getsize(self._stacks)
                if before < size == last:
                    break
            with open(self._stacks, encoding="utf-8", errors="replace") as file:
                file.seek(before)
                return file.read()
        except OSError:
            return ""

    # -- ending ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """End it and everything it started, now, and wait until it is dead."""
        self.killed = True
        if self._process is None:
            self.line.close()  # a thread cannot be killed; it notices the closed line
            return
        self._kill_group()
        self._process.wait()

    def exited(self, patience: float = 0.0) -> bool:
        """True when it is dead; waits up to ``patience`` seconds for that."""
        if self._process is None:
            return True
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def abandon(self, now: float) -> bool:
        """It closed its line and lives on: no use to anyone. True once it is dead."""
        if not self.exited() and now - self.closed_at > REAP_PATIENCE:
            self._kill_group()
        return self.exited()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def cause(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode if self._process is not None else 0
        if code is not None and code < 0:
            return f"worker process {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker process {self.pid} exited with code {code}"

    def bury(self) -> None:
        """It is dead: end what it had started, free what was its."""
        if self._process is not None:
            self._kill_group()
            self._process.wait()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._stacks)
        if self.board is not None:
            self.board.clear(self.first_slot, self.slots)
        self.line.close()
        if self._thread is not None:
            self._thread.join(REAP_PATIENCE)
