"""One worker process as its supervisor sees it: spawned by exec, fed, watched, killed::

starting ──► serving ──► quiet ──► gone
                └──► stuck ─(grace)─► killed ──► gone
                                        └─► unkillable ──► gone
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Container, Iterable, Sequence

from tidemill.app import Tidemill
from tidemill.board import Board, Running
from tidemill.clock import machine_time
from tidemill.job import Command, Lease
from tidemill.worker.grace import Stuck
from tidemill.worker.process import GAVE_UP, Process
from tidemill.worker.stacks import stacks_of_threads
from tidemill.worker.thread_states import live_threads
from tidemill.worker.wire import Down, Hello, Line, Setup, Up

__all__ = ["KILL_PATIENCE", "WITNESS_PATIENCE", "Hand"]

WITNESS_PATIENCE = 0.55
"""Seconds past a deadline after which a process that says nothing is taken to be stuck."""

REAP_PATIENCE = 1.0
"""Seconds a process has to exit by itself once it has closed its line."""

KILL_PATIENCE = 5.0
"""Seconds after which a process that outlives its SIGKILL is said to be unkillable."""


class Hand:
    """One worker process, and the leases it holds."""

    def __init__(self, first_slot: int, share: int, slots: int, *, extra: bool = False) -> None:
        self.extra = extra  # started for jobs that must run alone
        self.alone = 0  # token of the latest of these
        self.board: Board | None = None
        self.first_slot = first_slot
        self.share = share  # rows of the board
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
        self.stuck = Stuck()
        self.urgent = False  # it has said something that calls for a look
        self.killed = False  # before it went by itself: what it runs uses no attempt
        self.killed_at = 0.0  # machine time of its SIGKILL
        self.unkillable = False
        self.dump_at = 0.0  # machine time at which its stacks are taken from outside
        self.exit_patience = 0.0  # seconds to exit in, after a proper end
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
        known = list(mill.tasks), list(mill.allow_imports)
        self.hello = Hello(mill.url, (), len(mill.tasks), "", schedules, *known)
        self._talk(ours, setup)

    def introduce(self, board: Board, setup: Setup) -> None:
        """Show it the board, as it was started without."""
        self.board = board
        self.line.post(Down(setup=setup))

    def _talk(self, sock: socket.socket, setup: Setup) -> None:
        self.line: Line[Down, Up] = Line(sock, Up)
        self.line.last_words = setup.last_words
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

    def stop_in(self, seconds: float) -> None:
        """Tell it, and the jobs that it runs, that it will be killed after that time."""
        self.line.post(Down(stop=seconds))

    # -- watching -------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """Return the leases of running jobs whose verdict has not come."""
        return self.rows(self.held)

    def rows(self, tokens: Container[int]) -> list[Running]:
        """The rows of these tokens on the board."""
        if self.board is None:
            return []
        return self.board.running(self.first_slot + 1, self.share - 1, tokens)

    def strike(self, tokens: Collection[int]) -> None:
        """Take stuck jobs off the board."""
        for row in self.rows(tokens):
            assert self.board is not None
            self.board.end(row.slot)

    def overdue(self, now: float) -> list[Running]:
        """What runs so long past its time that the process itself should have said so."""
        doomed = self.doomed
        return [
            row
            for row in self.running()
            if (row.deadline and now > row.deadline + WITNESS_PATIENCE)
            or (doomed and now > doomed.get(row.token, now))
        ]

    def is_over(self, grace: float, now: float) -> bool:
        """True when a process with a stuck job is to be killed."""
        if self.board is not None:
            self.stuck.heard(self.board.beat_of(self.first_slot), now)
        neighbours = [self.held[row.token] for row in self.running()]
        return self.stuck.is_over(neighbours, grace, now)

    def next_look(self, grace: float, now: float) -> float:
        """Machine time at which to look at it again, as far as its silence says something."""
        if self.urgent:
            return now
        if self.killed_at:
            age = now - self.killed_at
            return now + (0.01 if age < 0.5 else 0.1 if age < 2 * KILL_PATIENCE else 1.0)
        times = [self.dump_at or float("inf")]
        if self.stuck:
            times.append(self.stuck.next_look(grace, now))
        if self.closed_at:
            times.append(now + (0.02 if now - self.closed_at < REAP_PATIENCE else 0.25))
        if not self.line.push():
            times.append(now + 0.005)
        if self.doomed:
            self.doomed = {t: at for t, at in self.doomed.items() if t in self.held}
            times += self.doomed.values()
        if self.timed:
            # Boards are written silently: while jobs with a timeout are out, look now and then.
            times.append(now + 0.25)
        return min(times)

    def deadlines(self) -> list[float]:
        """When what it runs should have ended, and it should have said so."""
        if not self.timed:
            return []
        return [row.deadline + WITNESS_PATIENCE for row in self.running() if row.deadline]

    def stacks(self, first: Iterable[Running] = ()) -> str:
        """The stacks of the threads that run jobs, whoever has the interpreter lock."""
        if self._process is None or self.exited() or self.hello is None:
            return ""
        threads = [row.thread for row in (*first, *self.running())]
        return stacks_of_threads(self._stacks, self.pid, threads)

    # -- ending ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """End it and everything it started; never waits."""
        self.killed = True
        self.killed_at = self.killed_at or machine_time()
        if self._process is None:
            self.line.close()  # a thread cannot be killed; it notices the closed line
        elif not self.exited():
            self._kill_group()

    def exited(self, patience: float = 0.0) -> bool:
        """True when it is dead; waits up to ``patience`` seconds for that."""
        if self._process is None or self._process.poll() is not None:
            return True
        if not patience:
            return False
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def abandon(self, now: float) -> bool:
        """Reap a process that closed its line and lives on. True once the process is dead.

        After a proper end its ``atexit`` functions run, for as long as a shutdown may take.
        """
        patience = max(REAP_PATIENCE, self.exit_patience) if self.leaving else REAP_PATIENCE
        if not self.exited() and now - self.closed_at > patience:
            self.killed_at = now
            self._kill_group()
        return self.exited()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()  # a task may have moved it into another group

    def cause(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode if self._process is not None else 0
        if code == GAVE_UP:
            return f"worker process {self.pid} gave up"
        if code is not None and code < 0:
            return f"worker process {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker process {self.pid} exited with code {code}"

    @property
    def gave_up(self) -> bool:
        """True when it ended itself, as one of its jobs had made it useless."""
        return self._process is not None and self._process.returncode == GAVE_UP

    def note_unkillable(self, since: float) -> None:
        """Show on the board, for ``tidemill doctor``, that the process outlives its SIGKILL."""
        self.unkillable = True
        if self.board is not None:
            self.board.mark_unkillable(self.first_slot, since)

    def interrupted(self) -> list[Running]:
        """Jobs that run no further in a process that outlives its SIGKILL.

        The thread of an interrupted job has ended, and each other thread runs another job. A thread
        that runs no job may be a helper of any of them, inside its last system call.
        """
        rows, left = self.running(), live_threads(self.pid)
        if left is None or not self.stuck.threads.union(row.thread for row in rows) >= {*left}:
            return []
        return [row for row in rows if row.thread not in left]

    def state(self) -> str:
        """Return the kernel's words on the threads of a process that does not die."""
        left = live_threads(self.pid)
        return "unknown" if left is None else ", ".join(sorted({*left.values()})) or "Z"

    def bury(self) -> None:
        """End the runs of a dead process. Its rows stay until its verdicts are stored."""
        if self._process is not None:
            self._kill_group()
            with contextlib.suppress(OSError):
                os.unlink(self._stacks)
        self.line.close()
        if self._thread is not None:
            self._thread.join(REAP_PATIENCE)
