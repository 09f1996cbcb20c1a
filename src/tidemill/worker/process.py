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

import contextvars
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tidemill.app import Tidemill
from tidemill.board import Board
from tidemill.clock import machine_time, wall_time
from tidemill.context import JobContext, running_job
from tidemill.job import NOT_STARTED, Command, Envelope, Lease, Note, Outcome, Verdict
from tidemill.retry import JobTerminated
from tidemill.worker.backlog import Backlog, Desk
from tidemill.worker.interrupt import Interrupter, Run
from tidemill.worker.loop import Item, Loop
from tidemill.worker.memory import resident_memory
from tidemill.worker.outbox import Outbox
from tidemill.worker.prefetch import TICK, Prefetch
from tidemill.worker.runner import Runner, stuck_verdict
from tidemill.worker.waits import Waits
from tidemill.worker.wire import Closed, Down, Line, Setup, Up

__all__ = ["Process"]

log = logging.getLogger("tidemill.worker")


class Process:
    """The runtime inside one worker process; for tests and ``memory://`` inside one thread."""

    def __init__(
        self, mill: Tidemill, setup: Setup, line: Line[Up, Down], *, local: bool = False
    ) -> None:
        self.mill = mill
        self.setup = setup
        self.line = line
        self.local = local
        self.out = Outbox(line, self._state)
        self.runner = Runner(mill)
        self.board = Board(setup.board, setup.board_slots)
        self.slots = list(range(setup.first_slot, setup.first_slot + setup.concurrency))
        self.interrupter = Interrupter()
        self._main_thread = setup.concurrency == 1 and not local
        self.backlog = Backlog(
            setup.concurrency,
            budget=setup.max_jobs or sys.maxsize,
            threads=0 if self._main_thread else setup.concurrency + 1,
            hire=lambda number, desk: self.employ(f"tidemill-{number}", self._work, desk),
        )
        self._prefetch = Prefetch(setup.concurrency)
        self._told_to_go = False
        self._dozing = True  # the clerk sleeps until it is rung for
        self.loop = Loop(self)
        self._employed: list[threading.Thread] = []
        self.waits = Waits(mill, setup, self.board)
        self._generations = itertools.count(1)
        self._order = {name: place for place, name in enumerate(setup.queues)}

    # -- life -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run until told to go. With a concurrency of 1 the calling thread runs the jobs."""
        clerk = threading.Thread(target=self._clerk, name="tidemill-clerk", daemon=True)
        clerk.start()
        self.out.ring()  # its first word is how much work we would like
        if self._main_thread:
            reader = threading.Thread(target=self._read, name="tidemill-reader", daemon=True)
            reader.start()
            signal.signal(signal.SIGALRM, self.interrupter.on_alarm)
            self.interrupter.main = threading.get_ident()
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
        except Closed:
            pass  # the supervisor is gone, and with it the leases; or we go
        except Exception:
            log.exception("the process cannot go on")
        self._die_unless_over()
        self.backlog.close()

    def _die_unless_over(self) -> None:
        """Die with all subprocesses; nothing of what runs here can be told to anyone."""
        if not self.backlog.over and not self.local:
            os.killpg(0, signal.SIGKILL)

    def _carry_out(self, down: Down) -> None:
        if down.leases:
            self._accept(down.leases)
        for command in down.commands:
            self._obey(command)
        if down.quiet:
            self.quiet()

    def quiet(self) -> None:
        """Start nothing more; give back what has not started; go when the rest has ended."""
        self.out.returned.extend(self.backlog.stop())
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
        """A worker thread: read when it is its turn, run what is on the desk, else wait."""
        while not self.backlog.over:
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
            verdict = self.runner.failure(run, error)
        else:
            verdict = self.runner.success(run, value)
        self.end(run, verdict)

    def _perform(self, run: Run, call: Any) -> Any:
        """Run in a context of the job's own, so that nothing leaks into the next."""
        if run.deadline or run.wanted:
            self.out.ring()  # only now is the run where the clerk looks for its deadline
        return contextvars.copy_context().run(_with_job, run.context, call)

    def begin(self, lease: Lease, envelope: Envelope, started: float) -> Run:
        """A run of a job, in the calling thread, and on the board from now on."""
        context = JobContext(envelope, lease.attempt, lease.token, self._say, self.waits)
        run = Run(lease, envelope, context, next(self._generations), threading.get_ident())
        run.started = started
        self.runner.started(run)
        if envelope.timeout:
            run.deadline = machine_time() + envelope.timeout
        slot = context.slot = self.slots.pop()
        self.board.start(slot, run.token, run.generation, started, run.deadline)
        return run

    def end(self, run: Run, verdict: Verdict) -> None:
        """The run is over; its verdict counts unless another has fallen meanwhile."""
        if self.interrupter.finished(run):
            self.out.conclude(verdict)
        self.board.end(run.context.slot)
        self.slots.append(run.context.slot)

    def employ(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a thread that belongs to this process."""
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._employed.append(thread)
        thread.start()

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
        ticked = time.monotonic()
        try:
            while True:
                self.out.sleep(self._next_look())
                now = time.monotonic()
                if now - ticked >= TICK:
                    self._tick()
                    ticked = now
                if (self._told_to_go or not self.backlog.budget) and not self.backlog.quiet:
                    self.quiet()
                self._end_overdue()
                self.out.flush(wait=True)
                if self.backlog.over or self._leave_if_done():
                    return
        except Exception:
            log.exception("the process cannot go on")
            self._die_unless_over()

    def _next_look(self) -> float:
        self._dozing = True  # before the look: who comes after it rings
        deadline = self.interrupter.next_deadline()
        # Also once more after the last job has ended: what it did to memory must be seen.
        if deadline is None and not self.backlog.stirred:
            return -1
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
            log.info("process %d is beyond max_memory and is replaced", os.getpid())
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


def _with_job(context: JobContext, call: Any) -> Any:
    running_job.set(context)
    return call()
