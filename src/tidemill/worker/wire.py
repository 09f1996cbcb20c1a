"""What supervisor and process say to each other: frames of msgpack over a socket pair.

Down go leases and orders, up come verdicts and how much the process would like to hold. A lease's
envelope stays encoded all the way, so the supervisor never opens what it carries.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from tidemill.job import Command, Lease, Note, Verdict

__all__ = ["Closed", "Down", "Hello", "Line", "Setup", "Up"]

_LENGTH = struct.Struct("=I")
In = TypeVar("In")
Out = TypeVar("Out")


class Setup(msgspec.Struct, array_like=True):
    """How a process is to be: sent first, once."""

    app: str
    concurrency: int
    queues: tuple[str, ...]
    board: str
    board_slots: int
    first_slot: int
    stacks: str
    max_jobs: int = 0
    max_memory: int = 0


class Hello(msgspec.Struct, array_like=True):
    """What a process says when its app is loaded, or cannot be (``error``)."""

    url: str = ""
    queues: tuple[str, ...] = ()
    tasks: int = 0
    error: str = ""


class Down(msgspec.Struct, array_like=True):
    """Supervisor to process."""

    leases: list[Lease] = []
    commands: list[Command] = []
    quiet: bool = False
    setup: Setup | None = None


class Up(msgspec.Struct, array_like=True):
    """Process to supervisor.

    ``depth`` is how many leases it would like to hold in all; ``returned`` are tokens it gives back
    unstarted; ``stuck`` are verdicts on jobs that could not be interrupted; ``leaving`` says that it
    takes no more and goes when what runs has ended.
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
    """One end of the socket pair. Sending blocks until the kernel has it; one thread at a time."""

    def __init__(self, sock: socket.socket, incoming: type[In]) -> None:
        self.sock = sock
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For select."""
        return self.sock.fileno()

    def send(self, message: Out) -> None:
        """Send one frame.

        Raises:
            Closed: nobody is there.
        """
        data = self._encode(message)
        try:
            self.sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise Closed from error

    def receive(self) -> Iterator[In]:
        """Whatever frames one read completes; blocks for the read if the socket does.

        Raises:
            Closed: the other end closed or died.
        """
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            (size,) = _LENGTH.unpack_from(buffer, at)
            if len(buffer) - at - 4 < size:
                break
            yield self._decode(bytes(buffer[at + 4 : at + 4 + size]))
            at += 4 + size
        del buffer[:at]

    def close(self) -> None:
        """Close this end."""
        self.sock.close()
