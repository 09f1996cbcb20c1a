"""The processes of one worker: started, replaced when they go, all replaced by a reload."""

from __future__ import annotations

import logging
import os

from tidemill.app import Tidemill
from tidemill.brokers.base import Mode
from tidemill.clock import machine_time
from tidemill.crash import point
from tidemill.worker.guard import Guard
from tidemill.worker.hand import KILL_PATIENCE, Hand
from tidemill.worker.settings import Settings
from tidemill.worker.shares import Shares
from tidemill.worker.wire import Setup

__all__ = ["Pool"]

log = logging.getLogger("tidemill.worker")


class Pool:
    """All processes of a worker, those that go among them."""

    def __init__(self, settings: Settings, name: str, folder: str, mill: Tidemill | None) -> None:
        self.settings = settings
        self.hands: list[Hand] = []
        self.shares = Shares(settings.processes, settings.concurrency)
        self.news = False  # something has changed that the next step, or sleep, must know
        self.closing = False  # nobody is replaced any more
        self._name = name
        self._folder = folder
        self._mill = mill
        self._guard = Guard()
        self._respawn_at = 0.0  # machine time; 0 when no start is held back
        self._full = False  # no process is started since jobs of old ones take all slots
        self._rolls = False  # a reload waits

    def start_one(self, replaces: Hand | None = None, *, extra: bool = False) -> Hand | None:
        """Start a process; None when the system has no room for one now."""
        share = -1
        try:
            share = self.shares.take()
            hand = Hand(share, self.shares.size, self.settings.concurrency, extra=extra)
            hand.exit_patience = self.settings.shutdown_timeout
            hand.board = self.shares.board
            hand.replaces = replaces
            self._start(hand)
        except OSError as error:
            log.error("cannot start a worker process: %s; trying again", error)
            if share >= 0:
                self.shares.put_back(share)
            self._respawn_at = machine_time() + 1.0
            return None
        point("worker.spawned")
        self.hands.append(hand)
        self.news = True
        return hand

    def _start(self, hand: Hand) -> None:
        setup = self._setup(hand.first_slot)
        point("worker.spawning")
        if self._mill is not None:
            hand.run_here(self._mill, setup)
            return
        hand.spawn(setup)
        try:
            self._guard.add(hand.pid)
        except OSError:  # it must not live without the guard
            hand.kill()
            hand.exited(KILL_PATIENCE)
            hand.bury()
            raise

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
            last_words=os.path.join(self._folder, f"last-words-{share}"),
            worker=self._name,
            slots=settings.concurrency * settings.processes,
            max_jobs=settings.max_jobs,
            max_memory=settings.max_memory,
        )

    def open_board(self, owner_id: str, folder: str) -> str:
        """Make the board, in the broker's folder if it has one, and show it to who is here.

        Where that folder's disk is full, the board lies among the temporary files.
        """
        try:
            board = self.shares.open(os.path.join(folder or self._folder, owner_id), owner_id)
        except OSError as error:
            if not folder:
                raise
            log.warning("no board fits in %s (%s): it is in %s", folder, error, self._folder)
            board = self.shares.open(os.path.join(self._folder, owner_id), owner_id)
        for hand in self.hands:
            hand.introduce(board, self._setup(hand.first_slot))
        return board.path

    def replace(self) -> None:
        """Bring the number of processes back up, unless all is ending or starts are held back."""
        if self.closing or machine_time() < self._respawn_at:
            return
        staying = sum(hand.staying and not hand.extra for hand in self.hands)
        missing = self.settings.processes - staying
        if missing <= 0 or self._wait_for_old("the next process starts"):
            return
        for _ in range(missing):
            if self.start_one() is None:
                return

    def _wait_for_old(self, what: str) -> bool:
        """True while jobs of processes that are being replaced take as many slots as all have.

        So the slots in use never fall below what they are to be, nor rise beyond twice as many.
        """
        old = [h for h in self.hands if (h.leaving or h.quiet) and not (h.stuck or h.killed)]
        full = sum(len(hand.held) for hand in old) >= self.slots
        if full and not self._full:
            pids = ", ".join(str(hand.pid) for hand in old)
            log.warning("jobs of processes that are replaced (%s) take all slots; %s", pids, what)
        self._full = full
        return full

    @property
    def slots(self) -> int:
        """How many jobs are to run at a time."""
        return self.settings.processes * self.settings.concurrency

    def roll(self) -> None:
        """Replace all processes: each goes once another has loaded the new code."""
        self._rolls = False
        if self._wait_for_old("the app is reloaded"):
            self._rolls = True
            return
        log.info("reloading")
        outgoing = [hand.replaces for hand in self.hands]
        for hand in [h for h in self.hands if h.staying and not h.extra and h not in outgoing]:
            if self.start_one(hand) is None:
                self._rolls = True
                return
        self.replace()

    def slots_freed(self) -> None:
        """A job of a process that goes has ended: perhaps what waited for it can start."""
        if self._rolls and not self.closing and machine_time() >= self._respawn_at:
            self.roll()
        self.replace()
