"""For the tests of ``http://``: jobs, an owner, and a line to a server that loses replies."""

from __future__ import annotations

import contextlib
import socket
import threading

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner


class Lossy:
    """A line to a server of this machine on which replies can be lost, after they were given."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.lose = ""  # the call whose next reply is lost, and its line with it
        self.lost = 0
        self.made = 0  # lines
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.made += 1
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the server is down: hang up, and go on
                near.close()
                continue
            doomed = threading.Event()
            for source, sink, back in ((near, far, False), (far, near, True)):
                args = (source, sink, doomed, back)
                threading.Thread(target=self._carry, args=args, daemon=True).start()

    def _carry(
        self, source: socket.socket, sink: socket.socket, doomed: threading.Event, back: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if back and doomed.is_set():
                    self.lost += 1
                    break
                if not back and self.lose and f"/{self.lose} ".encode() in data[:200]:
                    self.lose = ""
                    doomed.set()
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def job(**fields: object) -> Envelope:
    return Envelope(id=new_id(), task="app.work", **fields)  # type: ignore[arg-type]


class HttpOwner:
    """An owner of a broker."""

    def __init__(self, broker: Broker, kind: str = "worker") -> None:
        self.broker = broker
        self.owner = Owner(id=new_id(), kind=kind, name="w1", board="/nowhere/board")
        broker.attach(self.owner)

    def exchange(self, **step: object) -> Reply:
        return self.broker.exchange(Step(self.owner.id, **step))  # type: ignore[arg-type]

    def wait(self, timeout: float, fds: tuple[int, ...] = ()) -> list[int]:
        return self.broker.wait(self.owner.id, timeout, fds)
