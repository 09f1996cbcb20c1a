"""The threads of a worker process that run sync jobs and read the socket in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from os import getpid
from typing import Any, Protocol

from tidemill.worker.event_loop import Loop
from tidemill.worker.execute import Executor, run_sync
from tidemill.worker.outbox import Outbox
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.slots import PoolThread, Slots
from tidemill.worker.waiting_job import WaitingJob

log = SafeLog("tidemill.worker")


class PoolHost(Protocol):
    """The parts of a worker process that its threads use."""

    @property
    def slots(self) -> Slots:
        """Where a thread finds its next job."""
        ...

    @property
    def executor(self) -> Executor:
        """Runs the jobs."""
        ...

    @property
    def loop(self) -> Loop:
        """Runs the async jobs."""
        ...

    @property
    def out(self) -> Outbox:
        """Takes verdicts to the supervisor."""
        ...

    def read(self, thread: PoolThread | None = None) -> None:
        """Read from the socket while it is the thread's turn."""
        ...

    def go_soon(self) -> None:
        """Have the process replaced."""
        ...

    def give_up(self, why: str, error: BaseException | None = None) -> None:
        """End the process at once: it cannot go on."""
        ...


class ThreadPool:
    """Threads that start when there is work for them and stay until the process ends."""

    def __init__(self, host: PoolHost) -> None:
        self._host = host
        self._threads: list[threading.Thread] = []

    def start_thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a thread that belongs to this process."""
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def start_worker(self, number: int, thread: PoolThread) -> bool:
        """Start a thread that runs jobs. When none can start, the process is replaced."""
        try:
            self.start_thread(f"tidemill-{number}", self.work, thread)
        except RuntimeError as error:  # the system has no further thread
            log.error("process %d can start no thread and is replaced: %s", getpid(), error)
            self._host.go_soon()
            return False
        return True

    def work(self, thread: PoolThread) -> None:
        """Read frames and run jobs until the process ends, even if a task raises at an odd time."""
        slots = self._host.slots
        while not slots.over:
            try:
                self._take_turn(thread)
            except BaseException as error:
                self._host.give_up("a thread of its pool failed", error)

    def _take_turn(self, thread: PoolThread) -> None:
        """Read when it is the thread's turn, else run its job, else wait."""
        host = self._host
        if thread.reads:
            host.read(thread)
        elif thread.job is not None:
            run_sync(host.executor.execute(thread.job))
            thread.job = self._next()
        else:
            host.loop.launch(host.slots.park(thread))
            thread.wake.acquire()

    def _next(self) -> WaitingJob | None:
        """The next sync job for a thread whose job has ended."""
        job, starts = self._host.slots.next()
        self._host.loop.launch(starts)
        if job is None:
            # This thread is free and sends by itself, which saves a wake-up of the timekeeper.
            self._host.out.flush(wait=False)
        return job

    def join(self) -> bool:
        """Wait a second for each thread; True when all have ended."""
        threads = list(self._threads)
        for thread in threads:
            thread.join(1)
        return not any(thread.is_alive() for thread in threads)
