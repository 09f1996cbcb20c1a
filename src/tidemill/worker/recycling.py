"""Start the processes of a worker, replace processes that leave, and replace all on a reload."""

from __future__ import annotations

import logging
import os
import threading

from tidemill.brokers.contract.exchange import Mode
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.worker.child_protocol import Hello, Setup
from tidemill.worker.machine import Machine
from tidemill.worker.scoreboard_rows import ScoreboardShares
from tidemill.worker.settings import Settings
from tidemill.worker.worker_process import State, WorkerProcess

log = logging.getLogger("tidemill.worker")


class ProcessStarter:
    """All processes of a worker, including those that are about to end."""

    def __init__(self, settings: Settings, name: str, folder: str, machine: Machine) -> None:
        self.settings = settings
        # Two threads use the pool: the one that calls the store, and the watchdog.
        self.lock = threading.RLock()
        self.hello: Hello | None = None  # of the latest process that has loaded the app
        self.processes: list[WorkerProcess] = []
        self.shares = ScoreboardShares(settings.processes, settings.concurrency)
        # True after a change that the supervisor must handle before it sleeps again.
        self.news = False
        self.closing = False  # True when processes are no longer replaced
        self.counts = False  # True when processes sum their verdicts for the history
        self._name = name
        self._folder = folder
        self._machine = machine
        self._respawn_at = 0.0  # machine time of the next start; 0 when no start is held back
        self._full = False  # True while jobs of leaving processes take all slots
        self._rolls = False  # True while a reload waits for free slots

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
            history=self.counts,
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
        """True while jobs of leaving processes take as many slots as the worker has.

        No process starts meanwhile, so the worker never runs more than twice as many jobs as it has
        slots.
        """
        old = [process for process in self.processes if process.state is State.LEAVING]
        full = sum(len(process.held) for process in old) >= self.slots
        if full and not self._full:
            pids = ", ".join(str(process.pid) for process in old)
            log.warning("jobs of replaced processes (%s) take all slots; %s later", pids, what)
        self._full = full
        return full

    @property
    def slots(self) -> int:
        """The number of jobs that may run at a time in all processes."""
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
