"""A worker process: takes leases from the supervisor, runs them, sends verdicts back.

Threads, and what each owns:

    workers  threads that run sync jobs (:mod:`.backlog`). One of them at a time reads the socket's
             incoming side: leases and orders
    main     with a concurrency of 1, runs the sync jobs, and a thread does nothing but read. Else
             it does nothing, and is there for signals
    clerk    the outgoing side (:mod:`.outbox`), and time: ends what runs too long, gives back what
             did not start
    loop     one event loop for all async jobs
"""

from __future__ import annotations

import collections
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from os import _exit, getpgrp, getpid, getppid, kill, killpg
from threading import get_ident, get_native_id
from typing import Any

from tidemill.app import Tidemill
from tidemill.board import Board
from tidemill.clock import machine_time, wall_time
from tidemill.context import JobContext, running_job
from tidemill.job import NOT_STARTED, Command, Envelope, Lease, Note, Outcome, Verdict
from tidemill.retry import JobTerminated
from tidemill.stopping import Stopping
from tidemill.worker.backlog import Backlog, Desk
from tidemill.worker.fork import end_child, handle_signal, is_child, isolate_children
from tidemill.worker.interrupt import Interrupter, Run
from tidemill.worker.loop import Item, Loop
from tidemill.worker.memory import resident_memory
from tidemill.worker.orphans import is_orphan
from tidemill.worker.outbox import Outbox
from tidemill.worker.prefetch import TICK, Prefetch
from tidemill.worker.restore import Interpreter
from tidemill.worker.runner import Runner, describe, stuck_verdict
from tidemill.worker.safelog import SafeLog
from tidemill.worker.stacks import own_stacks
from tidemill.worker.waits import Waits
from tidemill.worker.wire import Closed, Down, Line, Setup, Up

__all__ = ["GAVE_UP", "Process"]

log = SafeLog("tidemill.worker")

NOTICE = 5.0
"""Seconds that a job has to clean up when its worker stops; half of a shorter shutdown timeout."""

GAVE_UP = 70
"""Exit code of a process that cannot go on, whoever among its jobs is at fault."""


class Process:
    """The runtime inside one worker process; for tests and ``memory://`` inside one thread."""

    def __init__(
        self, mill: Tidemill, setup: Setup, line: Line[Up, Down], *, local: bool = False
    ) -> None:
        self.mill = mill
        self.setup = setup
        self.line = line
        line.last_words = setup.last_words
        self.local = local
        self._parent = 0 if local else getppid()
        self.out = Outbox(line, self._state, self.give_up)
        self.runner = Runner(mill)
        self.board = Board(setup.board, setup.board_slots)
        # In turn: the row of a job that ended stays on the board until it has long been settled.
        rows = range(setup.first_slot + 1, setup.first_slot + setup.share)
        self.slots = collections.deque(rows)
        self.interpreter = Interpreter()
        self._restore = self.interpreter.after_job
        self.interrupter = Interrupter(self.out.ring)
        self._main_thread = setup.concurrency == 1 and not local
        self.backlog = Backlog(
            setup.concurrency,
            budget=setup.max_jobs or sys.maxsize,
            threads=0 if self._main_thread else setup.concurrency + 1,
            hire=self._hire,
        )
        self._prefetch = Prefetch(setup.concurrency)
        self._told_to_go = False
        self._dozing = True  # the clerk sleeps until it is rung for
        self.loop = Loop(self)
        self._employed: list[threading.Thread] = []
        self.stopping = Stopping()
        self.waits = Waits(mill, setup, self.board)
        self._order = {name: place for place, name in enumerate(setup.queues)}
        isolate_children(self)

    # -- life -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run until told to go. With a concurrency of 1 the calling thread runs the jobs."""
        self.board.sign(self.setup.first_slot, getpid(), machine_time())
        clerk = threading.Thread(target=self._clerk, name="tidemill-clerk", daemon=True)
        clerk.start()
        self.out.ring()  # its first word is how much work we would like
        if self._main_thread:
            reader = threading.Thread(target=self._read, name="tidemill-reader", daemon=True)
            reader.start()
            handle_signal(signal.SIGALRM, self.interrupter.on_alarm)
            self.interrupter.main = get_ident()
            self.interpreter.watch_signals()
            self._restore = self.interpreter.after_main_job
            self._work(Desk())
        else:
            self.backlog.begin()
            self.backlog.ended.wait()
        self.out.ring()
        clerk.join(5)
        if self.local:
            self._tidy()

    def _tidy(self) -> None:
        """What a process leaves to the kernel, a thread must give back itself."""
        self.loop.stop()
        threads = list(self._employed)
        for thread in threads:
            thread.join(1)
        self.line.close()
        if not any(thread.is_alive() for thread in threads):
            self.board.close()

    def on_signal(self, signum: int, frame: object) -> None:
        """The handler of SIGTERM: leave. The clerk does it, as a lock may be held just now."""
        self._told_to_go = True
        self.out.ring()

    def _read(self, desk: Desk | None = None) -> None:
        """Read until a job is on the desk, and another reads; or until all is over."""
        try:
            while not self.backlog.over and (desk is None or desk.reads):
                for down in self.line.receive():
                    self._carry_out(down)
                self.loop.launch(self.backlog.deal(desk))
            return
        except Closed as closed:
            if closed.by_us or not is_orphan(self._parent):
                self.give_up("a task closed the worker's descriptors")
        except BaseException as error:
            self.give_up("it can read no more jobs", error)
        # The supervisor is gone, and with it the leases; or we go.
        if not (self.backlog.over or self.local or is_child()):
            _kill_group()
        self.backlog.close()

    # -- trouble --------------------------------------------------------------------------------

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """End this process, which cannot go on, whatever a task has made of its functions.

        Nobody knows which of several jobs is at fault. The supervisor runs each of them alone.
        """
        if self.backlog.over:
            return
        if is_child():
            _exit(1)
        try:
            reason = f"{why}: {describe(error)[0]}" if error is not None else why
            log.error("worker process %d gives up: %s", getpid(), reason)
            if not self.local:
                self.out.last_words()
        finally:
            if not self.local:
                _exit(GAVE_UP)
        self.backlog.close()

    def retire(self, why: str, items: Iterable[Item] = ()) -> None:
        """Start no more jobs, nor those of the items, which have a slot; finish what runs."""
        log.error("worker process %d is replaced: %s", getpid(), why)
        self.quiet()
        for item in items:
            self.out.returned.append(item[3])
            self.ended_elsewhere()

    def refuse(self, item: Item, reason: str) -> None:
        """Fail a job that cannot even begin."""
        self.out.conclude(self.runner.refused(item[4], reason))

    def after_fork_child(self) -> None:
        """A task has forked: the child speaks with no supervisor."""
        self.line.close()

    def _carry_out(self, down: Down) -> None:
        if down.leases:
            self._accept(down.leases)
        for command in down.commands:
            self._obey(command)
        if down.quiet:
            self.quiet()
        if down.stop >= 0:
            self.stop_in(down.stop)

    def quiet(self) -> None:
        """Start nothing more; give back what has not started; go when the rest has ended."""
        self.out.returned.extend(self.backlog.stop())
        self.out.ring()

    def stop_in(self, seconds: float) -> None:
        """Tell what runs that the worker stops; end it some time before the process is killed."""
        self.interrupter.stop_at = machine_time() + seconds - min(NOTICE, seconds / 2)
        self.stopping.set()
        self.out.ring()

    # -- taking work ----------------------------------------------------------------------------

    def _accept(self, leases: list[Lease]) -> None:
        items: list[Item] = []
        for lease in leases:
            item = self._admit(lease)
            if item is not None:
                items.append(item)
        if not self.backlog.add(items):
            self.out.returned.extend(item[3] for item in items)
            self.out.ring()
        elif self._dozing:
            self.out.ring()  # from now on there is something to look at

    def _admit(self, lease: Lease) -> Item | None:
        """What must be known before a job may wait for a slot; a verdict where it cannot run."""
        admitted = self.runner.admit(lease)
        if isinstance(admitted, Verdict):
            self.out.conclude(admitted)
            return None
        envelope, task = admitted
        place = self._order.get(envelope.queue, 0)
        return place, lease.rank, lease.seq, lease.token, lease, envelope, task

    # -- sync jobs ------------------------------------------------------------------------------

    def _work(self, desk: Desk) -> None:
        """A worker thread, which nothing that a task leaves behind may end."""
        while not self.backlog.over:
            try:
                self._take_turn(desk)
            except BaseException as error:
                self.give_up("a thread of its pool failed", error)

    def _take_turn(self, desk: Desk) -> None:
        """Read when it is the thread's turn, run what is on its desk, else wait."""
        if desk.reads:
            self._read(desk)
        elif desk.item is not None:
            self._run(desk.item)
            desk.item = self._next()
        else:
            self.loop.launch(self.backlog.park(desk))
            desk.wake.acquire()

    def _next(self) -> Item | None:
        """The next sync job for the thread whose last one has ended."""
        item, starts = self.backlog.next()
        self.loop.launch(starts)
        if item is None:
            self.out.flush(wait=False)  # nothing else to do: no reason to let the clerk do it later
        return item

    def _run(self, item: Item) -> None:
        lease, envelope, task = item[4], item[5], item[6]
        started = wall_time()
        run = self.begin(lease, envelope, started)
        try:
            call = self.runner.prepare(lease, envelope, task, run.context)
            value = self.interrupter.guarded(run, self._perform, run, call)
        except BaseException as error:
            if is_child():
                end_child(error)
            self._restore()
            verdict = self.runner.failure(run, error)
        else:
            self._restore()
            verdict = self.runner.success(run, value)
        self.end(run, verdict)

    def _perform(self, run: Run, call: Any) -> Any:
        """Run in a context of the job's own, so that nothing leaks into the next."""
        if run.deadline or run.wanted:
            self.out.ring()  # only now is the run where the clerk looks for its deadline
        return copy_context().run(_with_job, run.context, call)

    def begin(self, lease: Lease, envelope: Envelope, started: float) -> Run:
        """A run of a job, in the calling thread, and on the board from now on."""
        context = JobContext(
            envelope, lease.attempt, lease.token, self._say, self.waits, self.stopping
        )
        run = Run(lease, envelope, context, get_ident())
        run.started = started
        self.runner.started(run)
        if envelope.timeout:
            run.deadline = machine_time() + envelope.timeout
        run.slot = self.slots.popleft()
        self.board.start(run.slot, run.token, get_native_id(), started, run.deadline)
        return run

    def end(self, run: Run, verdict: Verdict) -> None:
        """The run is over; its verdict counts unless another has fallen meanwhile."""
        if self.interrupter.finished(run):
            self.out.conclude(verdict)
        self.slots.append(run.slot)

    def _hire(self, number: int, desk: Desk) -> bool:
        """Start a thread of the pool. When none can start, the process is replaced."""
        try:
            self.employ(f"tidemill-{number}", self._work, desk)
        except Exception as error:  # also what a task has made of the module threading
            log.error("process %d can start no thread and is replaced: %s", getpid(), error)
            self._told_to_go = True
            self.out.ring()
            return False
        return True

    def employ(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a thread that belongs to this process."""
        self._employed.append(self.interpreter.start(target, args, name))

    def ended_elsewhere(self) -> list[Item]:
        """Give back the slot of an async job; those to start in it, as far as they are async."""
        starts = self.backlog.ended_elsewhere()
        self.out.ring()
        return starts

    # -- what a job is told and says ---------------------------------------------------------------

    def _lose(self) -> None:
        """Others have our leases: start none of them; what runs sees that it is not wanted."""
        self.out.returned.extend(self.backlog.empty())
        self.out.ring()
        for run in list(self.interrupter.running.values()):
            run.context.cancelled = True

    def _obey(self, command: Command) -> None:
        if command.verb == "lost":
            self._lose()
        if command.verb == "dump":
            self.out.stacks = own_stacks()
            self.out.ring()
        if command.verb not in ("cancel", "terminate"):
            return
        if self.backlog.withdraw(command.token):
            # It never ran: no attempt, and the store knows that it is cancelled.
            self.out.conclude(Verdict(command.token, Outcome.RELEASE, error=NOT_STARTED))
            return
        self.interrupter.order(command.token, command.verb == "terminate")
        self.out.ring()

    def _say(self, note: Note) -> None:
        """A job's progress, or a line of its log."""
        self.out.notes.append(note)
        self.out.ring()

    # -- the clerk ------------------------------------------------------------------------------

    def _clerk(self) -> None:
        ticked = machine_time()
        try:
            while True:
                self.out.sleep(self._next_look())
                now = machine_time()
                if not self.loop.blocks(self.interrupter.running.values(), now):
                    self.board.beat(self.setup.first_slot, now)  # a job here can still end
                if now - ticked >= TICK:
                    self._tick()
                    ticked = now
                if (self._told_to_go or not self.backlog.budget) and not self.backlog.quiet:
                    self.quiet()
                self._end_overdue()
                self.out.flush(wait=True)
                if self.backlog.over or self._leave_if_done():
                    return
        except BaseException as error:
            self.give_up("its clerk failed", error)

    def _next_look(self) -> float:
        self._dozing = True  # before the look: who comes after it rings
        deadline = self.interrupter.next_deadline()
        # Also once more after the last job has ended: what it did to memory must be seen.
        if deadline is None and not self.backlog.stirred:
            return 1.0 if self.loop.was_stopped else -1
        self._dozing = False
        return TICK if deadline is None else min(TICK, max(0.001, deadline - machine_time()))

    def _tick(self) -> None:
        """Every 50 ms while busy: see that what is held moves."""
        finished, stalled = self.backlog.tick()
        self.out.returned.extend(stalled)
        if not self.backlog.running and not self.backlog.waiting:
            self.interrupter.orders.clear()  # they came when their job had just ended
        if not finished:
            self._prefetch.nothing_ended(full=not self.backlog.free)
        most = self.setup.max_memory
        if most and not self.backlog.quiet and resident_memory() > most:
            log.info("process %d is beyond max_memory and is replaced", getpid())
            self.quiet()

    def _end_overdue(self) -> None:
        for run in self.interrupter.look(machine_time()):
            trace = self.interrupter.stack_of(run)
            terminated = run.interrupted is JobTerminated
            self.out.stuck.append(
                stuck_verdict(run.lease, run.envelope, trace, run.started, terminated)
            )
            self.quiet()

    def _state(self, verdicts: list[Verdict]) -> tuple[int, bool]:
        """How many leases to hold in all, and whether we are leaving: said with every frame."""
        if verdicts:
            self._prefetch.measure(verdicts)
        if self.backlog.quiet:
            return 0, True
        wanted = self.setup.concurrency + self._prefetch.ahead
        return min(wanted, self.backlog.budget + self.backlog.running), False

    def _leave_if_done(self) -> bool:
        """After ``quiet``: go once nothing runs and everything is sent."""
        with self.out.sending:  # a worker thread may be in the middle of sending the last verdict
            done = self.backlog.quiet and not self.backlog.running
            if not done or not self.out.empty():
                return False
            self.backlog.over = True
            try:
                # Wakes the reader; the supervisor sees the end.
                self.line.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.backlog.close()
        return True


def _kill_group() -> None:
    """End this process and what its tasks have started, but no group that a task has joined."""
    if getpgrp() == getpid():
        killpg(0, signal.SIGKILL)
    kill(getpid(), signal.SIGKILL)


def _with_job(context: JobContext, call: Any) -> Any:
    running_job.set(context)
    try:
        return call()
    finally:
        if is_child():
            end_child(sys.exc_info()[1])
