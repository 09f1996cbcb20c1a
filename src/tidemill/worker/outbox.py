"""What a worker process has to tell its supervisor, gathered into frames.

Any thread appends. The clerk sends, woken by a bell; a worker thread that runs out of work sends
itself rather than have the clerk do it later. One thread at a time sends, so that whoever holds
``sending`` knows that nothing is under way.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from tidemill.crash import point
from tidemill.job import Note, Verdict
from tidemill.worker.wire import Closed, Down, Line, Up

__all__ = ["Outbox"]


class Outbox:
    """The outgoing side of a process's line.

    ``state`` is called before a frame is made, with the verdicts in it; it answers how many leases
    the process would like to hold, and whether it is leaving.
    """

    def __init__(
        self,
        line: Line[Up, Down],
        state: Callable[[list[Verdict]], tuple[int, bool]],
        give_up: Callable[[str], None],
    ) -> None:
        self.verdicts: collections.deque[Verdict] = collections.deque()
        self.notes: collections.deque[Note] = collections.deque()
        self.returned: collections.deque[int] = collections.deque()
        self.stuck: collections.deque[Verdict] = collections.deque()
        self.stacks = ""
        self.sending = threading.Lock()
        self._line = line
        self._state = state
        self._give_up = give_up
        self._sent: tuple[int, bool] = (-1, False)
        self._unsent: list[Up] = []
        self._bell = threading.Lock()
        self._bell.acquire()
        self._rung = False

    def conclude(self, verdict: Verdict) -> None:
        """A job has ended."""
        self.verdicts.append(verdict)
        if not self._rung:
            self.ring()

    def ring(self) -> None:
        """Wake the clerk. Safe in a signal handler."""
        if not self._rung:
            self._rung = True
            try:
                self._bell.release()
            except RuntimeError:
                pass  # another thread rang it at the same moment

    def sleep(self, timeout: float) -> None:
        """The clerk: until the bell rings, or ``timeout`` seconds, -1 for no limit."""
        self._bell.acquire(timeout=timeout)
        self._rung = False

    def flush(self, *, wait: bool) -> None:
        """Send what is there. Without ``wait`` leave it to the clerk if somebody else is at it."""
        if not self.sending.acquire(blocking=wait):
            self.ring()
            return
        try:
            self._send()
        except Closed as closed:
            broken = closed.by_us
        else:
            broken = False
        finally:
            self.sending.release()
        if broken:  # else the reader sees it too and ends the process
            self._give_up("a task closed the worker's descriptors")

    def last_words(self, patience: float = 1.0) -> None:
        """Send what is there, before the process ends; no longer than ``patience`` seconds."""
        if self.sending.acquire(timeout=patience):
            try:
                self._send()
            except BaseException:
                pass
            try:
                if self._unsent:
                    self._line.leave(self._unsent)
            except BaseException:
                pass  # nobody hears it; the supervisor settles what is left
            finally:
                self.sending.release()

    def _send(self) -> None:
        verdicts = _emptied(self.verdicts)
        # Notes after verdicts: what a job said before it ended is then always in the same frame.
        notes, returned, stuck = (
            _emptied(self.notes),
            _emptied(self.returned),
            _emptied(self.stuck),
        )
        state = self._state(verdicts)
        stacks, self.stacks = self.stacks, ""
        if verdicts or notes or returned or stuck or stacks or state != self._sent:
            point("process.ended")
            self._sent = state
            notes = _latest(notes) if len(notes) > 1 else notes
            up = Up(verdicts, notes, state[0], returned, stuck, state[1], stacks=stacks)
            self._unsent.append(up)
            self._line.send(up)
            self._unsent.clear()
            point("process.sent")

    def empty(self) -> bool:
        """True when nothing waits; certain only while ``sending`` is held."""
        return not (self.verdicts or self.notes or self.returned or self.stuck)


def _emptied(box: collections.deque[Any]) -> list[Any]:
    return [box.popleft() for _ in range(len(box))]


def _latest(notes: list[Note]) -> list[Note]:
    """Without the progress that later progress of the same job makes old."""
    latest = {note.token: note for note in notes if not note.line}
    return [note for note in notes if note.line or latest[note.token] is note]
