"""A worker process as its supervisor sees it: spawned, given leases, watched, killed."""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Collection, Iterable, Sequence

from tidemill.core.clock import clock
from tidemill.core.job import Lease
from tidemill.core.owner import Command
from tidemill.core.scoreboard import Running
from tidemill.worker.child import GAVE_UP
from tidemill.worker.child_protocol import Down, Hello, MessageSocket, Setup, Up
from tidemill.worker.machine import Body
from tidemill.worker.scoreboard_rows import ScoreboardShares
from tidemill.worker.settings import Settings
from tidemill.worker.stuck_grace import StuckJobs


class State(enum.IntEnum):
    """The state of a worker process. Its socket is open up to the state STUCK."""

    STARTING = enum.auto()  # it loads the app
    SERVING = enum.auto()  # it takes jobs
    LEAVING = enum.auto()  # it takes no more jobs, and ends after its running jobs
    STUCK = enum.auto()  # one of its jobs cannot be interrupted; the others may end
    CLOSED = enum.auto()  # its socket has ended, so it should exit
    KILLED = enum.auto()  # SIGKILL was sent
    UNDEAD = enum.auto()  # it outlives SIGKILL
    GONE = enum.auto()  # it is dead, and its jobs are settled


_NEXT = {
    State.STARTING: (State.SERVING, State.LEAVING, State.CLOSED, State.KILLED),
    State.SERVING: (State.LEAVING, State.STUCK, State.CLOSED, State.KILLED),
    State.LEAVING: (State.STUCK, State.CLOSED, State.KILLED),
    State.STUCK: (State.CLOSED, State.KILLED),
    State.CLOSED: (State.KILLED, State.GONE),
    State.KILLED: (State.UNDEAD, State.GONE),
    State.UNDEAD: (State.GONE,),
    State.GONE: (),
}
"""The states that may follow a state."""


class WorkerProcess:
    """One worker process, and the leases it holds."""

    def __init__(
        self,
        first_slot: int,
        shares: ScoreboardShares,
        settings: Settings,
        *,
        replaces: WorkerProcess | None = None,
        extra: bool = False,
    ) -> None:
        self.first_slot = first_slot  # its share of the scoreboard
        self.slots = settings.concurrency
        self.replaces = replaces  # the process that leaves when this process serves
        self.extra = extra  # True for a process that runs only suspect jobs, one at a time
        self.state = self.before = State.STARTING  # ``before``: the state before this one
        # Machine time at which the state began. For LEAVING: at which the last job was seen to run.
        # For UNDEAD: of the latest line of the log about it.
        self.since = self.born = clock.machine()
        self.held: dict[int, Lease] = {}
        self.alone = 0  # token of the latest suspect job
        self.lost: set[int] = set()  # tokens of leases that other workers have now
        self.timed = False  # True when the process may hold jobs with a timeout
        # Token of a terminated job → the time after which the job counts as stuck.
        self.doomed: dict[int, float] = {}
        self.stuck = StuckJobs()
        self.depth = 0
        self.hello: Hello | None = None
        self.dump_at = 0.0  # machine time at which its stacks are read from outside
        self.pid = 0
        self._shares = shares
        self._settings = settings
        self._waits = settings.waits
        self._body: Body
        self.socket: MessageSocket[Down, Up]

    # -- states ---------------------------------------------------------------------------------

    def become(self, state: State) -> None:
        """Go on to another state.

        Raises:
            AssertionError: this state may not follow the present state.
        """
        if state not in _NEXT[self.state]:
            raise AssertionError(
                f"worker process {self.pid} is {self.state.name} and cannot become {state.name}"
            )
        self.before, self.state, self.since = self.state, state, clock.machine()

    @property
    def staying(self) -> bool:
        """True while the process is not about to end."""
        return self.state <= State.SERVING

    @property
    def open(self) -> bool:
        """True while the process may get any job."""
        return self.state is State.SERVING and not self.extra and not self.isolates

    @property
    def room(self) -> int:
        """The number of further leases that the process would like to hold."""
        return max(0, self.depth - len(self.held)) if self.open else 0

    @property
    def isolates(self) -> bool:
        """True while the process holds a job that must run alone."""
        return self.alone in self.held

    @property
    def left(self) -> bool:
        """True when the process takes no more jobs, in good order, and perhaps has closed."""
        return self.state is State.LEAVING or (
            self.state is State.CLOSED and self.before is State.LEAVING
        )

    @property
    def spares_its_jobs(self) -> bool:
        """True when its running jobs use no attempt: we killed it before it ended by itself."""
        return self.state >= State.KILLED and self.before is not State.CLOSED

    # -- starting -------------------------------------------------------------------------------

    def begin(self, body: Body, setup: Setup) -> None:
        """Take a process that the machine has started, and send the setup."""
        self._body = body
        self.pid, self.socket = body.pid, body.socket
        if body.hello is not None:
            self.greet(body.hello)
        self.introduce(setup)

    def introduce(self, setup: Setup) -> None:
        """Send the setup, with or without a scoreboard."""
        self.socket.post(Down(setup=setup))

    def greet(self, hello: Hello) -> None:
        """Take the first report. A process that has not loaded the app is about to end."""
        self.hello = hello
        if self.state is State.STARTING:
            self.become(State.LEAVING if hello.error else State.SERVING)

    def fileno(self) -> int:
        """The descriptor of the socket, for ``select``."""
        return self.socket.fileno()

    # -- talking --------------------------------------------------------------------------------

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
            self.doomed[command.token] = clock.machine() + self._waits.silent
        self.socket.post(Down(commands=[command]))

    def lose(self) -> None:
        """Tell the process that its leases are lost: it starts no job, and cancels running jobs."""
        self.lost = set(self.held)
        self.socket.post(Down(commands=[Command("lost")]))

    def be_quiet(self) -> None:
        """Ask the process to start no more jobs, and to end after its running jobs."""
        if self.staying:
            self.become(State.LEAVING)
            self.socket.post(Down(quiet=True))

    def be_stuck(self) -> bool:
        """Ask the process to end, since a job cannot be interrupted. False if it is to end anyway.

        The timekeeper of the process cannot do this while a task keeps the interpreter lock.
        """
        if self.state not in (State.SERVING, State.LEAVING):
            return False
        self.become(State.STUCK)
        self.socket.post(Down(quiet=True))
        return True

    def stop_in(self, seconds: float) -> None:
        """Tell the process and its running jobs that the process will be killed after this time."""
        self.socket.post(Down(stop=seconds))

    # -- watching -------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """The scoreboard rows of running jobs whose verdict has not come."""
        return self.rows(self.held)

    def rows(self, tokens: Iterable[int]) -> list[Running]:
        """The rows of these tokens on the scoreboard."""
        if self._shares.board is None:
            return []
        return self._shares.board.running(self.first_slot + 1, self._shares.size - 1, tokens)

    def strike(self, tokens: Collection[int]) -> None:
        """Take stuck jobs off the scoreboard."""
        for row in self.rows(tokens):
            assert self._shares.board is not None
            self._shares.board.clear(row.slot, 1)

    def overdue(self, now: float) -> list[Running]:
        """The rows of overdue jobs that the process itself should already have reported."""
        doomed, silent = self.doomed, self._waits.silent
        return [
            row
            for row in self.running()
            if (row.deadline and now >= row.deadline + silent)
            or now >= doomed.get(row.token, math.inf)
        ]

    def is_over(self, now: float) -> bool:
        """True when the process has a stuck job and is to be killed."""
        if self.state is not State.STUCK:
            return False
        if self._shares.board is not None:
            self.stuck.heartbeat.note(self._shares.board.beat_of(self.first_slot), now)
        neighbours = [self.held[row.token] for row in self.running()]
        return self.stuck.is_over(neighbours, self._settings.stuck_grace, now)

    def next_look(self, now: float) -> float:
        """Machine time of the next look at the process. A look finds changes without a signal."""
        state, age = self.state, now - self.since
        if state is State.KILLED:
            return now + (0.01 if age < 0.5 else 0.1)
        if state is State.UNDEAD:
            return now + 1.0
        at = self.dump_at or math.inf
        if not self.socket.push():
            at = min(at, now + 0.005)
        if self.doomed:
            self.doomed = {t: at for t, at in self.doomed.items() if t in self.held}
            # A terminated job that waits in a blocked process does not count as stuck.
            at = min([at, *[one if one > now else now + 0.25 for one in self.doomed.values()]])
        if self.timed:
            # The scoreboard sends no signal. So look now and then while a job has a timeout.
            at = min(at, now + 0.25)
        if state is State.STUCK:
            return min(at, self.stuck.next_look(self._settings.stuck_grace, now))
        if state is State.CLOSED:
            return min(at, now + (0.02 if age < self._waits.reap else 0.25))
        return min(at, now + 0.5) if state is State.LEAVING else at

    def deadlines(self) -> list[float]:
        """Machine times by which the process should have reported its overdue jobs."""
        if not self.timed or self.state >= State.CLOSED:
            return []
        return [row.deadline + self._waits.silent for row in self.running() if row.deadline]

    def stacks(self, first: Iterable[Running] = ()) -> str:
        """The stacks of the threads that run jobs, even if a task keeps the interpreter lock."""
        return self._stacks_of(row.thread for row in (*first, *self.running()))

    def main_stack(self) -> str:
        """The stack of the main thread, which runs the functions of ``process_stop``."""
        return self._stacks_of((self.pid,))

    def _stacks_of(self, threads: Iterable[int]) -> str:
        return "" if self.exited() or self.hello is None else self._body.stacks(threads)

    # -- ending ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the process and everything that it started; never waits."""
        if self.state < State.KILLED:
            self.become(State.KILLED)
        self._body.kill()

    def exited(self, patience: float = 0.0) -> bool:
        """True when the process is dead; waits up to ``patience`` seconds for its death."""
        return self._body.exited(patience)

    def lingers(self, now: float) -> bool:
        """True when the process runs no job any more and should have ended long ago.

        After its last job, its functions of ``process_stop`` and ``atexit`` may run as long as a
        shutdown may take.
        """
        if not self.is_idle(now):
            return False
        patience = max(self._waits.reap, self._settings.shutdown_timeout if self.left else 0.0)
        return now - self.since > patience

    def is_idle(self, now: float) -> bool:
        """True when the process has only to exit: its socket has ended, or it runs no last job."""
        if self.state is State.LEAVING and self.running():
            self.since = now
            return False
        return self.state in (State.LEAVING, State.CLOSED)

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
