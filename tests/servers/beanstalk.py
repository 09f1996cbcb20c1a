"""beanstalkd, the oracle of our port; and a line to either."""

from __future__ import annotations

import select
import signal
import socket

from servers.base import Server, listens, program


class Beanstalkd(Server):
    """A beanstalkd of its own. ``args`` are more of its options."""

    def __init__(self, *args: str) -> None:
        super().__init__("beanstalkd")
        binary = program("beanstalkd", "beanstalkd")
        command = [binary, "-l", "127.0.0.1", "-p", str(self.port), *args]
        self.launch(command, lambda: listens(self.port))

    def drain(self) -> None:
        """Accept no more jobs."""
        self.process.send_signal(signal.SIGUSR1)


class Tongue:
    """A client that speaks the protocol byte by byte."""

    def __init__(self, port: int, patience: float = 30.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), patience)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def has_said(self, seconds: float = 0.0) -> bool:
        """Whether there is something to read, or the end, within so many seconds."""
        return bool(self._buffer or select.select([self.socket], [], [], seconds)[0])

    def read(self) -> bytes:
        """The next reply, with the body it may have; empty at the end."""
        while b"\r\n" not in self._buffer:
            if not self._more():
                return b""
        line, _, rest = self._buffer.partition(b"\r\n")
        words = line.split()
        if not words or words[0] not in (b"OK", b"RESERVED", b"FOUND"):
            self._buffer = rest
            return line
        size = int(words[-1]) + 2
        while len(rest) < size:
            if not self._more():
                return b""
            rest = self._buffer[len(line) + 2 :]
        self._buffer = rest[size:]
        assert rest[:size].endswith(b"\r\n")
        return line + b"\r\n" + rest[: size - 2]

    def _more(self) -> bool:
        data = self.socket.recv(65536)
        self._buffer += data
        return bool(data)

    def ask(self, data: bytes) -> bytes:
        """Say something, and read one reply."""
        self.send(data)
        return self.read()

    def put(self, body: bytes, pri: int = 1024, delay: int = 0, ttr: int = 60) -> int:
        """Put a job; its number."""
        word, number = self.ask(
            b"put %d %d %d %d\r\n%b\r\n" % (pri, delay, ttr, len(body), body)
        ).split()
        assert word == b"INSERTED"
        return int(number)

    def close(self) -> None:
        self.socket.close()
