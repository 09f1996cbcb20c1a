"""What supervisor and process say to each other: frames of msgpack over a socket pair.

Down go leases and orders, up come verdicts and how much the process would like to hold. A lease's
envelope stays encoded all the way, so the supervisor never opens what it carries.

A process may block when it sends: the supervisor always reads. The supervisor never does
(:meth:`Line.post`): a process whose task holds the interpreter lock does not read, and must still
be found out and killed.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

from tidemill.job import Command, Lease, Note, Verdict

__all__ = ["Closed", "Down", "Hello", "Line", "Setup", "Up"]

_LENGTH = struct.Struct("=I")
In = TypeVar("In")
Out = TypeVar("Out")


class Setup(msgspec.Struct, array_like=True):
    """How a process is to be; sent first. ``slots`` counts those of all processes.

    The very first process of a worker is sent one without a board and, once it has told where the
    broker is, another with it.
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
    max_jobs: int = 0
    max_memory: int = 0


class Hello(msgspec.Struct, array_like=True):
    """What a process says when its app is loaded, or cannot be (``error``).

    ``schedules`` are those its code declares, each a name and a record's body.
    """

    url: str = ""
    queues: tuple[str, ...] = ()
    tasks: int = 0
    error: str = ""
    schedules: list[tuple[str, bytes]] = []


class Down(msgspec.Struct, array_like=True):
    """Supervisor to process."""

    leases: list[Lease] = []
    commands: list[Command] = []
    quiet: bool = False
    setup: Setup | None = None


class Up(msgspec.Struct, array_like=True):
    """Process to supervisor.

    ``depth`` is how many leases it would like to hold in all; ``returned`` are tokens it gives back
    unstarted; ``stuck`` are verdicts on jobs that could not be interrupted; ``leaving`` says that
    it takes no more and goes when what runs has ended.
    """

    verdicts: list[Verdict] = []
    notes: list[Note] = []
    depth: int = 0
    returned: list[int] = []
    stuck: list[Verdict] = []
    leaving: bool = False
    hello: Hello | None = None


class Closed(Exception):
    """The other end is gone."""


class Line(Generic[Out, In]):
    """One end of the socket pair; one thread at a time sends, one receives."""

    def __init__(self, sock: socket.socket, incoming: type[In]) -> None:
        self.sock = sock
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._kept: list[In] = []

    def fileno(self) -> int:
        """For select."""
        return self.sock.fileno()

    def send(self, message: Out) -> None:
        """Send one frame; blocks until the kernel has it.

        Raises:
            Closed: nobody is there.
        """
        try:
            self.sock.sendall(self._frame(message))
        except OSError as error:
            raise Closed from error

    def post(self, message: Out) -> None:
        """Send one frame without blocking: what the kernel does not take now waits for ``push``."""
        self._outgoing += self._frame(message)
        self.push()

    def push(self) -> bool:
        """Send what waits, as far as the kernel takes it; True when nothing is left."""
        while self._outgoing:
            try:
                sent = self.sock.send(self._outgoing, socket.MSG_DONTWAIT)
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
            data = self.sock.recv(1 << 20, flags)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        buffer = self._incoming
        buffer += data
        frames = []
        at = 0
        while len(buffer) - at >= 4:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if len(buffer) - at - 4 < size:
                break
            frames.append(self._decode(bytes(buffer[at + 4 : at + 4 + size])))
            at += 4 + size
        del buffer[:at]
        return frames

    def keep(self, frames: list[In]) -> None:
        """Have these received again, by whoever comes next."""
        self._kept = frames

    def rest(self) -> list[In]:
        """The last words of an end that has gone: everything that can still be read."""
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
        """Close this end."""
        self.sock.close()
