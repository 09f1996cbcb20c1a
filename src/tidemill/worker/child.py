"""A worker process as seen from inside: takes leases, runs jobs, sends verdicts.

Threads, and what each owns:

    workers     run sync jobs (:mod:`.thread_pool`, :mod:`.slots`). One worker thread at a time
                reads leases and commands from the socket
    main        waits for signals. With a concurrency of 1, the main thread runs the sync jobs,
                and another thread reads
    timekeeper  sends, and ends overdue jobs (:mod:`.timekeeper`, :mod:`.outbox`)
    loop        one event loop for all async jobs (:mod:`.event_loop`)
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from os import _exit, getpgrp, getpid, getppid, kill, killpg
from threading import get_ident
from typing import Any

from tidemill.client.runtime import Runtime
from tidemill.client.worker_reports import Answer, Question, question_of
from tidemill.core.clock import clock
from tidemill.core.job import NOT_STARTED, Lease, Outcome, Verdict
from tidemill.core.owner import Command
from tidemill.core.scoreboard import Scoreboard
from tidemill.core.stopping import Stopping
from tidemill.worker import verdicts
from tidemill.worker.child_protocol import Closed, Down, MessageSocket, Setup, Up
from tidemill.worker.counting import Counting
from tidemill.worker.event_loop import Loop
from tidemill.worker.forked_children import handle_signal, is_child, isolate_children
from tidemill.worker.outbox import Outbox
from tidemill.worker.process_events import ProcessEvents
from tidemill.worker.process_executor import ProcessExecutor
from tidemill.worker.run_log import RunLog
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.sampling import Sampler
from tidemill.worker.slots import PoolThread, Slots
from tidemill.worker.stacks import own_stacks
from tidemill.worker.starvation import Waits
from tidemill.worker.thread_pool import ThreadPool
from tidemill.worker.timekeeper import Timekeeper
from tidemill.worker.timeouts import Timeouts
from tidemill.worker.waiting_job import WaitingJob
from tidemill.worker.zombie_reaper import is_orphan

log = SafeLog("tidemill.worker")

NOTICE = 5.0
"""Seconds that a job has to clean up when its worker stops. The time is at most half the shutdown
timeout."""

GAVE_UP = 70
"""Exit code of a process that cannot go on. Any of its running jobs may be the reason."""


class Child:
    """One worker process from inside; with ``local`` it is a thread of the caller's process."""

    def __init__(
        self,
        mill: Runtime,
        setup: Setup,
        message_socket: MessageSocket[Up, Down],
        events: ProcessEvents,
        *,
        local: bool = False,
    ) -> None:
        self.mill = mill
        self.events = events
        self.setup = setup
        self.socket = message_socket
        self.local = local
        self._parent = 0 if local else getppid()
        self.timekeeper = Timekeeper(self)
        counting = Counting(setup.worker) if setup.history else None
        self.out = Outbox(message_socket, self.timekeeper.state, self.cut_off, counting)
        self.scoreboard = Scoreboard(setup.board, setup.board_slots)
        self.timeouts = Timeouts(setup.waits.stuck, self.out.ring)
        self.stopping = Stopping()
        self.run_log = RunLog(max(1, setup.slots // setup.concurrency), setup.slow)
        waits = Waits(mill, setup, self.scoreboard)
        self.executor = ProcessExecutor(
            *(mill, setup, self.out, self.timeouts, self.scoreboard, waits, self.stopping),
            self.run_log,
        )
        self.threads = ThreadPool(self)
        self._main_thread = setup.concurrency == 1 and not local
        self.slots = Slots(
            setup.concurrency,
            budget=setup.max_jobs or sys.maxsize,
            threads=0 if self._main_thread else setup.concurrency + 1,
            start_thread=self.threads.start_worker,
        )
        self.loop = Loop(self, events.runner)
        isolate_children(self)

    # -- life -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the supervisor ends the process.

        With a concurrency of 1 the calling thread runs the jobs.
        """
        self.scoreboard.sign(self.setup.first_slot, getpid(), clock.machine())
        timekeeper = threading.Thread(
            target=self.timekeeper.serve, name="tidemill-timekeeper", daemon=True
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
            self.threads.work(PoolThread())
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
        ended = self.threads.join()
        self.socket.close()
        if ended:
            self.scoreboard.close()

    def on_signal(self, signum: int, frame: object) -> None:
        """Handle SIGTERM and SIGINT. The timekeeper acts: this thread may hold a lock now."""
        self.go_soon()

    def go_soon(self) -> None:
        """Have the timekeeper finish this process, so that the supervisor replaces it."""
        self.timekeeper.told_to_go = True
        self.out.ring()

    def read(self, thread: PoolThread | None = None) -> None:
        """Read frames until the thread gets a job to run, or until the process ends."""
        try:
            while not self.slots.over and (thread is None or thread.reads):
                for down in self.socket.receive():
                    self._carry_out(down)
                self.loop.launch(self.slots.assign(thread))
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
        """End this process at once: a task has broken the interpreter.

        If several jobs run, any of these may be at fault. So the supervisor runs each job alone.
        """
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
            self.give_back(job.token)
            self.async_job_ended()

    def give_back(self, token: int) -> None:
        """Return an unstarted job to the supervisor."""
        self.out.returned.append(token)

    def after_fork_child(self) -> None:
        """A task has forked: close the child's copy of the socket to the supervisor."""
        self.socket.close()

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
        """Have jobs wait for a slot; conclude the jobs that cannot run."""
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
        elif self.timekeeper.dozing:
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
        if command.verb == "dump":
            self.out.stacks = own_stacks()
            self.out.ring()
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
        """Answer with the stacks at once, or with a profile after its seconds."""

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

    # -- for the event loop ---------------------------------------------------------------------

    def start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a thread that belongs to this process."""
        self.threads.start_thread(name, target, *args)

    def async_job_ended(self) -> list[WaitingJob]:
        """Free the slot of an async job; returns the async jobs to start in free slots."""
        starts = self.slots.async_job_ended()
        self.out.ring()
        return starts


def _kill_group() -> None:
    """Kill this process, and its group unless a task has moved the process to another group."""
    if getpgrp() == getpid():
        killpg(0, signal.SIGKILL)
    kill(getpid(), signal.SIGKILL)
