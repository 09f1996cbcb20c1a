"""What waits in a worker process, the slots it waits for, and the threads that run it.

All of it is one state under one lock. A job takes a slot from the moment it starts until its
verdict is in the outbox. Sync or async, at most ``concurrency`` run at a time.

Threads take turns at reading the line. The one that has just read a job keeps it, has another read
on, and runs it: to hand it to a thread that sleeps would put one more wake-up between the arrival
of a job and its start. Of several that can start it keeps none: one that holds the interpreter lock
would keep the others, which are woken for theirs, from starting. So there is one thread more than
slots, and always exactly one that reads, unless jobs run in the main thread, which never reads.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from threading import Event, Lock  # by name: a task may replace those of the module

from tidemill.worker.loop import Item

__all__ = ["Backlog", "Desk"]


class Desk:
    """A thread's place: where it finds its next job, or that it is its turn to read."""

    __slots__ = ("item", "reads", "wake")

    def __init__(self, *, reads: bool = False) -> None:
        self.item: Item | None = None
        self.reads = reads
        self.wake = Lock()
        self.wake.acquire()


class Backlog:
    """Jobs that wait for a slot, and who is free to run them.

    ``hire`` starts a thread at a desk, or says that none can start now; at most ``threads`` are
    hired. ``budget`` is how many jobs
    may be started at all. The methods that give slots away return the async jobs that got one, for
    the caller to launch; sync jobs are on a desk by then.
    """

    def __init__(
        self, concurrency: int, budget: int, threads: int, hire: Callable[[int, Desk], bool]
    ) -> None:
        self.concurrency = concurrency
        self.budget = budget
        self.free = concurrency
        self.quiet = False  # nothing is started any more
        self.over = False
        self.ended = Event()
        self._lock = Lock()
        self._items: list[Item] = []
        self._idle: list[Desk] = []
        self._threads = 0
        self._most = threads
        self._hire = hire
        self._started = 0  # since the last tick
        self._finished = 0

    # -- jobs come ------------------------------------------------------------------------------

    def add(self, items: Iterable[Item]) -> bool:
        """Have them wait for :meth:`deal`; False when nothing is started any more."""
        with self._lock:
            if self.quiet:
                return False
            for item in items:
                heapq.heappush(self._items, item)
            return True

    def deal(self, reader: Desk | None = None) -> list[Item]:
        """Give free slots to what waits. A reader that keeps a job reads no more."""
        with self._lock:
            single = min(self.free, len(self._items), self.budget) == 1
            keeps = single and not self._items[0][6].is_async
            if reader is not None and keeps and self._seat(reads=True):
                reader.reads = False
                reader.item = self._take()
            return self._deal()

    def _startable(self) -> bool:
        return bool(self.free > 0 and self._items and self.budget)

    def _take(self) -> Item:
        self.free -= 1
        self._started += 1
        self.budget -= 1
        return heapq.heappop(self._items)

    def _deal(self) -> list[Item]:
        starts: list[Item] = []
        while self._startable():
            if self._items[0][6].is_async:
                starts.append(self._take())
            elif not self._seat():
                break
        return starts

    def _seat(self, *, reads: bool = False) -> bool:
        """Have a thread that is free run the next job, or read; False when none is."""
        if self._idle:
            desk = self._idle.pop()
            self._put_on(desk, reads)
            desk.wake.release()
        elif self._threads < self._most:
            desk = Desk()
            self._put_on(desk, reads)
            if not self._hire(self._threads + 1, desk):
                self._take_back(desk)
                return False
            self._threads += 1
        else:
            return False
        return True

    def _put_on(self, desk: Desk, reads: bool) -> None:
        desk.reads = reads
        desk.item = None if reads else self._take()

    def _take_back(self, desk: Desk) -> None:
        """No thread can start: what is on the desk waits for a slot again."""
        if desk.item is not None:
            self.free += 1
            self._started -= 1
            self.budget += 1
            heapq.heappush(self._items, desk.item)

    # -- threads come and go --------------------------------------------------------------------

    def begin(self) -> None:
        """Hire the first thread, which reads."""
        with self._lock:
            self._seat(reads=True)

    def park(self, desk: Desk) -> list[Item]:
        """Nothing is on the desk; its thread may now wait for ``wake``."""
        with self._lock:
            if self.over:
                desk.wake.release()
                return []
            self._idle.append(desk)
            return self._deal()

    def next(self) -> tuple[Item | None, list[Item]]:
        """A sync job has ended: give its slot back and take the next one in one go."""
        starts: list[Item] = []
        with self._lock:
            self.free += 1
            self._finished += 1
            while self._startable():
                item = self._take()
                if not item[6].is_async:
                    return item, starts
                starts.append(item)
        return None, starts

    def ended_elsewhere(self) -> list[Item]:
        """An async job has ended."""
        with self._lock:
            self.free += 1
            self._finished += 1
            return self._deal()

    def close(self) -> None:
        """All is over: nobody waits any more."""
        with self._lock:
            self.over = True
            desks, self._idle = self._idle, []
        for desk in desks:
            desk.wake.release()
        self.ended.set()

    # -- jobs go --------------------------------------------------------------------------------

    def empty(self) -> list[int]:
        """Tokens of all that waited; none of it will be started."""
        with self._lock:
            return self._empty()

    def stop(self) -> list[int]:
        """As :meth:`empty`, and nothing is started any more."""
        with self._lock:
            self.quiet = True
            return self._empty()

    def _empty(self) -> list[int]:
        tokens = [item[3] for item in self._items]
        self._items.clear()
        return tokens

    def withdraw(self, token: int) -> bool:
        """Take out one job; False when it does not wait here."""
        with self._lock:
            waiting = [item for item in self._items if item[3] == token]
            for item in waiting:
                self._items.remove(item)
                heapq.heapify(self._items)
            return bool(waiting)

    # -- looks ----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return self.concurrency - self.free

    @property
    def waiting(self) -> bool:
        """True while something waits for a slot."""
        return bool(self._items)

    @property
    def stirred(self) -> bool:
        """True while something waits, runs, or has ended since the last tick."""
        return bool(self.running or self._items or self._finished)

    def tick(self) -> tuple[bool, list[int]]:
        """Whether anything has ended since the last tick; tokens of what would wait too long."""
        with self._lock:
            finished, self._finished = self._finished, 0
            started, self._started = self._started, 0
            # Nothing moved: somebody else may have a free slot for what lies here.
            stalled = self._empty() if self.free == 0 and not started else []
            return bool(finished), stalled
