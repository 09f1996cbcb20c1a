"""A worker process as its supervisor sees it: spawned, given leases, watched, killed::

starting ──► serving ──► quiet ──► gone
                └──► stuck ─(grace)─► killed ──► gone
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterable, Sequence

from tidemill.core.clock import clock
from tidemill.core.job import Lease
from tidemill.core.owner import Command
from tidemill.core.scoreboard import Running, Scoreboard
from tidemill.worker.child import GAVE_UP
from tidemill.worker.child_protocol import Down, Hello, MessageSocket, Setup, Up
from tidemill.worker.machine import Body
from tidemill.worker.settings import Waits
from tidemill.worker.stuck_grace import StuckJobs


class WorkerProcess:
    """One worker process, and the leases it holds."""

    def __init__(
        self, first_slot: int, share: int, slots: int, waits: Waits, *, extra: bool = False
    ) -> None:
        self.waits = waits
        self.extra = extra  # True for a process that runs only suspect jobs, one at a time
        self.alone = 0  # token of the latest suspect job
        self.board: Scoreboard | None = None
        self.first_slot = first_slot
        self.share = share  # the number of its rows on the scoreboard
        self.slots = slots
        self.held: dict[int, Lease] = {}
        self.lost: set[int] = set()  # tokens of leases that other workers have now
        self.timed = False  # True when the process may hold jobs with a timeout
        # Token of a terminated job → the time after which the job counts as stuck.
        self.doomed: dict[int, float] = {}
        self.depth = 0
        self.hello: Hello | None = None
        # The process that leaves when this process serves.
        self.replaces: WorkerProcess | None = None
        self.quiet = False
        self.leaving = False  # True when the process has reported that it leaves
        self.stuck = StuckJobs()
        self.urgent = False  # True when a report of the process needs a look at once
        # True when we killed the process before it ended by itself. Then its running jobs use no
        # attempt.
        self.killed = False
        self.killed_at = 0.0  # machine time of its SIGKILL
        # Machine time at which the log last said that the process outlives SIGKILL; 0 for never.
        self.undead_at = 0.0
        self.dump_at = 0.0  # machine time at which its stacks are read from outside
        self.exit_patience = 0.0  # seconds that the process may take to exit after its last job
        self.closed_at = 0.0  # machine time at which its socket ended
        # Machine time since which a process that is to end runs no job; 0 for other processes.
        self.idle_at = 0.0
        self.born = clock.machine()
        self.pid = 0
        self._body: Body
        self.socket: MessageSocket[Down, Up]

    # -- starting -------------------------------------------------------------------------------

    def begin(self, body: Body, setup: Setup) -> None:
        """Take a process that the machine has started, and send the setup."""
        self._body = body
        self.pid, self.hello, self.socket = body.pid, body.hello, body.socket
        self.socket.post(Down(setup=setup))

    def introduce(self, board: Scoreboard, setup: Setup) -> None:
        """Show the scoreboard to a process that was started without one."""
        self.board = board
        self.socket.post(Down(setup=setup))

    def fileno(self) -> int:
        """The descriptor of the socket, for ``select``."""
        return self.socket.fileno()

    # -- talking --------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True while the app is loaded and the process is not about to end."""
        return self.hello is not None and not self.hello.error and self.staying

    @property
    def staying(self) -> bool:
        """True while the process is not about to end."""
        return not (self.quiet or self.leaving or self.stuck or self.killed or self.closed_at)

    @property
    def room(self) -> int:
        """The number of further leases that the process would like to hold."""
        return max(0, self.depth - len(self.held)) if self.open else 0

    @property
    def open(self) -> bool:
        """True while the process may get any job."""
        return self.serving and not self.extra and not self.isolates

    @property
    def isolates(self) -> bool:
        """True while the process holds a job that must run alone."""
        return self.alone in self.held

    def give(self, leases: Sequence[Lease]) -> None:
        """Send leases. The pool settles the leases that the process still holds when it dies."""
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
            self.doomed[command.token] = clock.machine() + self.waits.silent
        self.socket.post(Down(commands=[command]))

    def lose(self) -> None:
        """Tell the process that its leases are lost: it starts no job, and cancels running jobs."""
        self.lost = set(self.held)
        self.socket.post(Down(commands=[Command("lost")]))

    def be_quiet(self) -> None:
        """Ask the process to start no more jobs, and to end after its running jobs."""
        if not self.quiet:
            self.quiet = True
            self.socket.post(Down(quiet=True))

    def stop_in(self, seconds: float) -> None:
        """Tell the process and its running jobs that the process will be killed after this time."""
        self.socket.post(Down(stop=seconds))

    # -- watching -------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """The scoreboard rows of running jobs whose verdict has not come."""
        return self.rows(self.held)

    def rows(self, tokens: Iterable[int]) -> list[Running]:
        """The rows of these tokens on the scoreboard."""
        if self.board is None:
            return []
        return self.board.running(self.first_slot + 1, self.share - 1, tokens)

    def strike(self, tokens: Collection[int]) -> None:
        """Take stuck jobs off the scoreboard."""
        for row in self.rows(tokens):
            assert self.board is not None
            self.board.clear(row.slot, 1)

    def overdue(self, now: float) -> list[Running]:
        """The rows of overdue jobs that the process itself should already have reported."""
        doomed, silent = self.doomed, self.waits.silent
        return [
            row
            for row in self.running()
            if (row.deadline and now >= row.deadline + silent)
            or now >= doomed.get(row.token, math.inf)
        ]

    def is_over(self, grace: float, now: float) -> bool:
        """True when a process with a stuck job is to be killed."""
        if self.board is not None:
            self.stuck.heartbeat.note(self.board.beat_of(self.first_slot), now)
        neighbours = [self.held[row.token] for row in self.running()]
        return self.stuck.is_over(neighbours, grace, now)

    def next_look(self, grace: float, now: float) -> float:
        """Machine time of the next look at the process. A look finds changes without a signal."""
        if self.urgent:
            return now
        if self.killed_at:
            age = now - self.killed_at
            return now + (0.01 if age < 0.5 else 0.1 if age < 2 * self.waits.kill else 1.0)
        times = [self.dump_at or float("inf")]
        if self.stuck:
            times.append(self.stuck.next_look(grace, now))
        if self.closed_at:
            times.append(now + (0.02 if now - self.closed_at < self.waits.reap else 0.25))
        if not self.socket.push():
            times.append(now + 0.005)
        elif self.quiet or self.leaving:
            times.append(now + 0.5)
        if self.doomed:
            self.doomed = {t: at for t, at in self.doomed.items() if t in self.held}
            # A terminated job that waits in a blocked process does not count as stuck.
            times += [at if at > now else now + 0.25 for at in self.doomed.values()]
        if self.timed:
            # The scoreboard sends no signal. So look now and then while a job has a timeout.
            times.append(now + 0.25)
        return min(times)

    def deadlines(self) -> list[float]:
        """Machine times by which the process should have reported its overdue jobs."""
        if not self.timed or self.killed_at or self.closed_at:
            return []
        return [row.deadline + self.waits.silent for row in self.running() if row.deadline]

    def stacks(self, first: Iterable[Running] = ()) -> str:
        """The stacks of the threads that run jobs, even if a task keeps the interpreter lock."""
        return self._stacks_of(row.thread for row in (*first, *self.running()))

    def main_stack(self) -> str:
        """The stack of the main thread, which runs the functions of ``process_stop``."""
        return self._stacks_of((self.pid,))

    def _stacks_of(self, threads: Iterable[int]) -> str:
        return "" if self.exited() or self.hello is None else self._body.stacks(threads)

    # -- ending ---------------------------------------------------------------------------------

    def kill(self, *, by_us: bool = True) -> None:
        """Kill the process and everything that it started; never waits.

        With ``by_us`` its running jobs use no attempt.
        """
        self.killed = by_us
        self.killed_at = self.killed_at or clock.machine()
        self._body.kill()

    def exited(self, patience: float = 0.0) -> bool:
        """True when the process is dead; waits up to ``patience`` seconds for its death."""
        return self._body.exited(patience)

    def lingers(self, now: float) -> bool:
        """True when the process runs no job any more and should have ended long ago.

        After its last job, its functions of ``process_stop`` and ``atexit`` may run as long as a
        shutdown may take.
        """
        if self.closed_at:
            self.idle_at = self.idle_at or self.closed_at
            proper = self.leaving
        elif proper := self.quiet or self.leaving:
            self.idle_at = 0.0 if self.running() else self.idle_at or now
        patience = max(self.waits.reap, self.exit_patience if proper else 0.0)
        return bool(self.idle_at) and now - self.idle_at > patience

    def cause(self) -> str:
        """How the process ended, in words."""
        code = self._body.returncode
        if code == GAVE_UP:
            return f"worker process {self.pid} gave up"
        if code is not None and code < 0:
            return f"worker process {self.pid} was killed by {signal.Signals(-code).name}"
        return f"worker process {self.pid} exited with code {code}"

    @property
    def gave_up(self) -> bool:
        """True when the process ended itself because a job had broken it."""
        return self._body.returncode == GAVE_UP

    def bury(self) -> None:
        """Kill the programs that a dead process has started.

        The rows of the process stay until its verdicts are stored.
        """
        self._body.bury()
