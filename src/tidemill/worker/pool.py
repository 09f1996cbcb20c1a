"""The process pool of a worker: starts, reads, kills and replaces its processes.

The pool decides which processes live, and settles the jobs of dead processes. The supervisor
fetches the verdicts and notes.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Sequence

from tidemill.brokers.contract.exchange import Mode
from tidemill.client.worker_reports import Question
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.core.job import Command, Note, Outcome, Verdict
from tidemill.core.verdicts import is_given_back
from tidemill.worker.child_protocol import Closed, Hello, Setup, Up, add_notes
from tidemill.worker.dispatch import Dispatch
from tidemill.worker.history import WorkerHistory
from tidemill.worker.machine import Machine
from tidemill.worker.parts import PRINTED, Reports
from tidemill.worker.process import LostJobs, ScoreboardShares, State, WorkerProcess, unstarted
from tidemill.worker.settings import Settings
from tidemill.worker.verdicts import stuck as stuck_verdict

log = logging.getLogger("tidemill.worker")

_SNOOZE = int(Outcome.SNOOZE)  # compared with every verdict, and an int is faster than an enum
UNKNOWN_MOST = 1000  # the most unknown tasks that a worker logs
STUCK_MOST = 3
"""The largest number of stuck processes that may run on for their other jobs, for each process of
the worker."""

ENDING_MOST = 8  # the most processes that may take time to end, for each process of the worker
SAY_AGAIN = 60.0  # seconds between two lines about a process that does not die of SIGKILL
CRASH_BACKOFF_MOST = 30.0
CRASH_AGE = 2.0
"""Seconds: the longest pause before a start, and the age up to which a death without jobs is a
crash."""


class ProcessPool:
    """All processes of a worker, and their verdicts and notes that are not stored yet.

    Processes that are about to end belong to it, too. Two threads use the pool under its lock: the
    main thread of the supervisor, and the one that calls the store.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        folder: str,
        machine: Machine,
        on_start: Callable[[], None],
    ) -> None:
        """``on_start`` is called after each start of a process, by the thread that started it."""
        self.settings = settings
        self.lock = machine.lock()
        self.processes: list[WorkerProcess] = []
        self.shares = ScoreboardShares(settings.processes, settings.concurrency)
        self.hello: Hello | None = None  # of the latest process that has loaded the app
        self.verdicts: list[Verdict] = []
        self.notes: list[Note] = []
        self.dispatch = Dispatch(self)
        self.reports = Reports(name, self.lock)
        self.history = WorkerHistory(name, settings.release, settings.waits.refused)
        self.news = False  # True after a change that the next step tells the store
        self.closing = False  # True when processes are no longer replaced
        self.interrupted = False  # True when the worker ended and killed a running job
        self._name = name
        self._folder = folder
        self._machine = machine
        self._on_start = on_start
        self._respawn_at = 0.0  # machine time of the next start; 0 when no start is held back
        self._full = False  # True while jobs of leaving processes take all slots
        self._rolls = False  # True while a reload waits for free slots
        self._crashes = 0
        self._crashed_at = 0.0
        self._unknown: set[str] = set()  # the unknown tasks that the log has named

    # -- starting and replacing -----------------------------------------------------------------

    def start_one(
        self, replaces: WorkerProcess | None = None, *, extra: bool = False
    ) -> WorkerProcess | None:
        """Start a process; returns None when the system cannot start a process now."""
        share = -1
        try:
            share = self.shares.take()
            process = WorkerProcess(
                share, self.shares, self.settings, replaces=replaces, extra=extra
            )
            self._start(process)
        except OSError as error:
            log.error("cannot start a worker process: %s; trying again", error)
            if share >= 0:
                self.shares.put_back(share)
            self._respawn_at = clock.machine() + 1.0
            return None
        point("worker.spawned")
        self.processes.append(process)
        self.news = True
        self._on_start()
        return process

    @property
    def held_back(self) -> bool:
        """True while no process may start: the last start failed, or processes crash too often."""
        return clock.machine() < self._respawn_at

    def _start(self, process: WorkerProcess) -> None:
        setup = self._setup(process.first_slot)
        point("worker.spawning")
        process.begin(self._machine.start(setup), setup)
        self.hello = process.hello or self.hello

    def _setup(self, share: int) -> Setup:
        settings = self.settings
        return Setup(
            app=settings.app,
            concurrency=settings.concurrency,
            queues=settings.queues if settings.mode is Mode.STRICT else (),
            board=self.shares.board.path if self.shares.board is not None else "",
            board_slots=self.shares.slots,
            share=self.shares.size,
            first_slot=share,
            stacks=os.path.join(self._folder, f"stacks-{share}"),
            worker=self._name,
            slots=settings.concurrency * settings.processes,
            max_jobs=settings.max_jobs,
            max_memory=settings.max_memory,
            slow=settings.slow,
            history=self.history.on,
            waits=settings.waits,
        )

    def open_board(self, owner_id: str, folder: str) -> str:
        """Make the scoreboard, and show the scoreboard to all processes.

        The scoreboard lies in ``folder``, the broker's folder. If the broker has no folder, or the
        disk of this folder is full, the scoreboard lies in the worker's temporary folder.
        """
        try:
            board = self.shares.open(os.path.join(folder or self._folder, owner_id), owner_id)
        except OSError as error:
            if not folder:
                raise
            log.warning("no scoreboard fits in %s (%s): it is in %s", folder, error, self._folder)
            board = self.shares.open(os.path.join(self._folder, owner_id), owner_id)
        for process in self.processes:
            process.introduce(self._setup(process.first_slot))
        return board.path

    def replace(self) -> None:
        """Start the missing processes, unless the worker is ending or starts are held back."""
        if self.closing or self.held_back:
            return
        staying = sum(process.staying and not process.extra for process in self.processes)
        missing = self.settings.processes - staying
        if missing <= 0 or self._wait_for_old("the next process starts"):
            return
        for _ in range(missing):
            if self.start_one() is None:
                return

    def _wait_for_old(self, what: str) -> bool:
        """True while jobs of leaving processes take as many slots as the worker has."""
        # No process starts meanwhile, so the worker never runs more than twice as many jobs as it
        # has slots.
        old = [process for process in self.processes if process.state is State.LEAVING]
        full = sum(len(process.held) for process in old) >= self.slots
        if full and not self._full:
            pids = ", ".join(str(process.pid) for process in old)
            log.warning("jobs of replaced processes (%s) take all slots; %s later", pids, what)
        self._full = full
        return full

    @property
    def slots(self) -> int:
        return self.settings.processes * self.settings.concurrency

    def roll(self) -> None:
        """Replace all processes: each one leaves when its replacement has loaded the new code."""
        self._rolls = False
        if self._wait_for_old("the app is reloaded"):
            self._rolls = True
            return
        log.info("reloading")
        outgoing = [process.replaces for process in self.processes]
        for process in [
            h for h in self.processes if h.staying and not h.extra and h not in outgoing
        ]:
            if self.start_one(process) is None:
                self._rolls = True
                return
        self.replace()

    def slots_freed(self) -> None:
        """Start the processes, or the reload, that waited for a free slot."""
        if self._rolls and not self.closing and not self.held_back:
            self.roll()
        self.replace()

    # -- listening ------------------------------------------------------------------------------

    def read(self, process: WorkerProcess) -> None:
        """Read the frames of a process, or notice that it is gone. Never waits for a frame."""
        try:
            frames = process.socket.receive(socket.MSG_DONTWAIT)
            while frames:
                for up in frames:
                    self._hear(process, up)
                # A stuck process may have no job left: then it has closed its socket, or must go.
                stuck = process.state is State.STUCK
                frames = process.socket.receive(socket.MSG_DONTWAIT) if stuck else []
            if process.is_over(clock.machine()):
                self.end(process)
        except Closed:
            self._closed(process)
            if process.exited(0.02):
                self._gone(process)
            elif process.running():
                # The process has closed its socket and still lives.
                self.replace()

    @staticmethod
    def _closed(process: WorkerProcess) -> None:
        """Take in that the socket of a process has ended, or will say nothing more."""
        if process.state < State.CLOSED:
            process.become(State.CLOSED)

    def _read_all(self, process: WorkerProcess) -> None:
        for up in process.socket.drain():
            self._hear(process, up)

    def _hear(self, process: WorkerProcess, up: Up) -> None:
        self.news = True
        if up.hello is not None:
            self._greet(process, up)
            return
        if up.verdicts:
            self._take_verdicts(process, up)
        add_notes(self.notes, up.notes)
        for token in up.returned:
            lease = process.held.pop(token, None)
            if lease is not None and token not in process.lost:
                self.dispatch.spare.append(lease)
        if up.verdicts:
            self.dispatch.ended(up.verdicts)
        process.depth = up.depth
        for verdict in up.stuck:
            self._stuck(process, verdict)
        if up.answers:
            self.reports.hear(process.pid, up.answers)
        if up.leaving and process.state is State.SERVING:
            process.become(State.LEAVING)
            self.replace()
        elif process.state is State.LEAVING and (self._full or self._rolls):
            self.slots_freed()

    def _take_verdicts(self, process: WorkerProcess, up: Up) -> None:
        taken, leases, whole = [], [], True
        for verdict in up.verdicts:
            lease = process.held.pop(verdict.token, None)
            if lease is None:
                whole = False
                continue
            if verdict.outcome == _SNOOZE and is_given_back(verdict):
                self._log_unknown(lease.open().task, verdict.error)
            taken.append(verdict)
            leases.append(lease)
        self.verdicts += taken
        if whole:
            self.history.hear(leases, up.history)
        else:  # the sums of the frame are too high
            self.history.conclude([*zip(taken, leases, itertools.repeat(None))])
        if self.closing and any(v.outcome == Outcome.RELEASE and v.started for v in up.verdicts):
            self.interrupted = True

    def _log_unknown(self, task: str, error: str) -> None:
        if task in self._unknown or len(self._unknown) >= UNKNOWN_MOST:
            return
        self._unknown.add(task)
        log.warning(
            "%s: this app has %d task(s), and none of that name; does the app import the module "
            "that declares it? Its jobs are tried again every 30 s at most until a worker knows it",
            error,
            len(self.hello.names) if self.hello is not None else 0,
        )

    def _greet(self, process: WorkerProcess, up: Up) -> None:
        assert up.hello is not None
        process.greet(up.hello)
        old, process.replaces = process.replaces, None
        if not up.hello.error:
            self.hello = up.hello
            if old is not None:
                old.be_quiet()
            return
        if self.shares.board is None:  # the first process has no scoreboard
            log.error("the worker ends: its app could not be loaded: %s", up.hello.error)
        else:
            log.error("the app could not be loaded: %s", up.hello.error)
        if old is not None and old in self.processes:
            log.error("the processes with the old code keep running")
        else:
            self._crashed(process)

    def obey(self, command: Command) -> None:
        for process in self.processes:
            if command.token in process.held:
                self.dispatch.unwanted.add(command.token)
                process.tell(command)
                return
        if self.dispatch.cancel_spare(command.token):
            self.news = True

    def lose(self) -> None:
        """Drop all leases: other workers have these jobs, so the store refuses our verdicts."""
        self.verdicts, self.notes = [], []
        self.dispatch.forget()
        for process in self.processes:
            process.lose()

    def reap(self) -> None:
        """Reap dead children that this process has inherited; look after dead worker processes."""
        for process in list(self.processes):
            # Do not wait for the end of the socket: a task's forked child may keep the socket open.
            if process.state < State.CLOSED and process.exited():
                self._read_all(process)  # the process may have said that it leaves
                self._closed(process)
        self._machine.reap(self._reap_own)

    def _reap_own(self, pid: int) -> bool:
        processes = [process for process in self.processes if process.pid == pid]
        return bool(processes and processes[0].exited())

    # -- stuck and dead -------------------------------------------------------------------------

    def _stuck(self, process: WorkerProcess, verdict: Verdict) -> None:
        """Settle a job that cannot be interrupted; its process must end."""
        lease = process.held.pop(verdict.token, None)
        if lease is None:
            return
        process.stuck.add(lease, verdict, clock.machine())
        if process.be_stuck():
            reason = process.stuck.reason
            log.warning("worker process %d is stuck and is replaced: %s", process.pid, reason)
            self._bound_stuck()
            self.replace()
        # The retry must not start before the old run is dead. So the store keeps the lease until
        # ``_gone`` gives it back.
        verdict.hold = True
        self.verdicts.append(verdict)
        self.news = True
        self.history.conclude([(verdict, lease, None)])

    def _bound_stuck(self) -> None:
        """Kill the process that is stuck longest when too many stuck processes take up memory."""
        stuck = [process for process in self.processes if process.state is State.STUCK]
        if len(stuck) > STUCK_MOST * self.settings.processes:
            oldest = min(stuck, key=lambda process: process.stuck.since)
            log.warning("%d worker processes are stuck; the longest stuck is killed", len(stuck))
            self.end(oldest)

    def settled(self, verdicts: Sequence[Verdict], shares: list[int]) -> None:
        """Free ``shares``; take stuck jobs off the scoreboard, since their attempts are stored."""
        stuck = {verdict.token for verdict in verdicts if verdict.hold}
        for process in self.processes if stuck else ():
            if process.stuck:
                process.strike(stuck)
        self.shares.settled(shares)

    def look_after(self) -> None:
        """Find stuck and dead processes, kill those that must go, and start missing ones."""
        now = clock.machine()
        for process in list(self.processes):
            if process.timed or process.state > State.SERVING:
                self._read_all(process)  # the supervisor may be in a call of the store
            self._check(process, now)
        ending = [process for process in self.processes if process.check_idle(now)]
        ending.sort(key=lambda process: process.since)
        for process in ending[: -ENDING_MOST * self.settings.processes]:
            self._end_lingering(process, now)
        if now >= self.reports.print_at:
            self.reports.print_stacks()
        if self._respawn_at and now >= self._respawn_at:
            self._respawn_at = 0.0
            self.slots_freed()
            self.news = True  # a suspect job may wait for a process of its own

    def _check(self, process: WorkerProcess, now: float) -> None:
        if process.state >= State.CLOSED and process.exited():
            self._gone(process)
        elif process.state is State.KILLED:
            if now - process.since > self.settings.waits.kill:
                process.become(State.UNDEAD)
                self._outlives(process)
        elif process.state is State.UNDEAD:
            if now - process.since >= SAY_AGAIN:
                self._outlives(process)
        elif process.lingers(now):
            self._end_lingering(process, now)
        elif process.state < State.CLOSED:
            if process.timed or process.doomed:
                self._witness(process, now)
            if process.is_over(now):
                self.end(process)

    @staticmethod
    def _end_lingering(process: WorkerProcess, now: float) -> None:
        """Kill a process that has not ended in time; usually a function of process_stop hangs."""
        # Jobs still run although the process is to end: a task closed the process's descriptors.
        if not process.running():
            log.warning(
                "worker process %d is killed: it has not ended %.3g s after its last job; its main "
                "thread: %s",
                process.pid,
                now - process.since,
                "\n" + process.main_stack(),
            )
        process.kill()

    def _witness(self, process: WorkerProcess, now: float) -> None:
        """Find stuck jobs of a process whose interpreter lock is held, so that it cannot report."""
        rows = process.overdue(now)
        stacks = process.stacks(rows) if rows else ""
        for row in rows:
            lease = process.held[row.token]
            trace = "Stacks of its jobs when it was given up:\n" + stacks
            terminated = row.token in process.doomed
            self._stuck(process, stuck_verdict(lease, lease.open(), trace, row.started, terminated))
        process.timed = any(lease.timeout for lease in process.held.values())

    def plan_look(self, *, exact: bool = False) -> float:
        """Send the frames that wait, and return the machine time of the next look at the processes.

        A look finds changes without a signal.
        """
        now = clock.machine()
        times = [self.reports.print_at, *[each.plan_look(now) for each in self.processes]]
        if exact:
            times += [at for process in self.processes for at in process.deadlines()]
        if self._respawn_at:
            times.append(self._respawn_at)
        return min(times)

    def end(self, process: WorkerProcess) -> None:
        """Kill a process; its jobs are settled once it is dead."""
        if process.state >= State.KILLED:
            return
        self._read_all(process)
        reason = process.stuck.reason
        if not reason and process.state is State.CLOSED and process.left:
            reason = "a function of process_stop or atexit has not returned"
        log.warning("worker process %d is killed%s", process.pid, f": {reason}" if reason else "")
        process.kill()
        if process.exited(0.02):
            self._gone(process)

    def _outlives(self, process: WorkerProcess) -> None:
        """Say that a killed process lives on; its started jobs stay held."""
        process.since, self.news = clock.machine(), True
        for token in sorted(process.held.keys() - {row.token for row in process.running()}):
            del process.held[token]
            self.verdicts.append(unstarted(token))
        self.replace()
        log.error(
            "worker process %d does not die of SIGKILL: %d job(s) are held until it is gone; look "
            "for a dead mount or disk",
            process.pid,
            len(process.held) + len(process.stuck.due),
        )

    def _gone(self, process: WorkerProcess) -> None:
        """Settle the jobs of a dead process. Unless we killed it, running jobs used an attempt."""
        if process.state is State.GONE:
            return
        self._read_all(process)  # the last frames may still be in the socket
        point("worker.burying")
        lost = LostJobs(process, closing=self.closing)
        self.verdicts += lost.verdicts
        self.history.conclude(lost.concluded)
        self.notes += lost.notes
        self.interrupted = self.interrupted or (lost.interrupted and self.closing)
        self.dispatch.ended(lost.verdicts)
        self.dispatch.spare += lost.suspects
        self.news = True
        self.processes.remove(process)
        process.bury()
        self._machine.buried(process.pid)
        self.shares.retire(process.first_slot)
        if process.state is State.UNDEAD:
            log.info("worker process %d is dead at last", process.pid)
        unasked = process.state is State.CLOSED and process.before <= State.SERVING
        process.become(State.GONE)
        if unasked and not lost.culprit:
            self._crashed(process)
        self.slots_freed()

    def _crashed(self, process: WorkerProcess) -> None:
        """Back off when processes die as fast as they are started."""
        now = clock.machine()
        if now - process.born > CRASH_AGE and process.hello is not None and not process.hello.error:
            log.error("%s", process.cause())
            return
        self._crashes = self._crashes + 1 if now - self._crashed_at < CRASH_BACKOFF_MOST * 2 else 1
        self._crashed_at = now
        delay = min(CRASH_BACKOFF_MOST, 0.25 * 2.0 ** min(self._crashes, 10))
        self._respawn_at = now + delay
        if self.shares.board is not None:  # if the first process dies, the worker ends
            log.error(
                "a worker process ended right after its start; the next starts in %g s", delay
            )

    # -- ending ---------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """True when only processes that cannot be killed are left."""
        return all(process.state is State.UNDEAD for process in self.processes)

    @property
    def running(self) -> int:
        return sum(len(process.running()) for process in self.processes)

    @property
    def held(self) -> int:
        return sum(len(process.held) for process in self.processes)

    def be_quiet(self) -> None:
        self.closing = True
        for process in self.processes:
            process.be_quiet()

    def end_all(self) -> None:
        """Kill all processes and settle their jobs; waits a while for their deaths."""
        self.closing = True
        processes = [one for one in self.processes if one.state is not State.UNDEAD]
        for process in processes:
            self.end(process)
        until = clock.machine() + self.settings.waits.kill
        for process in processes:
            if process.state is State.GONE:
                continue
            if process.exited(max(0.001, until - clock.machine())):
                self._gone(process)
            else:
                process.become(State.UNDEAD)
                self._outlives(process)
        if any(process.held or process.stuck.due for process in self.processes):
            self.interrupted = True  # the end of the worker gives these jobs back

    def dump(self) -> None:
        """Print the stacks of all processes; those of a blocked process are read from outside."""
        self.ask(Question("dump", PRINTED))

    def ask(self, question: Question) -> None:
        ready = [process for process in self.processes if process.hello is not None]
        for process in ready:
            process.tell(question.command)
        self.reports.ask(question, ready)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            if process.state is State.UNDEAD or not process.exited(self.settings.waits.kill):
                log.error("worker process %d does not die; it is left behind", process.pid)
            else:
                process.bury()
        self._machine.close()
        board = self.shares.board
        if board is not None:
            # Jobs whose verdicts are not stored stay on it, so that they use an attempt.
            (board.close if self.verdicts else board.remove)()
