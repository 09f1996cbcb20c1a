"""A worker process: takes leases from the supervisor, runs them, sends verdicts back.

Threads, and what each owns:

    reader   the socket's incoming side: puts leases into the backlog, carries out orders
    clerk    the outgoing side, and time: sends verdicts in batches, ends what runs too long,
             gives back what did not start
    workers  up to ``concurrency`` threads that run sync jobs; with a concurrency of 1 the main thread
    loop     one event loop for all async jobs

A job takes a slot from the moment it starts until its verdict is in the outbox. Sync or async, at
most ``concurrency`` run at a time.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import ctypes
import faulthandler
import heapq
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from tidemill.app import Tidemill
from tidemill.board import Board
from tidemill.clock import machine_time, wall_time
from tidemill.context import JobContext, running_job
from tidemill.errors import InvalidOption
from tidemill.job import Command, Envelope, Lease, Note, Outcome, Verdict, decode_envelope
from tidemill.loader import load_app
from tidemill.retry import Fail, JobTerminated, JobTimeout
from tidemill.task import Task
from tidemill.worker.interrupt import Interrupter, Run
from tidemill.worker.runner import Runner, describe
from tidemill.worker.wire import Closed, Down, Hello, Line, Setup, Up

__all__ = ["Process", "main"]

log = logging.getLogger("tidemill.worker")

TICK = 0.05
"""Seconds of work a process holds in advance, and how often it looks while it is busy."""

PREFETCH_MOST = 4000

Item = tuple[int, int, int, int, Lease, Envelope, Task[..., Any]]


class Process:
    """The runtime inside one worker process (or, for tests and ``memory://``, inside one thread)."""

    def __init__(self, mill: Tidemill, setup: Setup, line: Line[Up, Down], *, local: bool = False) -> None:
        self.mill = mill
        self.setup = setup
        self.line = line
        self.local = local
        self.runner = Runner(mill)
        self.board = Board(setup.board, setup.board_slots)
        self.slots = list(range(setup.first_slot, setup.first_slot + setup.concurrency))
        self.interrupter = Interrupter()
        self._main_thread = setup.concurrency == 1 and not local
        # The backlog and the slots are one state under one lock.
        self._lock = threading.Lock()
        self._backlog: list[Item] = []
        self._free = setup.concurrency
        self._idle: list[_Desk] = []
        self._threads = 0
        self._quiet = False
        self._started = 0
        self._finished = 0
        # The outbox belongs to whoever appends; the clerk empties it.
        self._verdicts: collections.deque[Verdict] = collections.deque()
        self._notes: collections.deque[Note] = collections.deque()
        self._returned: collections.deque[int] = collections.deque()
        self._stuck: collections.deque[Verdict] = collections.deque()
        self._sending = threading.Lock()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._rung = False
        self._prefetch = setup.concurrency
        self._sent_depth = -1
        self._budget = setup.max_jobs or sys.maxsize
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations = itertools.count(1)
        self._order = {name: place for place, name in enumerate(setup.queues)}

    # -- life -----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run until told to go. With a concurrency of 1 the calling thread runs the jobs."""
        clerk = threading.Thread(target=self._clerk, name="tidemill-clerk", daemon=True)
        clerk.start()
        self._ring()  # its first word is how much work we would like
        if self._main_thread:
            threading.Thread(target=self._read, name="tidemill-reader", daemon=True).start()
            signal.signal(signal.SIGALRM, self.interrupter.on_alarm)
            self.interrupter.main = threading.get_ident()
            self._threads = 1
            self._work(_Desk())
        else:
            self._read()
        self._over = True
        self._ring()
        clerk.join(5)

    def _read(self) -> None:
        """The reader: until the line closes or everything is done after ``quiet``."""
        try:
            while not self._over:
                for down in self.line.receive():
                    self._carry_out(down)
        except Closed:
            if not self._over and not self.local:
                # The supervisor is gone, and with it the leases. Take our subprocesses along.
                os.killpg(0, signal.SIGKILL)
        finally:
            self._over = True
            with self._lock:
                desks, self._idle = self._idle, []
            for desk in desks:
                desk.wake.release()

    def _carry_out(self, down: Down) -> None:
        if down.leases:
            self._accept(down.leases)
        for command in down.commands:
            self._obey(command)
        if down.quiet:
            self.quiet()

    def quiet(self) -> None:
        """Start nothing more; give back what has not started; go when the rest has ended."""
        with self._lock:
            self._quiet = True
            self._returned.extend(item[3] for item in self._backlog)
            self._backlog.clear()
        self._ring()

    # -- taking work ----------------------------------------------------------------------------

    def _accept(self, leases: list[Lease]) -> None:
        items: list[Item] = []
        for lease in leases:
            item = self._admit(lease)
            if item is not None:
                items.append(item)
        with self._lock:
            if self._quiet:
                self._returned.extend(item[3] for item in items)
                self._ring()
                return
            backlog = self._backlog
            for item in items:
                heapq.heappush(backlog, item)
            starts = self._pump()
        self._launch(starts)

    def _admit(self, lease: Lease) -> Item | None:
        """What must be known before a job may wait for a slot; a verdict where it cannot run."""
        now = wall_time()
        try:
            envelope = decode_envelope(lease.envelope)
        except Exception as error:
            reason = f"the job cannot be decoded: {error}"
            self._conclude(Verdict(lease.token, Outcome.FAIL, error=reason, started=now, ended=now))
            return None
        refusal = self.runner.refuse(envelope)
        if refusal:
            log.error("job %s: %s", envelope.id, refusal)
            self._conclude(Verdict(lease.token, Outcome.FAIL, error=refusal, started=now, ended=now))
            return None
        task = self.runner.resolve(envelope.task)
        if task is None:
            self._conclude(self.runner.unknown(lease, envelope))
            return None
        place = self._order.get(envelope.queue, 0)
        return place, lease.rank, lease.seq, lease.token, lease, envelope, task

    def _pump(self) -> list[Item]:
        """Under the lock: give free slots to the backlog. Async jobs are returned, to be launched."""
        starts: list[Item] = []
        backlog = self._backlog
        while self._free > 0 and backlog and self._budget:
            if backlog[0][6].is_async:
                starts.append(heapq.heappop(backlog))
            elif self._idle:
                desk = self._idle.pop()
                desk.item = heapq.heappop(backlog)
                desk.wake.release()
            elif self._threads < self.setup.concurrency:
                self._threads += 1
                desk = _Desk()
                desk.item = heapq.heappop(backlog)
                threading.Thread(
                    target=self._work, args=(desk,), name=f"tidemill-{self._threads}", daemon=True
                ).start()
            else:
                break
            self._free -= 1
            self._started += 1
            self._budget -= 1
        return starts

    def _launch(self, starts: list[Item]) -> None:
        if starts:
            loop = self._event_loop()
            loop.call_soon_threadsafe(self._start_async, starts)

    # -- sync jobs ------------------------------------------------------------------------------

    def _work(self, desk: _Desk) -> None:
        """A worker thread: run what is on the desk, take the next, park when there is none."""
        item = desk.item
        while not self._over:
            if item is None:
                item = self._park(desk)
                continue
            self._run(item)
            item = self._next()

    def _park(self, desk: _Desk) -> Item | None:
        desk.item = None
        with self._lock:
            if self._over or (self._main_thread and self._leaving()):
                self._over = True
                return None
            self._idle.append(desk)
            starts = self._pump()
        self._launch(starts)
        desk.wake.acquire()
        return desk.item

    def _next(self) -> Item | None:
        """Give the slot back and take the next sync job in one go."""
        starts: list[Item] = []
        item: Item | None = None
        with self._lock:
            self._free += 1
            self._finished += 1
            backlog = self._backlog
            while backlog and self._free > 0 and self._budget:
                self._free -= 1
                self._started += 1
                self._budget -= 1
                first = heapq.heappop(backlog)
                if not first[6].is_async:
                    item = first
                    break
                starts.append(first)
        if starts:
            self._launch(starts)
        if item is None:
            self._flush()  # nothing else to do: no reason to let the clerk do it later
        return item

    def _run(self, item: Item) -> None:
        lease, envelope, task = item[4], item[5], item[6]
        started = wall_time()
        context = JobContext(envelope, lease.attempt, lease.token, self._say)
        run = Run(lease, envelope, context, next(self._generations), threading.get_ident())
        slot = self._begin(run, started)
        try:
            call = self.runner.prepare(envelope, task, context)
            value = self.interrupter.guarded(run, self._perform, run, call)
        except BaseException as error:
            verdict = self.runner.failure(lease, envelope, error, started)
        else:
            verdict = self.runner.success(lease, envelope, value, started)
        self._end(run, slot, verdict)

    def _perform(self, run: Run, call: Any) -> Any:
        """Run in a context of the job's own, so that nothing leaks into the next."""
        if run.deadline:
            self._ring()  # only now is the run where the clerk looks for its deadline
        return contextvars.copy_context().run(_with_job, run.context, call)

    def _begin(self, run: Run, started: float) -> int:
        slot = self.slots.pop()
        timeout = run.envelope.timeout
        if timeout:
            run.deadline = machine_time() + timeout
        self.board.start(slot, run.lease.token, run.generation, started, run.deadline)
        run.started = started
        return slot

    def _end(self, run: Run, slot: int, verdict: Verdict) -> None:
        if self.interrupter.finished(run):
            self._conclude(verdict)
        self.board.end(slot)
        self.slots.append(slot)

    # -- async jobs -----------------------------------------------------------------------------

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="tidemill-loop", daemon=True).start()
        return self._loop

    def _start_async(self, items: list[Item]) -> None:
        assert self._loop is not None
        for item in items:
            task = self._loop.create_task(self._run_async(item), context=contextvars.Context())
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)

    async def _run_async(self, item: Item) -> None:
        lease, envelope, task = item[4], item[5], item[6]
        started = wall_time()
        context = JobContext(envelope, lease.attempt, lease.token, self._say)
        run = Run(lease, envelope, context, next(self._generations), threading.get_ident())
        run.task, run.loop = asyncio.current_task(), self._loop
        slot = self._begin(run, started)
        running_job.set(context)
        self.interrupter.running[run.token] = run
        if run.deadline:
            self._ring()
        try:
            call = self.runner.prepare(envelope, task, context)
            value = await call()
            if run.interrupted is not None:
                raise run.interrupted()  # it swallowed the cancellation
        except BaseException as error:
            if run.interrupted is not None and isinstance(error, asyncio.CancelledError):
                error = run.interrupted().with_traceback(error.__traceback__)
            elif isinstance(error, asyncio.CancelledError):
                error = Fail("the task cancelled itself")
            verdict = self.runner.failure(lease, envelope, error, started)
        else:
            verdict = self.runner.success(lease, envelope, value, started)
        self._end(run, slot, verdict)
        with self._lock:
            self._free += 1
            self._finished += 1
            starts = self._pump()
        self._start_async(starts)
        self._ring()

    # -- orders ---------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        if command.verb not in ("cancel", "terminate"):
            return
        with self._lock:
            waiting = [item for item in self._backlog if item[3] == command.token]
            for item in waiting:
                self._backlog.remove(item)
                heapq.heapify(self._backlog)
        if waiting:
            reason = "cancelled before it started"
            self._conclude(Verdict(command.token, Outcome.CANCELLED, error=reason, ended=wall_time()))
            return
        run = self.interrupter.running.get(command.token)
        if run is not None:
            run.context.cancelled = True
            if command.verb == "terminate":
                run.wanted = JobTerminated
                self._ring()

    def _say(self, note: Note) -> None:
        self._notes.append(note)
        self._ring()

    # -- the clerk ------------------------------------------------------------------------------

    def _conclude(self, verdict: Verdict) -> None:
        self._verdicts.append(verdict)
        if not self._rung:
            self._ring()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            try:
                self._bell.release()
            except RuntimeError:
                pass  # another thread rang it at the same moment

    def _clerk(self) -> None:
        ticked = time.monotonic()
        try:
            while True:
                busy = self._free < self.setup.concurrency or bool(self._backlog)
                self._bell.acquire(timeout=self._next_look(busy))
                self._rung = False
                now = time.monotonic()
                if now - ticked >= TICK:
                    self._tick()
                    ticked = now
                self._end_overdue()
                self._flush()
                if self._over or self._leave_if_done():
                    return
        except Closed:
            return

    def _next_look(self, busy: bool) -> float:
        deadline = self.interrupter.next_deadline()
        if deadline is None:
            return TICK if busy else -1
        left = max(0.001, deadline - machine_time())
        return min(left, TICK) if busy else left

    def _tick(self) -> None:
        """Every 50 ms while busy: see that what is held moves."""
        with self._lock:
            finished, self._finished = self._finished, 0
            started, self._started = self._started, 0
            full = self._free == 0
            if full and not started and self._backlog:
                # Nothing moved: somebody else may have a free slot for what lies here.
                self._returned.extend(item[3] for item in self._backlog)
                self._backlog.clear()
        if full and not finished:
            self._prefetch = 0  # long jobs: nothing in advance
        elif not full and not finished:
            self._prefetch = self.setup.concurrency  # idle: what comes next is unknown
        if not self._budget:
            self.quiet()
        if self.setup.max_memory and _resident() > self.setup.max_memory:
            self.quiet()

    def _end_overdue(self) -> None:
        for run in self.interrupter.look(machine_time()):
            trace = self.interrupter.stack_of(run)
            kind = run.interrupted or JobTimeout
            self._stuck.append(self.runner.stuck(run.lease, run.envelope, kind, trace, run.started))
            self.quiet()

    def _flush(self) -> None:
        """Send what is in the outbox, unless somebody else is at it."""
        if not self._sending.acquire(blocking=False):
            self._ring()
            return
        try:
            verdicts = _emptied(self._verdicts)
            if verdicts:
                self._measure(verdicts)
            up = Up(
                verdicts=verdicts,
                notes=_emptied(self._notes),
                depth=self._depth(),
                returned=_emptied(self._returned),
                stuck=_emptied(self._stuck),
                leaving=self._quiet,
            )
            if up.verdicts or up.notes or up.returned or up.stuck or up.depth != self._sent_depth:
                self._sent_depth = up.depth
                self.line.send(up)
        except Closed:
            pass  # the reader sees it too and ends the process
        finally:
            self._sending.release()

    def _measure(self, verdicts: list[Verdict]) -> None:
        """Hold a tick's worth of such jobs in advance; grow to it in steps, an average may deceive."""
        seconds = sum([verdict.ended - verdict.started for verdict in verdicts]) / len(verdicts)
        target = self.setup.concurrency * TICK / max(seconds, 1e-6)
        grown = 4 * max(self._prefetch, self.setup.concurrency)
        self._prefetch = int(max(0, min(PREFETCH_MOST, target, grown)))

    def _depth(self) -> int:
        """How many leases to hold in all."""
        if self._quiet:
            return 0
        return min(self.setup.concurrency + self._prefetch, self._budget + self._running())

    def _running(self) -> int:
        return self.setup.concurrency - self._free

    def _leaving(self) -> bool:
        return self._quiet and self._free == self.setup.concurrency

    def _leave_if_done(self) -> bool:
        """After ``quiet``: go once nothing runs and everything is sent."""
        if not self._leaving() or self._verdicts or self._returned or self._stuck:
            return False
        self._over = True
        try:
            self.line.sock.shutdown(socket.SHUT_RDWR)  # wakes the reader; the supervisor sees the end
        except OSError:
            pass
        with self._lock:
            desks, self._idle = self._idle, []
        for desk in desks:
            desk.wake.release()
        return True


class _Desk:
    """Where a worker thread is handed its next job."""

    __slots__ = ("item", "wake")

    def __init__(self) -> None:
        self.item: Item | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


_tasks: set[asyncio.Task[None]] = set()  # the loop keeps only weak references


def _with_job(context: JobContext, call: Any) -> Any:
    running_job.set(context)
    return call()


def _emptied(box: collections.deque[Any]) -> list[Any]:
    return [box.popleft() for _ in range(len(box))]


def _resident() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- the process itself ---------------------------------------------------------------------------


def main(fd: int) -> int:
    """What a spawned worker process does: set up, load the app, serve."""
    line: Line[Up, Down] = Line(socket.socket(fileno=fd), Down)
    setup = _receive_setup(line)
    _die_with_parent()
    stacks = open(setup.stacks, "w")  # noqa: SIM115 - held for life: faulthandler writes to it
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    try:
        mill = load_app(setup.app)
        hello = Hello(mill.url, tuple(sorted({t.options.queue for t in mill.tasks.values()})), len(mill.tasks))
    except Exception as error:
        text, trace = describe(error)
        hello = Hello(error=text if isinstance(error, InvalidOption) else trace)
    try:
        line.send(Up(hello=hello))
        if hello.error:
            return 2
        process = Process(mill, setup, line)
        signal.signal(signal.SIGTERM, lambda *_: process.quiet())
        process.serve()
    except Closed:
        return 1
    mill.close()
    return 0


def _receive_setup(line: Line[Up, Down]) -> Setup:
    while True:
        for down in line.receive():
            if down.setup is not None:
                return down.setup


def _die_with_parent() -> None:
    """Have the kernel end this process when its supervisor dies, even inside a C call (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == 1 and os.environ.get("TIDEMILL_SUPERVISOR") != "1":
        os._exit(1)  # it died before we asked


if __name__ == "__main__":
    logging.basicConfig(
        level=os.environ.get("TIDEMILL_LOG", "INFO"),
        format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s",
    )
    sys.exit(main(int(sys.argv[1])))
