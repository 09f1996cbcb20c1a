"""A simulated worker process: a model of the program that a real worker process runs.

It reads the same frames, sends the same frames, and writes to a real scoreboard. Its jobs take
virtual time. What each task does is a ``Behaviour``. A few tests with real processes prove that the
model is true: ``tests/e2e/test_worker_*.py``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from virtual_time import FAKE, VirtualTime

from tidemill.client.context import JobContext
from tidemill.client.runtime import Runtime
from tidemill.core.errors import JobCancelled
from tidemill.core.job import NOT_STARTED, Command, Lease, Note, Outcome, Verdict
from tidemill.core.retry import JobTerminated, JobTimeout, WorkerStopping
from tidemill.core.scoreboard import Scoreboard
from tidemill.core.stopping import Stopping
from tidemill.worker.child import GAVE_UP, NOTICE
from tidemill.worker.child_protocol import Closed, Down, Hello, Setup, Up
from tidemill.worker.prefetch import TICK, Prefetch
from tidemill.worker.run import Run
from tidemill.worker.verdicts import failure, stuck, success
from tidemill.worker.waiting_job import WaitingJob

BOOT = 0.2
"""Seconds from the start of a process until its app is loaded."""

BEAT = 0.5
"""Seconds from one heartbeat to the next. A real process shows ten times as many."""

STUCK_AFTER = 0.4
"""Seconds that an interrupted job has to end before its process reports it as stuck."""

FOREVER = math.inf


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What a task does.

    Attributes:
        seconds: how long the task runs.
        raises: the error that it then raises.
        ignores: True when nothing interrupts it, as a blocking system call in a thread.
        holds_lock: True when it keeps the interpreter lock while it runs.
        kills: the signal by which it then ends its whole process.
        breaks: True when it then makes its process give up.
        cleans_up: seconds that it runs on after an interruption.
        heeds_cancel: True when it ends by itself after a cancellation.
        keeps_process: True when, once it has ended, its process never exits by itself.
        grows: True when its process is over the memory limit afterwards.
    """

    seconds: float = 0.1
    result: Any = None
    raises: BaseException | None = None
    ignores: bool = False
    holds_lock: bool = False
    kills: int = 0
    breaks: bool = False
    cleans_up: float = 0.0
    heeds_cancel: bool = False
    keeps_process: bool = False
    grows: bool = False


class FakeRun:
    """One run of a job, with what its task does."""

    def __init__(self, run: Run, how: Behaviour, row: int, began: float) -> None:
        self.run, self.how, self.row, self.began = run, how, row, began
        self.over = self.stuck = False


class FakeProcess:
    """One process: its socket to the supervisor, its jobs, its life and death."""

    separate = True
    hello: Hello | None = None
    left_words = False

    def __init__(self, number: int, setup: Setup, time: VirtualTime, app: FakeApp) -> None:
        self.pid = 900_000_000 + number
        self.socket = self
        self.last_words = ""
        self.words: list[Up] = []
        self.returncode: int | None = None
        self.outlives_kill = False  # True when a system call keeps the process from dying
        self.killed = False
        self.quiet = False
        self.runs: dict[int, FakeRun] = {}
        self.waiting: deque[Lease] = deque()
        self._number, self._setup, self._time, self._app = number, setup, time, app
        self._inbox: deque[Down] = deque()
        self._outbox: list[Up] = []
        self._kept_back: list[Up] = []  # frames of the time in which a task held the lock
        self._budget = setup.max_jobs or 10**9
        self._prefetch = Prefetch(setup.concurrency)
        self._said: tuple[int, bool] = (-1, False)
        self._board: Scoreboard | None = None
        self._rows = deque[int]()
        self._stopping = Stopping()
        self._beats = self._ticks = False
        self._started = 0
        self._loaded = self._closed = self._keeps = False
        time.after(app.boot, self._load)

    # -- the supervisor's end: a body and its socket ---------------------------------------------

    def exited(self, patience: float = 0.0) -> bool:
        if self.returncode is None and patience:
            self._time.sleep(patience, lambda: [1] * (self.returncode is not None), watched=False)
        return self.returncode is not None

    def kill(self) -> None:
        self.killed = True
        if not self.outlives_kill:
            self.die(9)

    def threads(self) -> dict[int, str] | None:
        if self.returncode is not None:
            return None
        runs = [run for run in self.runs.values() if not run.over]
        if self.killed:
            return {run.run.ident: "D" for run in runs}
        return {self.pid: "S"} | {run.run.ident: "S" for run in runs}

    def stacks(self, threads: Iterable[int]) -> str:
        return "\n".join(f"stack of thread {thread}" for thread in threads)

    def bury(self) -> None:
        self._closed = True

    def fileno(self) -> int:
        return FAKE + self._number

    def post(self, down: Down) -> None:
        self._inbox.append(_copy(down))
        self._time.after(0.0, self._read)

    def push(self) -> bool:
        return True

    def receive(self, flags: int = 0) -> list[Up]:
        if not self._outbox and self._closed:
            raise Closed
        frames, self._outbox = self._outbox, []
        return frames

    def drain(self) -> list[Up]:
        frames, self._outbox = self._outbox, []
        return frames

    rest = drain

    def close(self) -> None:
        self._closed = True

    @property
    def readable(self) -> bool:
        return bool(self._outbox) or self._closed

    # -- life and death --------------------------------------------------------------------------

    def _load(self) -> None:
        if self.returncode is None:
            self._loaded = True
            hello = self._app.hello()
            self._outbox.append(_copy(Up(hello=hello)))
            if hello.error:
                self.exit(2)
            self._read()

    def exit(self, code: int) -> None:
        """Close the socket and end."""
        self._closed = True
        self.returncode = code

    def die(self, signum: int) -> None:
        """Die of a signal; the rows on the scoreboard stay."""
        if self.returncode is None:
            self._closed, self.returncode = True, -signum

    def give_up(self) -> None:
        """End because a job has broken the process."""
        self._flush()
        self.exit(GAVE_UP)

    @property
    def blocked(self) -> bool:
        """True while a task keeps the interpreter lock."""
        return any(run.how.holds_lock and not run.over for run in self.runs.values())

    # -- frames ----------------------------------------------------------------------------------

    def _read(self) -> None:
        while self._inbox and self._loaded and self.returncode is None and not self.blocked:
            down = self._inbox.popleft()
            if down.setup is not None and down.setup.board:
                self._begin(down.setup)
            if down.leases:
                self._accept(down.leases)
            for command in down.commands:
                self._obey(command)
            if down.quiet:
                self._be_quiet()
            if down.stop >= 0:
                notice = down.stop - min(NOTICE, down.stop / 2)
                self._time.after(notice, self._tell_all_to_stop)

    def _begin(self, setup: Setup) -> None:
        self._setup = setup
        self._board = Scoreboard(setup.board, setup.board_slots)
        self._board.sign(setup.first_slot, self.pid & 0xFFFFFFFF, self._time.machine)
        first = setup.first_slot + 1
        self._rows = deque(range(first, first + setup.share - 1))
        self._flush()
        self._beat()

    def _beat(self) -> None:
        """Show the heartbeat while jobs run."""
        if self._gone() or self._board is None:
            return
        if not self.blocked:
            self._board.beat(self._setup.first_slot, self._time.machine)
        self._beats = bool(self.runs)
        if self._beats:
            self._time.after(BEAT, self._beat)

    def _tick(self) -> None:
        """Give back the jobs that wait too long, since another process may have a free slot."""
        if self._gone() or self.blocked:
            return
        if len(self.runs) >= self._setup.concurrency and not self._started:
            self._prefetch.nothing_ended(full=True)
            self._give_back()
        self._started = 0
        self._ticks = bool(self.waiting)
        if self._ticks:
            self._time.after(TICK, self._tick)

    def _give_back(self) -> None:
        returned = [lease.token for lease in self.waiting]
        self.waiting.clear()
        self._send(returned=returned)

    def _send(self, **parts: Any) -> None:
        """Send a frame, or keep it back while a task holds the lock."""
        state = self._state(parts.get("verdicts", []))
        if parts or state != self._said:
            self._said = state
            frame = _copy(Up(depth=state[0], leaving=state[1], **parts))
            (self._kept_back if self.blocked else self._outbox).append(frame)

    def _flush(self) -> None:
        self._outbox += self._kept_back
        self._kept_back = []
        self._send()

    def _state(self, ended: list[Verdict]) -> tuple[int, bool]:
        if ended:
            self._prefetch.measure(ended)
        if self.quiet or self._board is None:
            return 0, self.quiet
        return min(
            self._setup.concurrency + self._prefetch.ahead, self._budget + len(self.runs)
        ), False

    # -- jobs ------------------------------------------------------------------------------------

    def _accept(self, leases: list[Lease]) -> None:
        if self.quiet:
            self._send(returned=[lease.token for lease in leases])
            return
        self.waiting.extend(leases)
        self._fill()

    def _fill(self) -> None:
        """Start waiting jobs in free slots."""
        while self.waiting and len(self.runs) < self._setup.concurrency and not self.quiet:
            if self.blocked or not self._budget:
                break
            self._start(self.waiting.popleft())
        if self.runs and not self._beats:
            self._beat()
        if self.waiting and not self._ticks:
            self._ticks, self._started = True, 0
            self._time.after(TICK, self._tick)

    def _start(self, lease: Lease) -> None:
        envelope, now, row = lease.open(), self._time.machine, self._rows.popleft()
        task = self._app.mill.tasks[envelope.task]
        job = WaitingJob(0, lease.rank, lease.seq, lease.token, lease, envelope, task)
        context = JobContext(envelope, lease.attempt, lease.token, stopping=self._stopping)
        thread, wall = self.pid + row, self._time.wall()
        run = FakeRun(
            Run(job, context, thread, wall), self._app.behaviours[envelope.task], row, now
        )
        self.runs[lease.token] = run
        self._budget -= 1
        self._started += 1
        deadline = now + lease.timeout if lease.timeout else 0.0
        assert self._board is not None
        self._board.start(row, lease.token, thread, wall, deadline)
        self._app.starts.append((envelope.id, now, self.pid))
        if run.how.seconds < FOREVER:
            self._time.after(run.how.seconds, lambda: self._end(run))
        if deadline:
            self._time.at(deadline, lambda: self._interrupt(run, JobTimeout))

    def _end(self, run: FakeRun, error: BaseException | None = None) -> None:
        """The task returns or raises."""
        if run.over or self._gone():
            return
        if run.how.kills:
            self.die(run.how.kills)
            return
        if run.how.breaks:
            self.give_up()
            return
        run.over = True
        error = error or run.how.raises
        if not run.stuck:
            verdict = failure(run.run, error) if error else success(run.run, run.how.result)
            self._app.ends.append((run.run.envelope.id, self._time.machine, self.pid))
        self._free(run)
        if not run.stuck:
            self._send(verdicts=[verdict])
        self._after_job(run)

    def _free(self, run: FakeRun) -> None:
        assert self._board is not None
        self.runs.pop(run.run.token, None)
        self._board.end(run.row)
        self._rows.append(run.row)

    def _after_job(self, run: FakeRun) -> None:
        self._keeps = self._keeps or run.how.keeps_process
        if run.how.holds_lock:
            self._flush()
            self._read()
        if (run.how.grows and self._setup.max_memory) or not self._budget:
            self._be_quiet()
        self._fill()
        self._leave_if_done()

    # -- interruptions ---------------------------------------------------------------------------

    def _interrupt(self, run: FakeRun, kind: type[BaseException]) -> None:
        if run.over or run.run.interrupted or self._gone() or self.blocked:
            return
        run.run.interrupted = kind
        if run.how.ignores:
            if kind is not WorkerStopping:
                self._time.after(STUCK_AFTER, lambda: self._report_stuck(run))
            else:
                run.run.interrupted = None
            return
        self._time.after(run.how.cleans_up, lambda: self._end(run, kind()))

    def _report_stuck(self, run: FakeRun) -> None:
        if run.over or self._gone() or self.blocked:
            return
        run.stuck = True
        terminated = run.run.interrupted is JobTerminated
        lease, envelope, started = run.run.lease, run.run.envelope, run.run.started
        trace = f"stack of {envelope.task}"
        self._send(stuck=[stuck(lease, envelope, trace, started, terminated)])
        self._be_quiet()

    def _tell_all_to_stop(self) -> None:
        self._stopping.set()
        for run in list(self.runs.values()):
            self._interrupt(run, WorkerStopping)

    def _obey(self, command: Command) -> None:
        if command.verb == "lost":
            self._give_back()
            for run in list(self.runs.values()):
                self._cancel(run)
        if command.verb not in ("cancel", "terminate"):
            return
        for lease in list(self.waiting):
            if lease.token == command.token:
                self.waiting.remove(lease)
                self._send(verdicts=[Verdict(lease.token, Outcome.RELEASE, error=NOT_STARTED)])
                return
        if (run := self.runs.get(command.token)) is not None:
            if command.verb == "terminate":
                self._interrupt(run, JobTerminated)
            else:
                self._cancel(run)

    def _cancel(self, run: FakeRun) -> None:
        run.run.context.cancelled = True
        if run.how.heeds_cancel:
            self._end(run, JobCancelled("it stopped on request"))

    def _be_quiet(self) -> None:
        if not self.quiet:
            self.quiet = True
            self._give_back()
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self.quiet and not self.runs and self.returncode is None and not self._closed:
            self._closed = True
            if not self._keeps:
                self._time.after(0.05, lambda: self._exit_by_itself())

    def _exit_by_itself(self) -> None:
        if self.returncode is None:
            self.returncode = 0

    def _gone(self) -> bool:
        return self.returncode is not None or self.killed

    def note(self, token: int, line: str) -> None:
        """A running job writes a line of log."""
        self._send(notes=[Note(token, line=line, time=self._time.wall())])


class FakeApp:
    """The app that the processes load: its tasks behave as told."""

    def __init__(self, mill: Any) -> None:
        self.mill: Runtime = mill
        self.behaviours: dict[str, Behaviour] = {}
        self.error = ""  # why the app cannot be loaded
        self.boot = BOOT
        self.starts: list[tuple[str, float, int]] = []
        self.ends: list[tuple[str, float, int]] = []

    def hello(self) -> Hello:
        """The report of a process that has loaded the app."""
        if self.error:
            return Hello(error=self.error)
        mill = self.mill
        known = list(mill.tasks), list(mill.allow_imports), mill.declarations.own()
        return Hello(mill.url, (), len(mill.tasks), "", mill.schedules.declared(), *known)


def _copy(frame: Any) -> Any:
    """The frame as the other end of a socket would decode it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=type(frame))
