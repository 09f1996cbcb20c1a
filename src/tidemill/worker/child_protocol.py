"""The frames of msgpack that a supervisor and a worker process exchange over a socket pair.

``Down`` frames carry leases and commands to the process. ``Up`` frames carry verdicts, and the
number of leases that the process would like to hold. A lease's envelope stays encoded: the
supervisor decodes it only to log a job, or to settle a stuck or unknown job.

A process may block when it sends, since the supervisor always reads. The supervisor never blocks
(:meth:`MessageSocket.post`). A process whose task holds the interpreter lock does not read, and the
supervisor must still be able to find and kill that process.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.client.worker_reports import Answer
from tidemill.core.crash_points import point
from tidemill.core.envelope import Envelope
from tidemill.core.job import Command, Lease, Note, Verdict
from tidemill.worker.counting import Concluded, Counting
from tidemill.worker.safe_logging import SafeLog
from tidemill.worker.settings import Waits

if TYPE_CHECKING:
    from tidemill.runtime import Runtime
    from tidemill.worker.slots import Slots

log = SafeLog("tidemill.worker")

_LENGTH = struct.Struct("=I")
_READ = 1 << 16  # bytes of one read; for more than 128 KiB, malloc maps new memory each time
_LINES_MOST = 100  # log lines of a job that the store keeps
_LOOK_AT = 1000  # if more notes than this wait, the notes that the store would not keep are dropped

In = TypeVar("In")
Out = TypeVar("Out")


class Setup(msgspec.Struct, array_like=True):
    """The settings of a process; sent first. ``slots`` counts the slots of the worker.

    The process has ``share`` rows of the scoreboard, from row ``first_slot`` on. With
    ``history`` the process sums its verdicts for the history of the store.

    The first process of a worker gets a setup without a scoreboard. This process names the broker
    of its app, and then gets another setup with the scoreboard.
    """

    app: str
    concurrency: int
    queues: tuple[str, ...]
    board: str
    board_slots: int
    first_slot: int
    stacks: str
    worker: str = ""
    slots: int = 0
    share: int = 0
    max_jobs: int = 0
    max_memory: int = 0
    slow: float = 0.0
    history: bool = False
    waits: Waits = Waits()


class Hello(msgspec.Struct, array_like=True):
    """The first report of a process: the app is loaded, or ``error`` says why not.

    ``schedules`` are the declared schedules, each as its name and the body of its record. ``names``
    are the names of the app's tasks, ``imports`` the patterns of ``allow_imports``. ``declared``
    are the options of the tasks: for each task its name and the body of its record.
    ``unreachable`` is True when the app could not be loaded because its store does not answer.
    """

    url: str = ""
    error: str = ""
    schedules: list[tuple[str, bytes]] = []
    names: list[str] = []
    imports: list[str] = []
    declared: list[tuple[str, bytes]] = []
    unreachable: bool = False


def hello_of(runtime: Runtime) -> Hello:
    names, imports = list(runtime.tasks), list(runtime.allow_imports)
    schedules, declared = runtime.code_schedules.bodies(), runtime.declarations.own()
    return Hello(runtime.url, "", schedules, names, imports, declared)


class Down(msgspec.Struct, array_like=True):
    """A frame to a process. ``stop``: seconds until the worker stops; -1 without a stop."""

    leases: list[Lease] = []
    commands: list[Command] = []
    quiet: bool = False
    stop: float = -1.0
    setup: Setup | None = None


class Up(msgspec.Struct, array_like=True):
    """A frame from a process to its supervisor.

    Attributes:
        depth: the number of leases that the process would like to hold: for running jobs, and in
            advance.
        returned: tokens of jobs that the process gives back unstarted.
        stuck: verdicts on jobs that could not be interrupted.
        leaving: True when the process takes no more jobs and ends after its running jobs.
        answers: the answers to ``dump ID`` and ``profile ID …``.
        history: the sums of the verdicts (:mod:`.counting`), if the broker keeps history.
    """

    verdicts: list[Verdict] = []
    notes: list[Note] = []
    depth: int = 0
    returned: list[int] = []
    stuck: list[Verdict] = []
    leaving: bool = False
    hello: Hello | None = None
    history: list[HistoryRow] = []
    answers: list[Answer] = []


class Closed(Exception):
    """One end of the connection is closed."""


class MessageSocket(Generic[Out, In]):
    """One end of the socket pair. One thread at a time may send, and one may receive."""

    def __init__(self, sock: socket.socket, incoming: type[In]) -> None:
        self.sock = sock
        self._recv, self._send, self.fileno = sock.recv, sock.send, sock.fileno
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._kept: list[In] = []

    def send(self, message: Out) -> None:
        """Send one frame; blocks until the kernel has it. Raises Closed if an end is closed."""
        try:
            self.sock.sendall(self._frame(message))
        except OSError as error:
            raise Closed from error

    def post(self, message: Out) -> None:
        """Send one frame without blocking; bytes the kernel does not take wait for ``push``."""
        self._outgoing += self._frame(message)
        self.push()

    def push(self) -> bool:
        """Send as many of the waiting bytes as the kernel takes; True when none are left."""
        while self._outgoing:
            try:
                sent = self._send(self._outgoing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                self._outgoing.clear()  # the other end is gone; the thread that reads notices it
                return True
            del self._outgoing[:sent]
        return True

    def _frame(self, message: Out) -> bytes:
        data = self._encode(message)
        return _LENGTH.pack(len(data)) + data

    def receive(self, flags: int = 0) -> list[In]:
        """The frames that one read completes; may block without ``MSG_DONTWAIT``. Raises Closed."""
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        try:
            data = self._recv(_READ, flags)
        except OSError as error:
            if flags and isinstance(error, BlockingIOError):
                return []
            raise Closed from error
        if not data:
            raise Closed
        return self._split(data)

    def _split(self, data: bytes) -> list[In]:
        buffer = self._incoming
        buffer += data
        frames = []
        at = 0
        while len(buffer) - at >= 4:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if len(buffer) - at - 4 < size:
                break
            try:
                frames.append(self._decode(bytes(buffer[at + 4 : at + 4 + size])))
            except msgspec.DecodeError as error:  # a task wrote to a descriptor that is not its own
                raise Closed from error
            at += 4 + size
        del buffer[:at]
        return frames

    def keep(self, frames: list[In]) -> None:
        """Have the next call of ``receive`` return these frames."""
        self._kept = frames

    def drain(self) -> list[In]:
        """All frames that the other end has sent so far; never waits."""
        frames: list[In] = []
        try:
            while True:
                size = len(self._incoming)
                got = self.receive(socket.MSG_DONTWAIT)
                if not got and len(self._incoming) == size:
                    return frames
                frames += got
        except Closed:
            return frames

    def close(self) -> None:
        self.sock.close()


def latest_notes(notes: Sequence[Note]) -> list[Note]:
    """The last 100 log lines and the last report of progress of each job, in their order.

    The store keeps no others. A task may log faster than a worker can send, so earlier notes are
    dropped before they take up memory.
    """
    lines, reported, kept = collections.Counter[int](), set[int](), list[Note]()
    for note in reversed(notes):
        if note.done >= 0:
            keep = note.token not in reported
            reported.add(note.token)
        else:
            lines[note.token] += 1
            keep = lines[note.token] <= _LINES_MOST
        if keep:
            kept.append(note)
    kept.reverse()
    return kept


def add_notes(waiting: list[Note], notes: Sequence[Note]) -> None:
    """Add notes to the notes that wait for the store; if too many wait, drop earlier notes."""
    waiting += notes
    if len(waiting) > _LOOK_AT:
        waiting[:] = latest_notes(waiting)


class Outbox:
    """The outgoing side of a process's socket: collects verdicts and notes into frames.

    Any thread may add to the outbox. The timekeeper sends when a thread wakes it. A worker thread
    without work sends at once by itself. Only the thread that holds the lock ``sending`` sends, so
    frames never mix.

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
        state = self._slots.depth_after(verdicts), leaving
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
        boxes = self.concluded, self.notes, self.returned, self.stuck, self.answers
        return not any(boxes)


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
