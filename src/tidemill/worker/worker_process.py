"""A worker process as its supervisor sees it: spawned, given leases, watched, killed::

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

from tidemill.client.runtime import Runtime
from tidemill.core.clock import machine_time
from tidemill.core.job import Command, Lease
from tidemill.core.scoreboard import Running, Scoreboard
from tidemill.worker.child import GAVE_UP, Child
from tidemill.worker.child_protocol import Down, Hello, MessageSocket, Setup, Up
from tidemill.worker.stacks import stacks_of_threads
from tidemill.worker.stuck_grace import StuckJobs
from tidemill.worker.thread_states import live_threads

__all__ = ["KILL_PATIENCE", "WITNESS_PATIENCE", "WorkerProcess"]

WITNESS_PATIENCE = 0.55
"""Seconds past a deadline after which a silent process counts as stuck."""

REAP_PATIENCE = 1.0
"""Seconds a process has to exit by itself once it has closed its socket."""

KILL_PATIENCE = 5.0
"""Seconds after which a process that outlives its SIGKILL is said to be unkillable."""

_EXAMINE_EVERY = 5.0
"""Seconds between two looks at a busy process, which somebody else may have killed."""


class WorkerProcess:
    """One worker process, and the leases it holds."""

    def __init__(self, first_slot: int, share: int, slots: int, *, extra: bool = False) -> None:
        self.extra = extra  # started for suspect jobs, which run alone
        self.alone = 0  # token of the latest suspect job
        self.board: Scoreboard | None = None
        self.first_slot = first_slot
        self.share = share  # rows of the scoreboard
        self.slots = slots
        self.held: dict[int, Lease] = {}
        self.lost: set[int] = set()  # tokens of leases that other workers have by now
        self.timed = False  # it may hold jobs that have a timeout
        self.doomed: dict[int, float] = {}  # terminated tokens, and when they count as stuck
        self.depth = 0
        self.hello: Hello | None = None
        self.replaces: WorkerProcess | None = None  # the process that goes once this one serves
        self.quiet = False
        self.leaving = False  # it reported that it leaves
        self.stuck = StuckJobs()
        self.urgent = False  # it has reported something that calls for a look
        self.killed = False  # by us, before it went by itself: its running jobs use no attempt
        self.killed_at = 0.0  # machine time of its SIGKILL
        self.unkillable = False
        self.dump_at = 0.0  # machine time at which its stacks are taken from outside
        self.exit_patience = 0.0  # seconds to exit in, after a proper end
        self.closed_at = 0.0  # machine time at which its socket ended
        self._examined = 0.0  # machine time of the last look whether somebody killed it
        self.born = machine_time()
        self.pid = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    # -- starting -------------------------------------------------------------------------------

    def spawn(self, setup: Setup) -> None:
        """Start it as a process of its own, leading its own process group."""
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
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
        self._talk(ours, setup)

    def run_here(self, mill: Runtime, setup: Setup) -> None:
        """Start it as a thread of this process: for tests, notebooks and ``memory://``."""
        ours, theirs = socket.socketpair()
        child = Child(mill, setup, MessageSocket(theirs, Down), local=True)
        self._thread = threading.Thread(target=child.serve, name="tidemill-local", daemon=True)
        self._thread.start()
        self.pid = os.getpid()
        schedules = mill.schedules.declared()
        known = list(mill.tasks), list(mill.allow_imports)
        self.hello = Hello(mill.url, (), len(mill.tasks), "", schedules, *known)
        self._talk(ours, setup)

    def introduce(self, board: Scoreboard, setup: Setup) -> None:
        """Show the scoreboard to a process that was started without one."""
        self.board = board
        self.socket.post(Down(setup=setup))

    def _talk(self, sock: socket.socket, setup: Setup) -> None:
        self.socket: MessageSocket[Down, Up] = MessageSocket(sock, Up)
        self.socket.last_words = setup.last_words
        self.socket.post(Down(setup=setup))

    def fileno(self) -> int:
        """For select."""
        return self.socket.fileno()

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
        """Send it leases; when it dies, the pool settles the leases that it still holds."""
        for lease in leases:
            self.held[lease.token] = lease
            if lease.timeout:
                self.timed = True
            if lease.losses:
                self.alone = lease.token
        self.socket.post(Down(leases=list(leases)))

    def tell(self, command: Command) -> None:
        """Pass a command on. A terminated job that does not end counts as stuck."""
        if command.verb == "terminate":
            self.doomed[command.token] = machine_time() + WITNESS_PATIENCE
        self.socket.post(Down(commands=[command]))

    def lose(self) -> None:
        """Say that its leases are lost: it starts none of them, and cancels its running jobs."""
        self.lost = set(self.held)
        self.socket.post(Down(commands=[Command("lost")]))

    def be_quiet(self) -> None:
        """Ask it to start no more jobs, and to go when the running ones have ended."""
        if not self.quiet:
            self.quiet = True
            self.socket.post(Down(quiet=True))

    def stop_in(self, seconds: float) -> None:
        """Tell it, and the jobs that it runs, that it will be killed after that time."""
        self.socket.post(Down(stop=seconds))

    # -- watching -------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """Return the leases of running jobs whose verdict has not come."""
        return self.rows(self.held)

    def rows(self, tokens: Container[int]) -> list[Running]:
        """The rows of these tokens on the scoreboard."""
        if self.board is None:
            return []
        return self.board.running(self.first_slot + 1, self.share - 1, tokens)

    def strike(self, tokens: Collection[int]) -> None:
        """Take stuck jobs off the scoreboard."""
        for row in self.rows(tokens):
            assert self.board is not None
            self.board.end(row.slot)

    def overdue(self, now: float) -> list[Running]:
        """Jobs so long past their deadline that the process itself should have reported them."""
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
        """Machine time of the next look at it: some of its changes send no signal."""
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
        if not self.socket.push():
            times.append(now + 0.005)
        if self.held and self._popen is not None and not self.closed_at:
            times.append(max(now, self._examined + _EXAMINE_EVERY))
        if self.doomed:
            self.doomed = {t: at for t, at in self.doomed.items() if t in self.held}
            times += self.doomed.values()
        if self.timed:
            # The scoreboard sends no signal: look now and then while a job has a timeout.
            times.append(now + 0.25)
        return min(times)

    def deadlines(self) -> list[float]:
        """Machine times by which the process should have reported its overdue jobs."""
        if not self.timed:
            return []
        return [row.deadline + WITNESS_PATIENCE for row in self.running() if row.deadline]

    def stacks(self, first: Iterable[Running] = ()) -> str:
        """The stacks of the threads that run jobs, whoever has the interpreter lock."""
        if self._popen is None or self.exited() or self.hello is None:
            return ""
        threads = [row.thread for row in (*first, *self.running())]
        return stacks_of_threads(self._stacks, self.pid, threads)

    # -- ending ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """End it and everything it started; never waits."""
        self.killed = True
        self.killed_at = self.killed_at or machine_time()
        if self._popen is None:
            self.socket.close()  # a thread cannot be killed; it notices the closed socket
        elif not self.exited():
            self._kill_group()

    def exited(self, patience: float = 0.0) -> bool:
        """True when it is dead; waits up to ``patience`` seconds for that."""
        if self._popen is None or self._popen.poll() is not None:
            return True
        if not patience:
            return False
        try:
            self._popen.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        return True

    def is_half_dead(self, now: float) -> bool:
        """True when somebody killed a busy process, and a system call keeps one of its threads.

        Such a process closes no socket and sends no signal. Looks every few seconds only.
        """
        if self._popen is None or not self.held or now < self._examined + _EXAMINE_EVERY:
            return False
        self._examined = now
        threads = live_threads(self.pid)
        if not threads or (self.pid in threads and threads != {self.pid: "D"}):
            return False  # a living process has more threads than the main thread
        self.exit_patience = 0.0
        return True

    def abandon(self, now: float) -> bool:
        """Reap a process that closed its socket and lives on. True once the process is dead.

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
        if self._popen is not None:
            self._popen.kill()  # a task may have moved it into another group

    def cause(self) -> str:
        """How the process ended, in words."""
        code = self._popen.returncode if self._popen is not None else 0
        if code == GAVE_UP:
            return f"worker process {self.pid} gave up"
        if code is not None and code < 0:
            return f"worker process {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker process {self.pid} exited with code {code}"

    @property
    def gave_up(self) -> bool:
        """True when the process ended itself, as one of its jobs had made it useless."""
        return self._popen is not None and self._popen.returncode == GAVE_UP

    def note_unkillable(self, since: float) -> None:
        """Show on the scoreboard that the process outlives SIGKILL: ``tidemill doctor`` tells."""
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
        """The states of the threads of a process that does not die, in the kernel's letters."""
        left = live_threads(self.pid)
        return "unknown" if left is None else ", ".join(sorted({*left.values()})) or "Z"

    def bury(self) -> None:
        """End the runs of a dead process. Its rows stay until its verdicts are stored."""
        if self._popen is not None:
            self._kill_group()
            with contextlib.suppress(OSError):
                os.unlink(self._stacks)
        self.socket.close()
        if self._thread is not None:
            self._thread.join(REAP_PATIENCE)
