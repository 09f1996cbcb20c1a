"""A worker process as its supervisor sees it: spawned, given leases, watched, killed.

The rows of the scoreboard that belong to the process, its stuck jobs, and the verdicts on its jobs
when it is dead are here, too.
"""

from __future__ import annotations

import enum
import logging
import math
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence

from tidemill.client.context import JobContext, job_name, logged_as
from tidemill.core.clock import clock
from tidemill.core.job import NOT_STARTED, Command, Lease, Note, Outcome, Verdict
from tidemill.core.scoreboard import Running, Scoreboard
from tidemill.worker.child import GAVE_UP
from tidemill.worker.child_protocol import Down, Hello, MessageSocket, Setup, Up
from tidemill.worker.counting import Concluded
from tidemill.worker.machine import Body
from tidemill.worker.settings import Settings
from tidemill.worker.slots import MOST
from tidemill.worker.verdicts import interrupted_run

log = logging.getLogger("tidemill.worker")


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
        self.ended_itself = False  # True when it has closed its socket, or died, before any kill
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
        self.pid = 0
        self._shares = shares
        self._settings = settings
        self._waits = settings.waits
        self._body: Body
        self.socket: MessageSocket[Down, Up]

    # -- states ---------------------------------------------------------------------------------

    def become(self, state: State) -> None:
        """Go on to another state. Raises AssertionError if it may not follow the present one."""
        if state not in _NEXT[self.state]:
            raise AssertionError(
                f"worker process {self.pid} is {self.state.name} and cannot become {state.name}"
            )
        self.ended_itself = self.ended_itself or state is State.CLOSED
        self.before, self.state, self.since = self.state, state, clock.machine()

    @property
    def staying(self) -> bool:
        return self.state <= State.SERVING

    @property
    def open(self) -> bool:
        return self.state is State.SERVING and not self.extra and not self.isolates

    @property
    def room(self) -> int:
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
        return self.state >= State.KILLED and not self.ended_itself

    # -- starting -------------------------------------------------------------------------------

    def begin(self, body: Body, setup: Setup) -> None:
        """Take a process that the machine has started, and send the setup."""
        self._body = body
        self.pid, self.socket = body.pid, body.socket
        if body.hello is not None:
            self.greet(body.hello)
        self.introduce(setup)

    def introduce(self, setup: Setup) -> None:
        self.socket.post(Down(setup=setup))

    def greet(self, hello: Hello) -> None:
        """Take the first report. A process that has not loaded the app is about to end."""
        self.hello = hello
        if self.state is State.STARTING:
            self.become(State.LEAVING if hello.error else State.SERVING)

    def fileno(self) -> int:
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
        return self.rows(self.held)

    def rows(self, tokens: Iterable[int]) -> list[Running]:
        if self._shares.board is None:
            return []
        return self._shares.board.running(self.first_slot + 1, self._shares.size - 1, tokens)

    def strike(self, tokens: Collection[int]) -> None:
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
        if self.state is not State.STUCK:
            return False
        board = self._shares.board
        assert board is not None  # without a scoreboard a process has no jobs
        neighbours = [self.held[row.token] for row in self.running()]
        beat = board.beat_of(self.first_slot)
        return self.stuck.is_over(neighbours, beat, self._settings.stuck_grace, now)

    def plan_look(self, now: float) -> float:
        """Send the frames that wait, and return the machine time of the next look at the process.

        A look finds changes without a signal.
        """
        state, age = self.state, now - self.since
        if state is State.KILLED:
            return now + (0.01 if age < 0.5 else 0.1)
        if state is State.UNDEAD:
            return now + 1.0
        at = math.inf if self.socket.push() else now + 0.005
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
        if self.state < State.KILLED:
            self.become(State.KILLED)
        self._body.kill()

    def exited(self, patience: float = 0.0) -> bool:
        return self._body.exited(patience)

    def lingers(self, now: float) -> bool:
        """True when the process runs no job any more and should have ended long ago.

        After its last job, its functions of ``process_stop`` and ``atexit`` may run as long as a
        shutdown may take.
        """
        if not self.check_idle(now):
            return False
        patience = max(self._waits.reap, self._settings.shutdown_timeout if self.left else 0.0)
        return now - self.since > patience

    def check_idle(self, now: float) -> bool:
        """True when the process has only to exit: its socket has ended, or it runs no last job."""
        # If it still runs a last job, ``since`` becomes the present time.
        if self.state is State.LEAVING and self.running():
            self.since = now
            return False
        return self.state in (State.LEAVING, State.CLOSED)

    @property
    def was_killed(self) -> bool:
        return self._body.returncode == -signal.SIGKILL

    def cause(self) -> str:
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
        """Kill the programs that a dead process has started."""
        # The rows of the process stay until its verdicts are stored.
        self._body.bury()


LAST_ATTEMPT = 3600.0  # seconds that neighbours may run on when one of them has no attempt left
SILENT = 5.0  # seconds without a heartbeat after which a process with a stuck job counts as blocked


class StuckJobs:
    """The stuck jobs of one process, and the time for which their neighbours may run on.

    The neighbours are the other running jobs of the process. They may run on within their own
    timeouts, for ``--stuck-grace`` seconds at most; if one of them has no attempt left, for an
    hour. A process without a heartbeat is killed at once, since none of its jobs can finish. Its
    timekeeper writes the heartbeat to the scoreboard every 50 ms while jobs run. A task that keeps
    the interpreter lock stops the heartbeat, and so does a task that blocks the event loop if all
    running jobs use this loop. Times are machine time.
    """

    def __init__(self) -> None:
        self.due: dict[int, float] = {}  # token → time of the retry
        self.since = 0.0  # the time of the first stuck job
        self._reasons: list[str] = []
        self._beat = -1.0  # the heartbeat that the scoreboard showed last
        self._seen = 0.0  # the time at which it was new

    def __bool__(self) -> bool:
        return bool(self.due)

    def add(self, lease: Lease, verdict: Verdict, now: float) -> None:
        self.since = self.since or now
        self.due[verdict.token] = now + verdict.delay
        what = "was terminated" if verdict.outcome == Outcome.CANCELLED else "ran past its timeout"
        self._reasons.append(f"{job_name(lease.open())} {what} and cannot be interrupted")

    @property
    def reason(self) -> str:
        """A text that names the stuck jobs, as the reason for interrupting the neighbours."""
        more = f" (and {len(self._reasons) - 1} more)" if len(self._reasons) > 1 else ""
        return self._reasons[0] + more if self._reasons else ""

    def is_over(self, neighbours: Sequence[Lease], beat: float, grace: float, now: float) -> bool:
        """True when the process must be killed. The scoreboard shows this heartbeat."""
        if beat != self._beat or not self._seen:
            self._beat, self._seen = beat, now
        if not neighbours or now - self._seen >= SILENT:
            return True
        waited = now - self.since
        if waited < grace:
            return False
        return waited >= LAST_ATTEMPT or not any(_is_last(lease) for lease in neighbours)

    def next_look(self, grace: float, now: float) -> float:
        """The time of the next look, also for heartbeats."""
        over = self.since + grace
        return min(now + 0.5, over) if over > now else now + 0.5


def _is_last(lease: Lease) -> bool:
    most = lease.open().retries.max_attempts
    return bool(most) and lease.attempt >= most


class ScoreboardShares:
    """The shares of one scoreboard: which rows belong to which process.

    A share is named by the number of its first row. The rows of a dead process stay until a step
    has stored its verdicts, and then its share is free. When no share is free, the scoreboard
    grows, so that a new process need not wait for a process that finishes its last jobs.
    """

    def __init__(self, processes: int, concurrency: int) -> None:
        # A header, rows for running jobs, and rows for jobs that end before a step stores them.
        self.size = 1 + 2 * concurrency + MOST
        self._count = 2 * processes + 2
        self._free = [n * self.size for n in range(self._count)]
        self._unsettled: list[int] = []
        self.board: Scoreboard | None = None

    @property
    def slots(self) -> int:
        return self._count * self.size

    def open(self, path: str, owner_id: str) -> Scoreboard:
        self.board = Scoreboard(path, self.slots)
        self.board.claim(owner_id)
        return self.board

    def take(self) -> int:
        """Take a share for a process that starts; OSError: the scoreboard cannot grow."""
        if not self._free:
            if self.board is not None:
                self.board.grow(self.slots + self.size)
            self._free.append(self._count * self.size)
            self._count += 1
        return self._free.pop()

    def put_back(self, first: int) -> None:
        """Return the share of a process that never started."""
        self._free.append(first)

    def retire(self, first: int) -> None:
        """Remember that the process of a share is dead and its verdicts are in the next step."""
        self._unsettled.append(first)

    def unsettled(self) -> list[int]:
        """Shares of dead processes whose last verdicts are in the next step."""
        return list(self._unsettled)

    def settled(self, firsts: list[int]) -> None:
        """Free shares of dead processes whose verdicts are stored."""
        for first in firsts:
            self._unsettled.remove(first)
            if self.board is not None:
                self.board.clear(first, self.size)
            self._free.append(first)


class LostJobs:
    """Verdicts and notes on the jobs of a dead process, by its rows on the scoreboard.

    A job that ran when its process ended by itself used an attempt. If the supervisor killed the
    process, a job that ran goes back and counts no attempt. A job that had not started also goes
    back. A stuck job can be retried only after the process is dead.
    """

    def __init__(self, process: WorkerProcess, *, closing: bool) -> None:
        self.verdicts: list[Verdict] = []
        self.concluded: list[Concluded] = []  # the verdicts on jobs that ran
        self.notes: list[Note] = []
        self.suspects: list[Lease] = []  # leases of jobs that run alone next
        self.culprit = False  # True if a job ran when the process ended by itself
        self.interrupted = False  # True if a job ran when the supervisor killed the process
        self._cause = process.cause()
        self._why = "its worker was stopped" if closing else process.stuck.reason or self._cause
        running = {row.token: row.started for row in process.running()}
        if process.gave_up:
            self._suspect(process, running)
        for token, lease in process.held.items():
            if token not in running:
                self.verdicts.append(unstarted(token))
            elif process.spares_its_jobs:
                self._interrupt(lease, running[token])
            else:
                self._count(lease, running[token])
        for token, due in process.stuck.due.items():
            delay = max(0.0, due - clock.machine())
            self.verdicts.append(Verdict(token, Outcome.RELEASE, delay=delay))
        process.held.clear()

    def _suspect(self, process: WorkerProcess, running: Mapping[int, float]) -> None:
        """Have each running job of a process that gave up run alone: any may have broken it."""
        # Its interrupted run counts no attempt. If the job breaks a process again, this second run
        # counts an attempt. A job that ran alone is no suspect, but the culprit.
        suspects = [token for token in running if token not in process.lost]
        if len(suspects) < 2:
            return
        self.culprit = True
        log.warning(
            "%s; each job that the process still ran runs alone next (%d)",
            self._cause,
            len(suspects),
        )
        why = f"{self._cause}; the job runs alone next"
        for token in suspects:
            lease = process.held.pop(token)
            lease.losses += 1
            self.suspects.append(lease)
            self.notes.append(interrupted_run(token, running[token], why))

    def _count(self, lease: Lease, started: float) -> None:
        self.culprit = True
        envelope = lease.open()
        most = envelope.retries.max_attempts
        again = not most or lease.attempt < most
        with logged_as(JobContext(envelope, lease.attempt)):
            log.log(
                logging.WARNING if again else logging.ERROR,
                "%s while running %s (attempt %d); %s",
                *(self._cause, job_name(envelope), lease.attempt),
                "again" if again else "not again",
            )
        ended = clock.wall()
        verdict = Verdict(
            lease.token, Outcome.RETRY, error=self._cause, started=started, ended=ended
        )
        self.verdicts.append(verdict)
        self.concluded.append((verdict, lease, envelope))

    def _interrupt(self, lease: Lease, started: float) -> None:
        self.interrupted = True
        envelope = lease.open()
        with logged_as(JobContext(envelope, lease.attempt)):
            log.warning("%s was interrupted and goes back: %s", job_name(envelope), self._why)
        self.notes.append(interrupted_run(lease.token, started, self._why))
        verdict = Verdict(lease.token, Outcome.RELEASE, started=started)
        self.verdicts.append(verdict)
        self.concluded.append((verdict, lease, envelope))


def unstarted(token: int) -> Verdict:
    """Give back a job that never ran. If somebody cancelled the job, the store ends it."""
    return Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
