"""The frames of msgpack that a supervisor and a worker process exchange over a socket pair.

``Down`` frames carry leases and commands to the process. ``Up`` frames carry verdicts, and how many
leases the process would like to hold. A lease's envelope stays encoded: the supervisor never opens
it.

A process may block when it sends, since the supervisor always reads. The supervisor never blocks
(:meth:`MessageSocket.post`). A process whose task holds the interpreter lock does not read, and the
supervisor must still find it out and kill it.
"""

from __future__ import annotations

import errno
import socket
import struct
from os import fstat, set_blocking, unlink
from typing import Generic, TypeVar

import msgspec

from tidemill.core.job import Command, Lease, Note, Verdict

__all__ = ["Closed", "Down", "Hello", "MessageSocket", "Setup", "Up"]

_LENGTH = struct.Struct("=I")
In = TypeVar("In")
Out = TypeVar("Out")


class Setup(msgspec.Struct, array_like=True):
    """The settings of a process; sent first. ``slots`` counts the slots of all processes.

    ``share`` is how many rows of the scoreboard belong to the process, from row ``first_slot`` on.
    ``last_words`` is a file for frames that the socket no longer carries.

    The first process of a worker gets a setup without a scoreboard. Once it has named the broker it
    gets another setup with the scoreboard.
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
    last_words: str = ""


class Hello(msgspec.Struct, array_like=True):
    """The first report of a process: its app is loaded, or cannot be loaded (``error``).

    ``schedules`` are the declared ones, each a name and a record's body. ``names`` are the names of
    the app's tasks, ``imports`` the patterns of ``allow_imports``.
    """

    url: str = ""
    queues: tuple[str, ...] = ()
    tasks: int = 0
    error: str = ""
    schedules: list[tuple[str, bytes]] = []
    names: list[str] = []
    imports: list[str] = []


class Down(msgspec.Struct, array_like=True):
    """Supervisor to process. ``stop`` is in how many seconds the worker stops, -1 for never."""

    leases: list[Lease] = []
    commands: list[Command] = []
    quiet: bool = False
    stop: float = -1.0
    setup: Setup | None = None


class Up(msgspec.Struct, array_like=True):
    """Process to supervisor.

    ``depth`` is how many leases it would like to hold in all; ``returned`` are tokens it gives back
    unstarted; ``stuck`` are verdicts on jobs that could not be interrupted; ``leaving`` says that
    it takes no more and goes when what runs has ended; ``stacks`` answers the command ``dump``.
    """

    verdicts: list[Verdict] = []
    notes: list[Note] = []
    depth: int = 0
    returned: list[int] = []
    stuck: list[Verdict] = []
    leaving: bool = False
    hello: Hello | None = None
    stacks: str = ""


class Closed(Exception):
    """The other end is gone, or this end is."""

    @property
    def by_us(self) -> bool:
        """True when the descriptor of this end was closed in this process."""
        cause = self.__cause__
        return isinstance(cause, OSError) and cause.errno in (errno.EBADF, errno.ENOTSOCK)


class MessageSocket(Generic[Out, In]):
    """One end of the socket pair; one thread at a time sends, one receives."""

    def __init__(self, sock: socket.socket, incoming: type[In]) -> None:
        self.sock = sock
        # Bound now, before a task can replace them.
        self._recv, self._send, self.fileno = sock.recv, sock.send, sock.fileno
        self._inode = fstat(sock.fileno()).st_ino
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._kept: list[In] = []
        self.last_words = ""
        self.left_words = False  # the other end has left some in its file

    def _check(self) -> None:
        """Raise OSError when the descriptor was closed, and perhaps opened for something else."""
        if fstat(self.fileno()).st_ino != self._inode:
            raise OSError(errno.EBADF, "the descriptor is another's now")

    def send(self, message: Out) -> None:
        """Send one frame; blocks until the kernel has it.

        Raises:
            Closed: nobody is there.
        """
        frame = self._frame(message)
        try:
            self._check()
            self._send_all(frame)
        except OSError as error:
            raise Closed from error

    def _send_all(self, frame: bytes) -> None:
        sent = 0
        while sent < len(frame):
            try:
                sent += self._send(memoryview(frame)[sent:] if sent else frame)
            except BlockingIOError:
                set_blocking(self.fileno(), True)  # a task has made all descriptors non-blocking

    def post(self, message: Out) -> None:
        """Send one frame without blocking: what the kernel does not take now waits for ``push``."""
        self._outgoing += self._frame(message)
        self.push()

    def push(self) -> bool:
        """Send what waits, as far as the kernel takes it; True when nothing is left."""
        while self._outgoing:
            try:
                sent = self._send(self._outgoing, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                self._outgoing.clear()  # nobody is there; whoever reads will notice
                return True
            del self._outgoing[:sent]
        return True

    def _frame(self, message: Out) -> bytes:
        data = self._encode(message)
        return _LENGTH.pack(len(data)) + data

    def receive(self, flags: int = 0) -> list[In]:
        """Whatever frames one read completes; blocks for the read unless ``MSG_DONTWAIT`` is given.

        Raises:
            Closed: the other end closed or died.
        """
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        try:
            self._check()
            data = self._recv(1 << 20, flags)
        except BlockingIOError:
            if not flags:
                set_blocking(self.fileno(), True)  # a task has made all descriptors non-blocking
            return []
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        return self._split(data)

    def _split(self, data: bytes) -> list[In]:
        """The frames that these bytes complete."""
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
        """Have these received again, by whoever comes next."""
        self._kept = frames

    def drain(self) -> list[In]:
        """All that the other end has said by now; never waits."""
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

    def rest(self) -> list[In]:
        """The last words of an end that is dead."""
        return self.drain() + self._read_last_words()

    def leave(self, messages: list[Out]) -> None:
        """Write to the file of last words what the socket did not take."""
        with open(self.last_words, "wb") as file:
            file.write(b"".join(self._frame(message) for message in messages))

    def _read_last_words(self) -> list[In]:
        """Read the bytes that the other end has left in the file, if any."""
        try:
            with open(self.last_words, "rb") as file:
                data = file.read()
            unlink(self.last_words)
            self.left_words = bool(data)
        except OSError:
            return []
        self._incoming.clear()  # a frame that was cut off is in the file as a whole
        try:
            return self._split(data)
        except Closed:
            return []

    def close(self) -> None:
        """Close this end."""
        self.sock.close()
