"""The outbox of a worker process: verdicts and notes for its supervisor, collected into frames.

Any thread may add to the outbox. The timekeeper sends when a thread wakes it. A worker thread
without work sends at once by itself. Only the thread that holds the lock ``sending`` sends, so
frames never mix.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.client.worker_reports import Answer
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Note, Verdict
from tidemill.worker.child_protocol import Closed, Down, MessageSocket, Up, latest_notes
from tidemill.worker.counting import Concluded, Counting
from tidemill.worker.safe_logging import SafeLog

if TYPE_CHECKING:
    from tidemill.worker.slots import Slots

log = SafeLog("tidemill.worker")


class Outbox:
    """The outgoing side of a process's socket.

    ``slots`` know the number of leases that the process would like to hold, and whether it leaves.
    ``cut_off`` is called when the socket is closed.
    """

    def __init__(
        self,
        message_socket: MessageSocket[Up, Down],
        slots: Slots,
        cut_off: Callable[[], None],
        counting: Counting | None = None,
    ) -> None:
        self.concluded: collections.deque[Concluded] = collections.deque()
        self.notes: collections.deque[Note] = collections.deque()
        self.returned: collections.deque[int] = collections.deque()
        self.stuck: collections.deque[Verdict] = collections.deque()
        self.answers: collections.deque[Answer] = collections.deque()
        self.sending = threading.Lock()
        self._socket = message_socket
        self._slots = slots
        self._cut_off = cut_off
        self._counting = counting  # None when the broker keeps no history
        self._sent: tuple[int, bool] = (-1, False)
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._rung = False

    def conclude(
        self, verdict: Verdict, lease: Lease | None = None, envelope: Envelope | None = None
    ) -> None:
        """Add the verdict on a job; wake the timekeeper. The other arguments are for history."""
        self.concluded.append((verdict, lease, envelope))
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
        """Sleep until a thread rings, or for ``timeout`` seconds; -1 means no limit."""
        self._wakeup.acquire(timeout=timeout)
        self._rung = False

    def flush(self, *, wait: bool) -> None:
        """Send all. Without ``wait`` only wake the timekeeper if another thread sends."""
        if not self.sending.acquire(blocking=wait):
            self.ring()
            return
        try:
            self._send()
        except Closed:
            is_cut_off = True
        else:
            is_cut_off = False
        finally:
            self.sending.release()
        if is_cut_off:
            self._cut_off()

    def flush_at_last(self) -> None:
        """Send what the socket still takes before the process ends at once."""
        with contextlib.suppress(BaseException):
            if self.sending.acquire(timeout=1.0):
                self._send()

    def _send(self) -> None:
        concluded = _emptied(self.concluded)
        verdicts = [verdict for verdict, _, _ in concluded]
        # Take the notes after the verdicts. So no note of a job is sent after the verdict on the
        # job.
        notes, returned, stuck = (
            _emptied(self.notes),
            _emptied(self.returned),
            _emptied(self.stuck),
        )
        leaving = self._slots.quiet
        state = self._slots.wanted(verdicts), leaving
        answers = _emptied(self.answers)
        if verdicts or notes or returned or stuck or answers or state != self._sent:
            point("process.ended")
            self._sent = state
            notes = latest_notes(notes) if len(notes) > 1 else notes
            up = Up(verdicts, notes, state[0], returned, stuck, state[1])
            up.answers = answers
            if concluded and self._counting is not None:
                up.history = _sums_of(self._counting, concluded)
            self._socket.send(up)
            point("process.sent")

    def empty(self) -> bool:
        """True when the outbox is empty; call this while holding ``sending``."""
        return not (self.concluded or self.notes or self.returned or self.stuck)


def _sums_of(counting: Counting, concluded: list[Concluded]) -> list[HistoryRow]:
    """The rows of history of a frame; none when the sums cannot be made."""
    try:
        counting.count_frame(concluded)
        return counting.take()
    except Exception as error:
        log.error("the history lacks numbers of %d ended jobs: %r", len(concluded), error)
        return []


def _emptied(box: collections.deque[Any]) -> list[Any]:
    return [box.popleft() for _ in range(len(box))]
