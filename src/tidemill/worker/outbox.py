"""The outbox of a worker process: verdicts and notes for its supervisor, collected into frames.

Any thread appends. The timekeeper sends when somebody wakes it. A worker thread that runs out of
work sends at once by itself. One thread at a time sends: a thread that holds ``sending`` knows that
no frame is half sent.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from tidemill.core.crash_points import point
from tidemill.core.job import Note, Verdict
from tidemill.worker.child_protocol import Closed, Down, MessageSocket, Up

__all__ = ["Outbox"]


class Outbox:
    """The outgoing side of a process's socket.

    ``state`` is called with the verdicts of each frame. Its answer is how many leases the process
    would like to hold, and whether the process leaves.
    """

    def __init__(
        self,
        message_socket: MessageSocket[Up, Down],
        state: Callable[[list[Verdict]], tuple[int, bool]],
        give_up: Callable[[str], None],
    ) -> None:
        self.verdicts: collections.deque[Verdict] = collections.deque()
        self.notes: collections.deque[Note] = collections.deque()
        self.returned: collections.deque[int] = collections.deque()
        self.stuck: collections.deque[Verdict] = collections.deque()
        self.stacks = ""
        self.sending = threading.Lock()
        self._socket = message_socket
        self._state = state
        self._give_up = give_up
        self._sent: tuple[int, bool] = (-1, False)
        self._unsent: list[Up] = []
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._rung = False

    def conclude(self, verdict: Verdict) -> None:
        """Add the verdict on a job, and wake the timekeeper."""
        self.verdicts.append(verdict)
        if not self._rung:
            self.ring()

    def ring(self) -> None:
        """Wake the timekeeper. Safe in a signal handler."""
        if not self._rung:
            self._rung = True
            try:
                self._wakeup.release()
            except RuntimeError:
                pass  # another thread rang at the same moment

    def sleep(self, timeout: float) -> None:
        """Sleep until somebody rings, or for ``timeout`` seconds, -1 for no limit."""
        self._wakeup.acquire(timeout=timeout)
        self._rung = False

    def flush(self, *, wait: bool) -> None:
        """Send all. Without ``wait`` leave it to the timekeeper while another thread sends."""
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
        if broken:  # otherwise the reading thread sees it, too, and ends the process
            self._give_up("a task closed the worker's descriptors")

    def last_words(self, patience: float = 1.0) -> None:
        """Send all before the process ends; wait ``patience`` seconds for another sender."""
        if self.sending.acquire(timeout=patience):
            try:
                self._send()
            except BaseException:
                pass
            try:
                if self._unsent:
                    self._socket.leave(self._unsent)
            except BaseException:
                pass  # the supervisor settles the jobs that are left
            finally:
                self.sending.release()

    def _send(self) -> None:
        verdicts = _emptied(self.verdicts)
        # Notes after verdicts: the notes of a job that has ended are then always in the same frame.
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
            self._socket.send(up)
            self._unsent.clear()
            point("process.sent")

    def empty(self) -> bool:
        """True when all is sent; certain only while ``sending`` is held."""
        return not (self.verdicts or self.notes or self.returned or self.stuck)


def _emptied(box: collections.deque[Any]) -> list[Any]:
    return [box.popleft() for _ in range(len(box))]


def _latest(notes: list[Note]) -> list[Note]:
    """The notes without progress that is older than other progress of the same job."""
    latest = {note.token: note for note in notes if not note.line}
    return [note for note in notes if note.line or latest[note.token] is note]
