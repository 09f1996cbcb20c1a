"""Lines to the server: made, checked, made again; calls on them, done once however often sent."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import ssl
import time
from typing import Any

import msgspec

from tidemill.brokers.calls import CALLS, KEY, MEDIA, MOST, PATH, PROTOCOL, SERVER, VERSION
from tidemill.brokers.http.address import Address
from tidemill.brokers.http.response import Response
from tidemill.brokers.http.trouble import Away, refusal, unreachable
from tidemill.brokers.sigpipe import Unkilled
from tidemill.brokers.spares import Spares
from tidemill.clock import new_id
from tidemill.deferral import Waiting, raised_by_handler
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError

__all__ = ["STEP_TIMEOUT", "Line", "Lines", "Server"]

CONNECT_TIMEOUT = 2.0
"""Seconds in which a server must answer a knock."""

STEP_TIMEOUT = 3.0
"""Seconds that a call may take at least; whoever has patience gives it longer."""

SLOWEST = 1e6
"""Bytes a second that a line carries at least: a large body has longer."""

_BACKOFF, _BACKOFF_MOST = 0.05, 1.0
_PART = 256 * 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Server:
    """How to get a connection to the server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.where = address.where
        self._context = address.context()
        self._failures = 0
        self._next_try = 0.0
        self._trouble = ""

    def pause(self) -> float:
        """Seconds before it makes sense to try again."""
        return max(0.0, self._next_try - time.monotonic())

    def connect(self) -> socket.socket:
        """A connection. A server that is dead is not tried again at once.

        Raises:
            BrokerUnavailable: it is away, or shows a certificate that is not trusted.
        """
        if self.pause() > 0:
            raise Away(self._trouble)
        try:
            with Unkilled():
                sock = self._connect()
        except OSError as error:
            if raised_by_handler(error):
                raise
            self._failures += 1
            most = min(_BACKOFF * 2 ** min(self._failures, 10), _BACKOFF_MOST)
            self._next_try = time.monotonic() + most * random.uniform(0.5, 1.0)
            away = unreachable(error, self.where)
            self._trouble = str(away)
            if isinstance(error, ssl.SSLCertVerificationError):
                raise BrokerUnavailable(
                    f"{away}; name the certificate to trust in the url: ?ca=PATH"
                ) from error
            raise away from error
        self._failures = 0
        return sock

    def _connect(self) -> socket.socket:
        a = self.address
        with Waiting():
            sock = socket.create_connection((a.host, a.port), CONNECT_TIMEOUT)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if self._context is not None:
                with Waiting():
                    sock = self._context.wrap_socket(sock, server_hostname=a.host)
        except BaseException:
            sock.close()
            raise
        return sock

    def head(self) -> bytes:
        """What requests on a new connection begin with, behind their first line."""
        lines = [f"Host: {self.where}", f"Content-Type: {MEDIA}", f"{PROTOCOL}: {VERSION}"]
        token = self.address.token()
        if token:
            lines.append(f"Authorization: Bearer {token}")
        return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


class Line:
    """One connection at a time. Used by one thread at a time.

    Attributes:
        told_by: the server that gave the last answer, by the name it has for itself.
    """

    def __init__(self, server: Server, timeout: float) -> None:
        self.told_by = ""
        self._server = server
        self._timeout = timeout
        self._path = server.address.prefix + PATH
        self._head = b""
        self._socket: socket.socket | None = None
        self._ended = False
        self._asking = False  # a request was sent, and its answer not read

    def fileno(self) -> int:
        """The descriptor on which answers come, -1 while there is none."""
        return self._socket.fileno() if self._socket is not None else -1

    def ask(self, name: str, body: bytes, key: str = "", extra: float = 0.0) -> Any:
        """Make a call, and its answer. A line that proves broken is made anew, once.

        Whoever waits gives it ``extra`` seconds.

        Raises:
            BrokerUnavailable: nobody knows whether it was done.
        """
        if self._socket is not None and _is_readable(self._socket):
            self.close()  # hung up meanwhile: servers do, on lines that nobody uses
        was_open = self._socket is not None
        try:
            return self._ask(name, body, key, extra)
        except Away as error:
            late = isinstance(error.__cause__, TimeoutError)
            if late or not was_open or self._socket is not None:
                raise
        return self._ask(name, body, key, extra)

    def _ask(self, name: str, body: bytes, key: str, extra: float) -> Any:
        self.send(name, body, key, extra)
        assert self._socket is not None
        response = Response()
        try:
            with Waiting():
                while not response.feed(self._socket.recv(_PART)):
                    pass
            self._asking = False
        except (OSError, ValueError) as error:
            self.close()
            if raised_by_handler(error):
                raise
            raise unreachable(error, self._server.where) from error
        except BaseException:
            self.close()  # an answer may still be on its way: nobody must read it as another's
            raise
        return self.take(name, response)

    def send(self, name: str, body: bytes, key: str = "", extra: float = 0.0) -> None:
        """Begin a call, whose answer is read by whoever began it.

        Raises:
            BrokerUnavailable: it was not sent whole; nobody knows what became of it.
        """
        if self._asking:  # a signal handler has interrupted the last call
            self.close()
        if self._socket is None:
            self._head = self._server.head()
            self._socket = self._server.connect()
            if self._ended:  # by another thread, perhaps while this one connected
                self.close()
                raise TidemillError("this broker is closed")
        self._asking = True
        parts = [b"POST %s%s HTTP/1.1\r\n" % (self._path.encode(), name.encode()), self._head]
        if key:
            parts.append(f"{KEY}: {key}\r\n".encode())
        parts += [b"Content-Length: %d\r\n\r\n" % len(body), body]
        try:
            self._socket.settimeout(self._timeout + len(body) / SLOWEST + extra)
            with Unkilled(), Waiting():
                self._socket.sendall(b"".join(parts))
        except OSError as error:
            self.close()
            if raised_by_handler(error):
                raise
            raise unreachable(error, self._server.where) from error
        except BaseException:
            self.close()
            raise

    def read_some(self, response: Response) -> bool:
        """Take what has come of an answer, without waiting; True when all of it has.

        Raises:
            BrokerUnavailable: the line is broken.
        """
        assert self._socket is not None
        self._socket.settimeout(0.0)
        try:
            while not response.feed(self._socket.recv(_PART)):
                pass
            self._asking = False
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except (OSError, ValueError) as error:
            self.close()
            raise unreachable(error, self._server.where) from error
        return True

    def take(self, name: str, response: Response) -> Any:
        """What a whole answer to a call says.

        Raises:
            TidemillError: it is a refusal.
        """
        if not response.keeps:
            self.close()
        headers = response.headers
        if response.status != 200 or headers.get(PROTOCOL) != VERSION:
            raise refusal(response, self._server.where)
        self.told_by = headers.get(SERVER, "")
        try:
            return CALLS[name].read_answer(response.body)
        except msgspec.DecodeError as error:
            raise BrokerUnavailable(
                f"the job server at {self._server.where} gives an answer to {name} that cannot be "
                f"read: {error}"
            ) from error

    def close(self) -> None:
        """Hang up; the next call connects anew."""
        sock, self._socket = self._socket, None
        self._asking = False
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    def end(self) -> None:
        """Hang up for good, also while another thread connects."""
        self._ended = True
        self.close()


class Lines:
    """The lines of one broker that any thread may use, as many as are in use at once."""

    def __init__(self, server: Server, patience: float) -> None:
        self.server = server
        self.most = MOST  # bytes of the arguments of one call
        self._patience = patience
        self._spares = Spares(lambda: Line(server, max(STEP_TIMEOUT, patience)))

    def call(self, name: str, /, *, extra: float = 0.0, **arguments: Any) -> Any:
        """Make a call, waiting for a server that is away as long as patience says.

        One that changes something is done once, however often it is sent. Whoever waits gives it
        ``extra`` seconds. The patience with a server that hangs begins when its answer is due.
        """
        call = CALLS[name]
        body = call.write(arguments)
        if len(body) > self.most:
            raise InvalidOption(
                f"{name} with {len(body):,} bytes: the job server at {self.server.where} takes "
                f"{self.most:,} at once; give it fewer"
            )
        key = new_id() if call.once else ""
        due = 0.0
        late = 0.0
        with self._spares.lend() as line:
            while True:
                began = time.monotonic()
                try:
                    return line.ask(name, body, key, extra - late)
                except Away:
                    now = time.monotonic()
                    due = due or min(now, began + len(body) / SLOWEST + extra)
                    until, late = due + self._patience, now - due
                    if now >= until:
                        raise
                    with Waiting():
                        time.sleep(max(0.01, min(self.server.pause(), until - now)))

    def close(self) -> None:
        """Hang up for good; a line in use is closed when its call ends."""
        self._spares.close()


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
