"""The slots of a worker process, the jobs that wait for slots, and the threads that run jobs.

One lock guards all slots. A job has a slot from its start until its verdict is in the outbox. At
most ``concurrency`` jobs run at a time, sync or async.

Threads take turns at reading the socket. A thread that has read one job runs the job itself, and
another thread takes over the reading. If a sleeping thread had to run the job, its wake-up would
delay the start. A thread that has read several jobs gives all of them to other threads. If it ran
one of these jobs itself, it would hold the interpreter lock and delay the other jobs.

So the process has one thread more than slots, and exactly one thread reads at any time. When jobs
run in the main thread, a separate thread reads.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from os import getpid
from threading import Event, Lock
from typing import TYPE_CHECKING

from tidemill.client.context import JobContext
from tidemill.core.job import State, Verdict
from tidemill.core.scoreboard import Scoreboard
from tidemill.errors import TidemillError
from tidemill.worker.child_protocol import Setup

if TYPE_CHECKING:
    from tidemill.runtime import Runtime
    from tidemill.worker.execute import WaitingJob

TICK = 0.05  # seconds between two ticks of a busy process; prefetched jobs are work for one tick
MOST = 4000  # leases that a process holds in advance at most


class Prefetch:
    """The number of leases that a process would like to hold besides the running jobs."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.ahead = slots

    def measure(self, verdicts: Sequence[Verdict]) -> None:
        """Adapt to the duration of these jobs. Growth is limited, since an average may mislead."""
        timed = [it.ended - it.started for it in verdicts if it.ended >= it.started > 0]
        if not timed:  # the verdicts of snoozed and released jobs have no times
            return
        seconds = sum(timed) / len(timed)
        target = self._slots * TICK / max(seconds, 1e-6)
        grown = 4 * max(self.ahead, self._slots)
        self.ahead = int(max(0, min(MOST, target, grown)))

    def nothing_ended(self, full: bool) -> None:
        """Adapt after a tick in which no job ended: the jobs are long, or there are none."""
        self.ahead = 0 if full else self._slots


class PoolThread:
    """A thread that runs jobs: its next job, and whether it is the thread's turn to read."""

    __slots__ = ("job", "reads", "wake")

    def __init__(self, *, reads: bool = False) -> None:
        self.job: WaitingJob | None = None
        self.reads = reads
        self.wake = Lock()  # held while the thread sleeps
        self.wake.acquire()


class Slots:
    """The slots, and the jobs that wait for them.

    ``start_thread`` starts a thread, or returns False when none can start now; at most ``threads``
    are started. At most ``budget`` jobs are started. Methods that assign slots return the async
    jobs that got a slot, and the caller launches them. A sync job already has its thread.
    """

    def __init__(
        self,
        concurrency: int,
        budget: int,
        threads: int,
        start_thread: Callable[[int, PoolThread], bool],
    ) -> None:
        self.concurrency = concurrency
        self.budget = budget
        self.free = concurrency
        self.quiet = False  # True when no more jobs are started
        self.over = False
        self.ended = Event()
        self._lock = Lock()
        self._jobs: list[WaitingJob] = []
        self._idle: list[PoolThread] = []
        self._threads = 0
        self._most = threads
        self._start_thread = start_thread
        self._prefetch = Prefetch(concurrency)
        self._started = 0  # jobs started since the last tick
        self._finished = 0  # jobs ended since the last tick

    # -- jobs come ------------------------------------------------------------------------------

    def add(self, jobs: Iterable[WaitingJob]) -> bool:
        """Have jobs wait for :meth:`assign`; False when no more jobs are started."""
        with self._lock:
            if self.quiet:
                return False
            for job in jobs:
                heapq.heappush(self._jobs, job)
            return True

    def assign(self, reader: PoolThread | None = None) -> list[WaitingJob]:
        """Give free slots to waiting jobs. A reader that gets a job stops reading."""
        with self._lock:
            single = min(self.free, len(self._jobs), self.budget) == 1
            keeps = single and not self._jobs[0].task.is_async
            if reader is not None and keeps and self._employ(reads=True):
                reader.reads = False
                reader.job = self._take()
            return self._assign()

    def _startable(self) -> bool:
        return bool(self.free > 0 and self._jobs and self.budget)

    def _take(self) -> WaitingJob:
        self.free -= 1
        self._started += 1
        self.budget -= 1
        return heapq.heappop(self._jobs)

    def _assign(self) -> list[WaitingJob]:
        starts: list[WaitingJob] = []
        while self._startable():
            if self._jobs[0].task.is_async:
                starts.append(self._take())
            elif not self._employ():
                break
        return starts

    def _employ(self, *, reads: bool = False) -> bool:
        """Have an idle or new thread run the next job, or read; False when no thread is free."""
        if self._idle:
            thread = self._idle.pop()
            self._give(thread, reads)
            thread.wake.release()
        elif self._threads < self._most:
            thread = PoolThread()
            self._give(thread, reads)
            if not self._start_thread(self._threads + 1, thread):
                self._take_back(thread)
                return False
            self._threads += 1
        else:
            return False
        return True

    def _give(self, thread: PoolThread, reads: bool) -> None:
        thread.reads = reads
        thread.job = None if reads else self._take()

    def _take_back(self, thread: PoolThread) -> None:
        """Undo ``_give`` when no thread can start, so that the job waits for a slot again."""
        if thread.job is not None:
            self.free += 1
            self._started -= 1
            self.budget += 1
            heapq.heappush(self._jobs, thread.job)

    # -- threads come and go --------------------------------------------------------------------

    def begin(self) -> None:
        with self._lock:
            self._employ(reads=True)

    def park(self, thread: PoolThread) -> list[WaitingJob]:
        """Count a thread without a job as idle, before the thread waits for ``wake``."""
        with self._lock:
            if self.over:
                thread.wake.release()
                return []
            self._idle.append(thread)
            return self._assign()

    def next(self) -> tuple[WaitingJob | None, list[WaitingJob]]:
        """Free the slot of a sync job that ended, and take the next sync job, if any."""
        starts: list[WaitingJob] = []
        with self._lock:
            self.free += 1
            self._finished += 1
            while self._startable():
                job = self._take()
                if not job.task.is_async:
                    return job, starts
                starts.append(job)
        return None, starts

    def async_job_ended(self) -> list[WaitingJob]:
        with self._lock:
            self.free += 1
            self._finished += 1
            return self._assign()

    def close(self) -> None:
        with self._lock:
            self.over = True
            threads, self._idle = self._idle, []
        for thread in threads:
            thread.wake.release()
        self.ended.set()

    # -- jobs go --------------------------------------------------------------------------------

    def empty(self) -> list[int]:
        with self._lock:
            return self._empty()

    def stop(self) -> list[int]:
        """Remove all waiting jobs and start none from now on; returns their tokens."""
        with self._lock:
            self.quiet = True
            return self._empty()

    def _empty(self) -> list[int]:
        tokens = [job.token for job in self._jobs]
        self._jobs.clear()
        return tokens

    def withdraw(self, token: int) -> bool:
        with self._lock:
            waiting = [job for job in self._jobs if job.token == token]
            for job in waiting:
                self._jobs.remove(job)
                heapq.heapify(self._jobs)
            return bool(waiting)

    # -- figures --------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return self.concurrency - self.free

    @property
    def waiting(self) -> bool:
        return bool(self._jobs)

    @property
    def active(self) -> bool:
        """True while a job waits or runs, or when one has ended since the last tick."""
        return bool(self.running or self._jobs or self._finished)

    def depth_after(self, ended: Sequence[Verdict]) -> int:
        """The number of leases to hold in all, now that these jobs have ended."""
        if ended:
            self._prefetch.measure(ended)
        if self.quiet:
            return 0
        return min(self.concurrency + self._prefetch.ahead, self.budget + self.running)

    def tick(self) -> list[int]:
        """Begin a tick; returns the tokens of jobs that would wait too long for a slot."""
        # They go back to the supervisor.
        with self._lock:
            finished, self._finished = self._finished, 0
            started, self._started = self._started, 0
            # If no slot is free and no job has started, another process may have a free slot for
            # the waiting jobs.
            stalled = self._empty() if self.free == 0 and not started else []
        if not finished:
            self._prefetch.nothing_ended(full=not self.free)
        return stalled


class Waits:
    """The jobs of this process that wait for other jobs. The scoreboard shows those of all.

    A job that waits for the result of another job keeps its slot. If the jobs in all slots of a
    worker wait, and no other worker can run the awaited jobs, all of them would wait for ever. This
    is *starvation*: the last job that begins to wait gets an error.
    """

    def __init__(self, runtime: Runtime, setup: Setup, board: Scoreboard) -> None:
        self._runtime = runtime
        self._setup = setup
        self._board = board
        self._lock = Lock()
        self._waiting = 0

    def begin(self, context: JobContext, job_id: str) -> None:
        """Count a job that will wait for another; TidemillError: all would wait for ever."""
        with self._lock:
            context.waiting += 1
            if context.waiting == 1:
                self._count(1)
        try:
            if self._starves(job_id):
                raise TidemillError(
                    f"job {context.id} would wait for job {job_id} for ever: all "
                    f"{self._setup.slots} slots of this worker wait for other jobs, and no other "
                    "worker is there to run them; give it more slots (-c, -p), or put the next "
                    "step in a chain"
                )
        except BaseException:
            # The store may also be unreachable.
            self.end(context)
            raise

    def end(self, context: JobContext) -> None:
        with self._lock:
            context.waiting -= 1
            if not context.waiting:
                self._count(-1)

    def _count(self, by: int) -> None:
        self._waiting += by
        self._board.set_waiting(self._setup.first_slot, getpid(), self._waiting)

    def _starves(self, job_id: str) -> bool:
        if self._board.waiting(self._setup.share) < self._setup.slots:
            return False
        broker = self._runtime.broker
        record = broker.get(job_id)
        if record is None or record.state.finished:
            return False
        if record.state is State.RUNNING and record.worker != self._setup.worker:
            return False
        queue = record.envelope.queue
        return not any(
            owner.kind == "worker"
            and owner.board != self._setup.board
            and (not owner.queues or queue in owner.queues)
            for owner in broker.owners()
        )
