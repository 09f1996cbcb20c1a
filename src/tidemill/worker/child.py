"""A worker process as seen from inside: takes leases, runs jobs, sends verdicts.

Threads, and what each owns:

    workers     run sync jobs (:mod:`.slots`). One worker thread at a time reads leases and commands
                from the socket
    main        waits for signals. With a concurrency of 1, the main thread runs the sync jobs,
                and another thread reads
    timekeeper  sends (:mod:`.child_protocol`), and ends overdue jobs (:mod:`.timeouts`)
    loop        one event loop for all async jobs (:mod:`.event_loop`)
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from os import _exit, getpgrp, getpid, getppid, kill, killpg
from threading import get_ident
from time import sleep
from typing import TYPE_CHECKING, Any

from tidemill.client.worker_reports import Answer, Question, question_of
from tidemill.core.clock import clock
from tidemill.core.job import NOT_STARTED, Command, Lease, Outcome, Verdict
from tidemill.core.locks import Stopping
from tidemill.core.retry import JobTerminated
from tidemill.core.scoreboard import Scoreboard
from tidemill.worker import verdicts
from tidemill.worker.child_protocol import Closed, Down, MessageSocket, Outbox, Setup, Up
from tidemill.worker.counting import Counting
from tidemill.worker.event_loop import Loop, ProcessEvents
from tidemill.worker.execute import ProcessExecutor, WaitingJob, run_sync
from tidemill.worker.forked_children import handle_signal, is_child, isolate_children
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.slots import TICK, PoolThread, Slots, Waits
from tidemill.worker.stacks import Sampler, own_stacks
from tidemill.worker.timeouts import Timeouts
from tidemill.worker.verdicts import RunLog

if TYPE_CHECKING:
    from tidemill.runtime import Runtime

log = SafeLog("tidemill.worker")

NOTICE = 5.0
"""Seconds that a job has to clean up when its worker stops. The time is at most half the shutdown
timeout."""

GAVE_UP = 70  # exit code of a process that cannot go on. Any of its running jobs may be the reason.


class Child:
    """One worker process from inside; with ``local`` it is a thread of the caller's process."""

    def __init__(
        self,
        runtime: Runtime,
        setup: Setup,
        message_socket: MessageSocket[Up, Down],
        events: ProcessEvents,
        *,
        local: bool = False,
    ) -> None:
        self.runtime = runtime
        self.events = events
        self.setup = setup
        self.socket = message_socket
        self.local = local
        self._parent = 0 if local else getppid()
        self._threads: list[threading.Thread] = []
        self._dozing = True  # True while the timekeeper sleeps without a time limit
        # True when a signal, or a thread that cannot start, ends the process.
        self._told_to_go = False
        self._main_thread = setup.concurrency == 1 and not local
        self.slots = Slots(
            setup.concurrency,
            budget=setup.max_jobs or sys.maxsize,
            threads=0 if self._main_thread else setup.concurrency + 1,
            start_thread=self._start_worker,
        )
        counting = Counting(setup.worker) if setup.history else None
        self.out = Outbox(message_socket, self.slots, self.cut_off, counting)
        self.scoreboard = Scoreboard(setup.board, setup.board_slots)
        self.timeouts = Timeouts(setup.waits.stuck, self.out.ring)
        self.stopping = Stopping()
        self.run_log = RunLog(max(1, setup.slots // setup.concurrency), setup.slow)
        self.waits = Waits(runtime, setup, self.scoreboard)
        self.executor = ProcessExecutor(self)
        self.loop = Loop(self, events.runner)
        isolate_children(self)

    # -- life -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the supervisor ends the process."""
        # With a concurrency of 1 the calling thread runs the jobs.
        self.scoreboard.sign(self.setup.first_slot, getpid(), clock.machine())
        timekeeper = threading.Thread(
            target=self._keep_time, name="tidemill-timekeeper", daemon=True
        )
        timekeeper.start()
        if self.events.runner is not None:
            # Run the loop: async handlers of the start may have left background tasks on it.
            self.loop.begun()
        self.out.ring()  # the first frame says how many leases the process would like to hold
        if self._main_thread:
            reader = threading.Thread(target=self.read, name="tidemill-reader", daemon=True)
            reader.start()
            handle_signal(signal.SIGALRM, self.timeouts.on_alarm)
            self.timeouts.main = get_ident()
            self.executor.use_main_thread()
            self._work(PoolThread())
        else:
            self.slots.begin()
            self.slots.ended.wait()
        self.out.ring()
        timekeeper.join(5)
        self.events.stop(self.loop)
        if self.local:
            self._tidy()

    def _tidy(self) -> None:
        """With ``local``, release the resources that the kernel frees when a real process ends."""
        self.loop.stop()
        threads = list(self._threads)
        for thread in threads:
            thread.join(1)
        self.socket.close()
        if not any(thread.is_alive() for thread in threads):
            self.scoreboard.close()

    def on_signal(self, signum: int, frame: object) -> None:
        """Handle SIGTERM and SIGINT. The timekeeper acts: this thread may hold a lock now."""
        self._go_soon()

    def _go_soon(self) -> None:
        """Have the timekeeper finish this process, so that the supervisor replaces it."""
        self._told_to_go = True
        self.out.ring()

    # -- threads of the pool --------------------------------------------------------------------

    def start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _start_worker(self, number: int, thread: PoolThread) -> bool:
        """Start a thread that runs jobs. When none can start, the process is replaced."""
        try:
            self.start_thread(f"tidemill-{number}", self._work, thread)
        except RuntimeError as error:  # the system has no further thread
            log.error("process %d can start no thread and is replaced: %s", getpid(), error)
            self._go_soon()
            return False
        return True

    def _work(self, thread: PoolThread) -> None:
        """Read frames and run jobs until the process ends, even if a task raises at an odd time."""
        while not self.slots.over:
            try:
                self._take_turn(thread)
            except BaseException as error:
                self.give_up("a thread of its pool failed", error)

    def _take_turn(self, thread: PoolThread) -> None:
        """Read when it is the thread's turn, else run its job, else wait."""
        if thread.reads:
            self.read(thread)
        elif thread.job is not None:
            run_sync(self.executor.execute(thread.job))
            thread.job, starts = self.slots.next()
            if starts:
                self.loop.launch(starts)
            if thread.job is None:
                # This thread is free and sends by itself: the timekeeper need not wake up.
                self.out.flush(wait=False)
        else:
            if starts := self.slots.park(thread):
                self.loop.launch(starts)
            thread.wake.acquire()

    def read(self, thread: PoolThread | None = None) -> None:
        """Read frames until the thread gets a job to run, or until the process ends."""
        try:
            while not self.slots.over and (thread is None or thread.reads):
                for down in self.socket.receive():
                    self._carry_out(down)
                if starts := self.slots.assign(thread):
                    self.loop.launch(starts)
        except Closed:
            self.cut_off()
        except BaseException as error:
            self.give_up("it can read no more jobs", error)

    # -- trouble --------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """End this process: its supervisor is dead, or a task has closed the socket."""
        if self.slots.over or self.local or is_child():
            self.slots.close()
        elif is_orphan(self._parent):
            _kill_group()
        else:
            self.give_up("a task closed the worker's descriptors")

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """End this process at once: a task has broken the interpreter."""
        # If several jobs run, any of these may be at fault. So the supervisor runs each job alone.
        if self.slots.over:
            return
        if is_child():
            _exit(1)
        try:
            reason = f"{why}: {verdicts.describe(error)[0]}" if error is not None else why
            log.error("worker process %d gives up: %s", getpid(), reason)
            if not self.local:
                self.out.flush_at_last()
        finally:
            if not self.local:
                _exit(GAVE_UP)
        self.slots.close()

    def retire(self, why: str, jobs: Iterable[WaitingJob] = ()) -> None:
        """Start no more jobs; give back ``jobs``, which have slots; finish the running jobs."""
        log.error("worker process %d is replaced: %s", getpid(), why)
        self.quiet()
        for job in jobs:
            self.out.returned.append(job.token)
            self.async_job_ended()

    def after_fork_child(self) -> None:
        """A task has forked: its child has neither the socket to the supervisor nor the loop."""
        self.socket.close()
        self.loop.after_fork_child()

    # -- frames from the supervisor -------------------------------------------------------------

    def _carry_out(self, down: Down) -> None:
        if down.leases:
            self._accept(down.leases)
        for command in down.commands:
            self._obey(command)
        if down.quiet:
            self.quiet()
        if down.stop >= 0:
            self.stop_in(down.stop)

    def _accept(self, leases: list[Lease]) -> None:
        jobs: list[WaitingJob] = []
        for lease in leases:
            admitted = self.executor.admit(lease)
            if isinstance(admitted, Verdict):
                self.out.conclude(admitted, lease)
            else:
                jobs.append(admitted)
        if not self.slots.add(jobs):
            self.out.returned.extend(job.token for job in jobs)
            self.out.ring()
        elif self._dozing:
            self.out.ring()  # wake the timekeeper: it watches the waiting jobs

    def quiet(self) -> None:
        """Start no more jobs, give back the waiting jobs, and end after the running jobs."""
        self.out.returned.extend(self.slots.stop())
        self.out.ring()

    def stop_in(self, seconds: float) -> None:
        """Tell running jobs that the worker stops; end these jobs before the process is killed."""
        self.timeouts.stop_at = clock.machine() + seconds - min(NOTICE, seconds / 2)
        self.stopping.set()
        self.out.ring()

    def _obey(self, command: Command) -> None:
        if command.verb == "lost":
            self._lose()
        if (question := question_of(command.verb)) is not None:
            self._answer(question)
        if command.verb not in ("cancel", "terminate"):
            return
        if self.slots.withdraw(command.token):
            # The job never ran, so no attempt counts. The store knows that somebody cancelled the
            # job.
            self.out.conclude(Verdict(command.token, Outcome.RELEASE, error=NOT_STARTED))
            return
        self.timeouts.order(command.token, command.verb == "terminate")
        self.out.ring()

    def _answer(self, question: Question) -> None:
        def send(answer: Answer) -> None:
            self.out.answers.append(answer)
            self.out.ring()

        if question.verb == "dump":
            send(Answer(question.id, getpid(), own_stacks()))
        else:
            Sampler(
                question.seconds,
                question.hertz,
                lambda stacks, count: send(Answer(question.id, getpid(), "", stacks, count)),
            ).start()

    def _lose(self) -> None:
        """Drop all leases: other workers have these jobs. Start no job, and cancel running jobs."""
        self.out.returned.extend(self.slots.empty())
        self.out.ring()
        for run in list(self.timeouts.running.values()):
            run.context.cancelled = True

    def async_job_ended(self) -> list[WaitingJob]:
        """Free the slot of an async job; returns the async jobs to start in free slots."""
        starts = self.slots.async_job_ended()
        self.out.ring()
        return starts

    # -- the timekeeper -------------------------------------------------------------------------

    def _keep_time(self) -> None:
        """Send the outbox, and do all that depends on time, until the process ends."""
        # The thread sleeps until somebody rings, or until the next deadline. While jobs run, it
        # wakes every 50 milliseconds.
        ticked = clock.machine()
        try:
            while True:
                self.out.sleep(self._next_look())
                now = clock.machine()
                runs = self.timeouts.running
                if not (runs and self.loop.blocks(runs.values(), now)):
                    # A heartbeat shows that a job can still end.
                    self.scoreboard.beat(self.setup.first_slot, now)
                if now - ticked >= TICK:
                    self._tick()
                    ticked = now
                if (self._told_to_go or not self.slots.budget) and not self.slots.quiet:
                    self.quiet()
                self._end_overdue()
                self.out.flush(wait=True)
                self.run_log.look(now)
                if self.slots.over or self._leave_if_done():
                    self.run_log.close()
                    return
        except BaseException as error:
            self.give_up("its timekeeper failed", error)

    def _next_look(self) -> float:
        """Seconds until the next look; -1 for no limit."""
        self._dozing = True  # set before the check, so that a job that comes later rings
        deadline = self.timeouts.next_deadline()
        # A job that ended keeps ``active`` true for one more tick, which checks the memory.
        if deadline is None and not self.slots.active:
            summary = self.run_log.next_look(clock.machine())
            return -1 if summary is None else summary
        self._dozing = False
        return TICK if deadline is None else min(TICK, max(0.001, deadline - clock.machine()))

    def _tick(self) -> None:
        """Give back jobs that wait too long, and check the memory: every 50 ms while jobs run."""
        self.out.returned.extend(self.slots.tick())
        if not self.slots.running and not self.slots.waiting:
            self.timeouts.orders.clear()  # drop commands for jobs that had just ended
        most = self.setup.max_memory
        if most and not self.slots.quiet and resident_memory() > most:
            log.info("process %d uses more than max_memory and is replaced", getpid())
            self.quiet()

    def _end_overdue(self) -> None:
        """Interrupt overdue jobs; report stuck ones, and have the process replaced."""
        for run in self.timeouts.look(clock.machine()):
            trace = self.timeouts.stack_of(run)
            terminated = run.interrupted is JobTerminated
            self.out.stuck.append(
                verdicts.stuck(run.lease, run.envelope, trace, run.started, terminated)
            )
            self.quiet()

    def _leave_if_done(self) -> bool:
        """After ``quiet``: end the process once no job runs and everything is sent."""
        with self.out.sending:  # wait for a thread that is sending the last verdict
            done = self.slots.quiet and not self.slots.running
            if not done or not self.out.empty():
                return False
            self.slots.over = True
            try:
                # The closed socket wakes the thread that reads, and tells the supervisor of the
                # end.
                self.socket.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.slots.close()
        return True


def resident_memory() -> int:
    """Resident memory of this process in bytes; without ``/proc`` its peak so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def _kill_group() -> None:
    """Kill this process, and its group unless a task has moved the process to another group."""
    if getpgrp() == getpid():
        killpg(0, signal.SIGKILL)
    kill(getpid(), signal.SIGKILL)


_LOOKS, _PAUSE = 30, 0.01  # the number of checks for the parent, and the seconds between two checks


def is_orphan(parent: int) -> bool:
    """True when the parent of this process has died. The parent's end of the socket is closed.

    The kernel closes the descriptors of a killed process a moment before its children get another
    parent. So the function waits up to 0.3 seconds before it returns False.
    """
    for _ in range(_LOOKS):
        if getppid() != parent:
            return True
        sleep(_PAUSE)
    return False
