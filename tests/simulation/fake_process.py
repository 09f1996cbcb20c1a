"""A simulated worker process: a model of the program that a real worker process runs.

It reads the same frames, sends the same frames, and writes to a real scoreboard. Its jobs take
virtual time. What each task does is a ``Behaviour``. These tests with real processes in
``tests/e2e`` prove that the model is true. They stay, whatever is simulated:

- A death leaves its last frames and its rows: ``test_brokers.py``, ``test_kill_of_one_process``
  and ``test_kill_of_everything_with_another_worker``.
- A forked child keeps the socket open: ``test_kill_of_a_process_that_a_task_has_forked``.
- Tasks are interrupted, or are stuck and reported: ``test_worker_timeouts.py``,
  ``test_timeout_in_every_pool``.
- A held interpreter lock delays all of this: its cases ``holds`` and ``aholds``.
- The last verdict comes before the kill:
  ``test_a_neighbour_that_ended_with_the_last_one_does_not_run_again``.
- A stuck run holds its retry: ``test_a_retry_waits_for_a_supervisor_that_is_held_up``.
- The process leaves after its jobs, and for its memory: ``test_recycling_by_jobs`` and
  ``test_recycling_by_memory``; when told: ``test_sigterm_to_a_process_recycles_it``.
- A new process says hello before the old one is quiet: ``test_reload``.
- Running tasks hear of the stop: ``test_worker_stopping.py``,
  ``test_a_job_is_interrupted_before_its_worker_is_killed``.
- Waiting jobs go back by ticks: ``test_short_jobs_do_not_wait_for_long_ones``; they start by
  priority: ``test_high_priority_first``; when cancelled, they go back:
  ``test_a_prefetched_job_is_cancelled_before_it_starts``.
- The process gives up: ``tests/abuse``, ``closes_all`` and ``builtins_raise``.
- A process outlives SIGKILL: ``test_worker_unkillable.py``.
- Lost leases cancel their runs: ``test_given_up.py``.
- Waits for other jobs are counted: ``test_waiting_that_would_starve_the_worker``.
- The main thread acts while the store stalls: ``test_worker_stalled_store.py``.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from fake_app import FOREVER, FakeApp, FakeRun
from virtual_time import VirtualTime

from tidemill.client.context import JobContext
from tidemill.core.job import NOT_STARTED, Command, Lease, Note, Outcome, Verdict
from tidemill.core.locks import Stopping
from tidemill.core.retry import JobTerminated, JobTimeout, WorkerStopping
from tidemill.core.scoreboard import Scoreboard
from tidemill.core.verdicts import given_back
from tidemill.errors import JobCancelled, TidemillError
from tidemill.worker.child import GAVE_UP, NOTICE
from tidemill.worker.child_protocol import Closed, Down, Hello, Setup, Up
from tidemill.worker.execute import Executor, Run, WaitingJob
from tidemill.worker.slots import TICK, Prefetch, Waits
from tidemill.worker.verdicts import failure, stuck, success

BEAT = 1.0
"""Seconds from one heartbeat to the next. A real process shows twenty times as many."""

FIRST_FD = 1_000_000
"""Descriptors from here on belong to simulated processes."""


class FakeSocket:
    """The supervisor's end of the socket to a process."""

    def __init__(self, number: int, deliver: Callable[[Down], None]) -> None:
        self.closed = False
        self._number, self._deliver = number, deliver
        self._frames: list[Up] = []

    def fileno(self) -> int:
        return FIRST_FD + self._number

    def send(self, up: Up) -> None:
        """Called by the process."""
        self._frames.append(_copy(up))

    def post(self, down: Down) -> None:
        self._deliver(_copy(down))

    def push(self) -> bool:
        return True

    def receive(self, flags: int = 0) -> list[Up]:
        if not self._frames and self.closed:
            raise Closed
        return self.drain()

    def drain(self) -> list[Up]:
        frames, self._frames = self._frames, []
        return frames

    def close(self) -> None:
        self.closed = True

    @property
    def readable(self) -> bool:
        return bool(self._frames) or self.closed


class FakeProcess:
    """One process, as its machine, its supervisor and a test see it."""

    hello: Hello | None = None

    def __init__(
        self,
        number: int,
        setup: Setup,
        time: VirtualTime,
        app: FakeApp,
        child_died: Callable[[], None],
    ) -> None:
        self.pid = 900_000_000 + 1000 * number
        self.socket = FakeSocket(number, self._deliver)
        self.returncode: int | None = None
        self.died_at = math.inf
        self.outlives_kill = False  # True when a system call keeps the process from dying
        self.killed = False  # True when its supervisor has killed it
        self.struck_at = math.inf  # the time of SIGKILL, which the process may outlive
        self.quiet = False
        self.runs: dict[int, FakeRun] = {}
        self.waiting: list[WaitingJob] = []
        self._setup, self._time, self._app, self._child_died = setup, time, app, child_died
        self._inbox: deque[Down] = deque()
        self._held_up: list[Callable[[], None]] = []  # what a task that holds the lock delays
        self._budget = setup.max_jobs or 10**9
        self._prefetch = Prefetch(setup.concurrency)
        self._said: tuple[int, bool] = (-1, False)
        self._board: Scoreboard | None = None
        self._rows = deque[int]()
        self._stopping = Stopping()
        self._executor = Executor(app.mill.runtime, setup.queues)
        self._waits: Waits | None = None
        self._lacks: frozenset[str] = frozenset()
        self._beats = self._ticks = self._loaded = self._keeps = self._grown = False
        self._lock_is_held = False
        self._started = self._finished = 0
        self._later(app.boot, self._load)

    # -- what its supervisor and the machine do with it ------------------------------------------

    def exited(self, patience: float = 0.0) -> bool:
        if self.returncode is None and patience:
            self._time.sleep(patience, lambda: [1] * (self.returncode is not None))
        return self.returncode is not None

    def kill(self) -> None:
        self.killed = True
        self.die(9)

    def stacks(self, threads: Iterable[int]) -> str:
        return "\n".join(f"stack of thread {thread}" for thread in threads)

    def bury(self) -> None:
        self.socket.close()

    # -- life and death --------------------------------------------------------------------------

    def die(self, signum: int, *, forked: bool = False) -> None:
        """Die of a signal; rows on the scoreboard stay. A ``forked`` child keeps the socket."""
        if signum == 9:
            self.struck_at = min(self.struck_at, self._time.machine)
        if not (self.outlives_kill and signum == 9):
            self._exit(-signum, forked=forked)

    def die_at_last(self) -> None:
        """The system call that kept the killed process from dying returns."""
        self.outlives_kill = False
        self.die(9)

    def hold_lock(self) -> None:
        """A thread that a task has left keeps the interpreter lock from now on."""
        self._lock_is_held = True

    def told_to_go(self) -> None:
        """Somebody sends SIGTERM to this process alone."""
        self._later(0.0, self._be_quiet)

    def _exit(self, code: int, *, forked: bool = False) -> None:
        if self.returncode is None:
            self.returncode, self.died_at = code, self._time.machine
            self.socket.closed = self.socket.closed or not forked
            self.close()
            self._child_died()

    def close(self) -> None:
        """Unmap the scoreboard."""
        if self._board is not None:
            self._board.close()
            self._board = None

    @property
    def gone(self) -> bool:
        return self.returncode is not None or self.struck_at < math.inf

    @property
    def blocked(self) -> bool:
        """True while a task, or a thread that it has left, keeps the interpreter lock."""
        return self._lock_is_held or any(
            run.how.holds_lock and not run.over for run in self.runs.values()
        )

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something in some seconds, if the process lives and has its interpreter lock then."""
        self._time.after(seconds, lambda: self._do(act))

    def _do(self, act: Callable[[], None]) -> None:
        if self.blocked:
            self._held_up.append(act)
        elif not self.gone:
            act()

    def _load(self) -> None:
        if self._app.dies:
            self.die(self._app.dies)
            return
        self._loaded, self._lacks = True, frozenset(self._app.lacks)
        hello = self._app.hello()
        self.socket.send(Up(hello=hello))
        if hello.error:
            self._exit(2)
        self._read()

    # -- frames ----------------------------------------------------------------------------------

    def _deliver(self, down: Down) -> None:
        self._inbox.append(down)
        self._later(0.0, self._read)

    def _read(self) -> None:
        while self._inbox and self._loaded and not self.gone and not self.blocked:
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
                self._later(down.stop - min(NOTICE, down.stop / 2), self._tell_all_to_stop)

    def _begin(self, setup: Setup) -> None:
        self._setup = setup
        self._board = Scoreboard(setup.board, setup.board_slots)
        self._board.sign(setup.first_slot, self.pid, self._time.machine)
        self._waits = Waits(self._app.mill, setup, self._board)
        first = setup.first_slot + 1
        self._rows = deque(range(first, first + setup.share - 1))
        self._send()

    def _send(self, **parts: Any) -> None:
        """Send a frame, if there is anything new to say."""
        if ended := parts.get("verdicts"):
            self._prefetch.measure(ended)
        wanted = self._setup.concurrency + self._prefetch.ahead
        depth = min(wanted, self._budget + len(self.runs)) if self._board else 0
        state = (0, True) if self.quiet else (depth, False)
        if any(parts.values()) or state != self._said:
            self._said = state
            self.socket.send(Up(depth=state[0], leaving=state[1], **parts))

    # -- time ------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Show the heartbeat while jobs run."""
        self._board.beat(self._setup.first_slot, self._time.machine)
        self._beats = bool(self.runs)
        if self._beats:
            self._later(BEAT, self._beat)

    def _tick(self) -> None:
        """Look after the jobs. Without news, a real process goes on with ticks to no effect."""
        news, finished, full = self._started + self._finished, self._finished, self._full
        if full and not self._started:
            self._give_back()
        if not finished:
            self._prefetch.nothing_ended(full=full)
        self._started = self._finished = 0
        if (self._grown and self._setup.max_memory) or not self._budget:
            self._be_quiet()
        self._send()
        self._ticks = bool(news)
        if self._ticks:
            self._later(TICK, self._tick)

    @property
    def _full(self) -> bool:
        return len(self.runs) >= self._setup.concurrency

    # -- jobs ------------------------------------------------------------------------------------

    def _accept(self, leases: list[Lease]) -> None:
        if self.quiet:
            self._send(returned=[lease.token for lease in leases])
            return
        for lease in leases:
            if (envelope := lease.open()).task in self._lacks:
                self._send(verdicts=[given_back(lease.token, envelope)])
                continue
            admitted = self._executor.admit(lease)
            if isinstance(admitted, Verdict):
                self._send(verdicts=[admitted])
            else:
                heapq.heappush(self.waiting, admitted)
        self._fill()

    def _fill(self) -> None:
        """Start waiting jobs in free slots."""
        while self.waiting and self._budget and not (self._full or self.quiet or self.blocked):
            self._start(heapq.heappop(self.waiting))
        if (self.runs or self.waiting or self._finished) and not self._ticks:
            self._ticks = True
            self._later(TICK, self._tick)

    def _start(self, job: WaitingJob) -> None:
        lease, envelope, now, row = job.lease, job.envelope, self._time.machine, self._rows[0]
        self._rows.rotate(-1)  # rows are used in turn, and the row of an ended job stays
        context = JobContext(envelope, lease.attempt, lease.token, stopping=self._stopping)
        thread = self.pid if self._setup.concurrency == 1 else self.pid + row % 1000
        how = self._app.behaviours[envelope.task]
        if how.again and any(run.job_id == envelope.id for run in self._app.runs):
            how = how.again
        began = self._time.wall()
        real = Run(lease.token, lease, envelope, job.task, context, thread, began)
        run = FakeRun(real, how, self, now)
        self.runs[lease.token] = run
        self._app.runs.append(run)
        self._budget -= 1
        self._started += 1
        deadline = now + lease.timeout if lease.timeout else 0.0
        self._board.start(row, lease.token, thread, run.run.started, deadline)
        if how.says:
            self._send(notes=[Note(lease.token, line=how.says, time=run.run.started)])
        if not self._beats:
            self._beat()
        if deadline:
            self._later(lease.timeout, lambda: self._interrupt(run, JobTimeout))
        if how.awaits:
            self._await(run)
        elif how.holds_lock:
            self._time.after(how.seconds, lambda: self._end(run))
        elif how.seconds < FOREVER:
            self._later(how.seconds, lambda: self._end(run))

    def _await(self, run: FakeRun, child: Any = None) -> None:
        """Wait for the end of another job, as a task that asks for its result."""
        if child is None:
            child = run.how.awaits.enqueue()
            try:
                self._waits.begin(run.run.context, child.id)
            except TidemillError as error:
                self._end(run, error)
                return
        if child.refresh().state.finished:
            self._waits.end(run.run.context)
            self._end(run)
        else:
            self._later(0.05, lambda: self._await(run, child))

    def _end(self, run: FakeRun, error: BaseException | None = None) -> None:
        """The task returns or raises."""
        if run.over or self.gone:
            return
        how, interruption = run.how, run.run.interrupted
        if how.kills:
            self.die(how.kills)
        elif how.breaks:
            self._exit(GAVE_UP)
        if self.gone:
            return
        run.over_at = self._time.machine
        error = error or (interruption() if interruption else how.raises)
        verdict = failure(run.run, error) if error else success(run.run, how.result)
        del self.runs[run.run.token]
        self._finished += 1
        self._keeps = self._keeps or how.keeps_process
        self._grown = self._grown or how.grows
        if not run.stuck:
            self._send(verdicts=[verdict])
        self._go_on()

    def _go_on(self) -> None:
        """After a job: do what its lock has held up, start the next jobs, or leave."""
        held_up, self._held_up = self._held_up, []
        for act in [*held_up, self._read, self._fill, self._leave_if_done]:
            self._do(act)

    # -- interruptions ---------------------------------------------------------------------------

    def _interrupt(self, run: FakeRun, kind: type[BaseException]) -> None:
        if run.over or run.run.interrupted:
            return
        run.run.interrupted = kind  # type: ignore[assignment]
        if kind is not WorkerStopping:
            self._later(self._setup.waits.stuck, lambda: self._report_stuck(run))
        if not run.how.ignores:
            self._later(run.how.cleans_up, lambda: self._end(run))

    def _report_stuck(self, run: FakeRun) -> None:
        if run.over:
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
        runs = list(self.runs.values())
        if command.verb == "lost":
            self._give_back()
        elif command.verb in ("cancel", "terminate"):
            runs = [run for run in runs if run.run.token == command.token]
        else:
            return
        if any(job.token == command.token for job in self.waiting):
            self.waiting = [job for job in self.waiting if job.token != command.token]
            heapq.heapify(self.waiting)
            back = Verdict(command.token, Outcome.RELEASE, error=NOT_STARTED)
            self._send(verdicts=[back])
        for run in runs:
            run.run.context.cancelled = True
            if command.verb == "terminate":
                self._interrupt(run, JobTerminated)
            elif run.how.heeds_cancel:
                self._end(run, JobCancelled("it stopped on request"))

    # -- the end ---------------------------------------------------------------------------------

    def _give_back(self) -> None:
        returned, self.waiting = [job.token for job in self.waiting], []
        self._send(returned=returned)

    def _be_quiet(self) -> None:
        if not self.quiet:
            self.quiet = True
            self._give_back()
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self.quiet and not (self.runs or self.gone or self.socket.closed) and self._loaded:
            self.socket.closed = True
            if not self._keeps:
                self._time.after(self._app.stops, lambda: self.gone or self._exit(0))


def _copy(frame: Any) -> Any:
    """The frame as the other end of a socket would decode it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=type(frame))
