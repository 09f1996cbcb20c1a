"""Connections to the server, and calls that have one effect even if they are sent again."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import time
from typing import Any

import msgspec

from tidemill.brokers.contract.rpc import CALLS, KEY, MEDIA, MOST, PATH, PROTOCOL, SERVER, VERSION
from tidemill.brokers.http.address import Address
from tidemill.brokers.http.errors import ServerAway, refusal, unreachable
from tidemill.brokers.http.response import Response
from tidemill.brokers.network.spare_connections import Spares
from tidemill.brokers.shared.wake_pipe import readable
from tidemill.core.clock import new_id
from tidemill.core.signals import InterruptibleWait, Unkilled, raised_by_handler
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError

CONNECT_TIMEOUT = 2.0  # seconds in which a connection must be established
STEP_TIMEOUT = 3.0  # seconds that any call may take; a longer patience of the URL gives a call more
SLOWEST = 1e6  # the slowest expected connection, in bytes a second: a large body may take longer
_BACKOFF, _BACKOFF_MOST = 0.05, 1.0
_PART = 256 * 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Server:
    """Connects to the server of an address, and waits between failed attempts."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.where = address.where
        self._context = address.context()
        self._failures = 0
        self._next_try = 0.0
        self._trouble = ""

    def pause(self) -> float:
        return max(0.0, self._next_try - time.monotonic())

    def connect(self) -> socket.socket:
        """A new connection; after a failure the next try waits. Raises BrokerUnavailable."""
        if self.pause() > 0:
            raise ServerAway(self._trouble)
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
        with InterruptibleWait():
            sock = socket.create_connection((a.host, a.port), CONNECT_TIMEOUT)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if self._context is not None:
                with InterruptibleWait():
                    sock = self._context.wrap_socket(sock, server_hostname=a.host)
        except BaseException:
            sock.close()
            raise
        return sock

    def head(self) -> bytes:
        lines = [f"Host: {self.where}", f"Content-Type: {MEDIA}", f"{PROTOCOL}: {VERSION}"]
        token = self.address.token()
        if token:
            lines.append(f"Authorization: Bearer {token}")
        return "".join(f"{line}\r\n" for line in lines).encode("latin-1")


class ServerConnection:
    """A connection that is made again when it breaks. Used by one thread at a time.

    Attributes:
        server_name: the name of the server that gave the latest answer.
    """

    def __init__(self, server: Server, timeout: float) -> None:
        self.server_name = ""
        self._server = server
        self._timeout = timeout
        self._path = server.address.prefix + PATH
        self._head = b""
        self._socket: socket.socket | None = None
        self._ended = False
        self._asking = False  # True when a request was sent and its answer is not read

    def fileno(self) -> int:
        """The descriptor of the connection; -1 without a connection."""
        return self._socket.fileno() if self._socket is not None else -1

    def call(self, name: str, body: bytes, key: str = "", extra: float = 0.0) -> Any:
        """Make a call and return its answer. A broken connection is replaced once.

        ``extra`` seconds are added to the timeout, for calls that wait.

        Raises:
            BrokerUnavailable: the call may or may not have happened.
        """
        if self._socket is not None and readable([self._socket.fileno()], 0.0):
            self.close()  # the server has closed the idle connection
        was_open = self._socket is not None
        try:
            return self._call_once(name, body, key, extra)
        except ServerAway as error:
            late = isinstance(error.__cause__, TimeoutError)
            if late or not was_open or self._socket is not None:
                raise
        return self._call_once(name, body, key, extra)

    def _call_once(self, name: str, body: bytes, key: str, extra: float) -> Any:
        self.send(name, body, key, extra)
        assert self._socket is not None
        response = Response()
        try:
            with InterruptibleWait():
                while not response.feed(self._socket.recv(_PART)):
                    pass
            self._asking = False
        except (OSError, ValueError) as error:
            self.close()
            if raised_by_handler(error):
                raise
            raise unreachable(error, self._server.where) from error
        except BaseException:
            self.close()  # close: no later call may read a late answer
            raise
        return self.take(name, response)

    def send(self, name: str, body: bytes, key: str = "", extra: float = 0.0) -> None:
        """Send a call; the caller reads its answer.

        Raises:
            BrokerUnavailable: the call may or may not have happened.
        """
        if self._asking:  # close: a signal handler interrupted the last call
            self.close()
        if self._socket is None:
            self._head = self._server.head()
            self._socket = self._server.connect()
            if self._ended:  # another thread ended this connection while this thread connected
                self.close()
                raise TidemillError("this broker is closed")
        self._asking = True
        parts = [b"POST %s%s HTTP/1.1\r\n" % (self._path.encode(), name.encode()), self._head]
        if key:
            parts.append(f"{KEY}: {key}\r\n".encode())
        parts += [b"Content-Length: %d\r\n\r\n" % len(body), body]
        try:
            self._socket.settimeout(self._timeout + len(body) / SLOWEST + extra)
            with Unkilled(), InterruptibleWait():
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
        """Read what has come of an answer; True when it is complete. Raises BrokerUnavailable."""
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
        """Decode the complete answer to a call. Raises TidemillError for a refusal."""
        if not response.keeps:
            self.close()
        headers = response.headers
        if response.status != 200 or headers.get(PROTOCOL) != VERSION:
            raise refusal(response, self._server.where)
        self.server_name = headers.get(SERVER, "")
        try:
            return CALLS[name].read_answer(response.body)
        except msgspec.DecodeError as error:
            raise BrokerUnavailable(
                f"the answer of the job server at {self._server.where} to {name} cannot be read: "
                f"{error}"
            ) from error

    def close(self) -> None:
        sock, self._socket = self._socket, None
        self._asking = False
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.close()

    def end(self) -> None:
        """Close the connection for good, also while another thread connects."""
        self._ended = True
        self.close()


class ServerConnections:
    """The connections of one broker, one for each call at the same time. Used by all threads."""

    def __init__(self, server: Server, patience: float) -> None:
        self.server = server
        self.most = MOST  # the most bytes of the arguments of one call
        self._patience = patience
        self._spares = Spares(lambda: ServerConnection(server, max(STEP_TIMEOUT, patience)))

    def call(self, name: str, /, *, extra: float = 0.0, **arguments: Any) -> Any:
        """Make a call; wait for a server that is away, up to the patience.

        A call that changes something has one effect, even if it is sent again. ``extra`` seconds
        are added to the timeout, for calls that wait. The patience begins when the answer is due.
        """
        call = CALLS[name]
        body = call.write(arguments)
        if len(body) > self.most:
            raise InvalidOption(
                f"{name} has {len(body):,} bytes, and the job server at {self.server.where} takes "
                f"{self.most:,} at once; send fewer"
            )
        key = new_id() if call.once else ""
        due = 0.0
        late = 0.0
        with self._spares.lend() as connection:
            while True:
                began = time.monotonic()
                try:
                    return connection.call(name, body, key, extra - late)
                except ServerAway:
                    now = time.monotonic()
                    due = due or min(now, began + len(body) / SLOWEST + extra)
                    until, late = due + self._patience, now - due
                    if now >= until:
                        raise
                    with InterruptibleWait():
                        time.sleep(max(0.01, min(self.server.pause(), until - now)))

    def close(self) -> None:
        """Close all connections for good; a connection in use is closed when its call ends."""
        self._spares.close()
