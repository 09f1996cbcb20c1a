"""Connections to the server. The store does each call once, however often it is sent.

A connection here has a session, and one socket at a time. The calls of a session are numbered, and
the store keeps the last answer of each session. So a call whose reply was lost can be sent again.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis
from redis.connection import Connection

from tidemill.brokers.network.spare_connections import Spares
from tidemill.brokers.redis.errors import Away, code_of, is_broken, translate
from tidemill.brokers.redis.failover import SILENCE, Replaced, Server, socket_of
from tidemill.brokers.redis.record import MICRO
from tidemill.brokers.redis.script_library import LIBRARY
from tidemill.core.clock import clock, new_id
from tidemill.core.signals import InterruptibleWait, Unkilled, raised_by_handler, runs_handlers
from tidemill.errors import NotReplicated, TidemillError

STEP_TIMEOUT = 3.0  # seconds that a call may take. A longer ``patience`` replaces this limit.
_DUE = b"due"  # the answer when other calls must first move many due jobs
_LAST = (False, *[True] * 5)  # the most tries of one call, for example after MOVED
_SERIAL = struct.Struct(">Q")
_TIMEVAL = struct.Struct("ll")


class ServerConnection:
    """A session with the server on one socket at a time, for one thread at a time."""

    def __init__(self, server: Server, read_timeout: float, session: str = "") -> None:
        self._server = server
        self._read_timeout = read_timeout
        self._connection: Connection | None = None
        self._socket: Any = None
        self._changes = 0  # the server's count of changes when the connection was made
        self._until = 0.0  # the deadline of the current call
        self._limit = (0.0, False)  # the arguments of the last ``_set_timeout``
        self._repeated = False  # True when the last call was sent more than once
        self._asking = False  # True when a command was sent and its answer is not read
        self._reader = hiredis.Reader()
        self._session = session.encode()
        self._serial = 0
        self._ended = False

    def number(self) -> tuple[bytes, bytes]:
        """Session and serial for a call that the store must do only once."""
        self._serial += 1
        return self._session, _SERIAL.pack(self._serial)

    def run(self, verb: str, key: bytes, args: Sequence[bytes], until: float = 0.0) -> Any:
        """Run a function and return its answer. A broken connection is replaced once.

        Without ``until`` the connection's own timeout holds.

        Raises:
            BrokerUnavailable: the function may have run, unless the error says that it did not.
        """
        command = (b"FCALL", LIBRARY.function(verb), b"1", key, *args)
        self._until = until or time.monotonic() + self._read_timeout
        for last in _LAST:
            was_open = self._socket is not None
            self._repeated = last
            try:
                return self._send(command)
            except TidemillError:
                raise
            except Exception as error:
                if raised_by_handler(error):
                    raise
                self._recover(error, was_open and not last)
        raise Away(f"redis at {self._server.where} sends us from node to node")

    def run_moved(self, verb: str, key: bytes, args: Sequence[bytes], until: float = 0.0) -> Any:
        """Run a function like :meth:`run`, once all jobs that are due have been moved."""
        while (answer := self.run(verb, key, args, until)) == _DUE:
            while self.run("housekeeping", key, (*args[:2], b"", b"", b"0")):
                pass
        return answer

    def _recover(self, error: Exception, again: bool) -> None:
        """Repair the cause of an error, so that the call can be sent again, or raise the error."""
        # With ``again``, a broken connection is repaired too: it may have broken before the call.
        code = code_of(error)
        if "FUNCTION NOT FOUND" in code:
            self._load()
            return
        if time.monotonic() < self._until:
            if code.startswith("MOVED"):
                self._learn_nodes()
                if self._server.moved(str(error)):
                    self.close()
                    return
            elif isinstance(error, Replaced) or (is_broken(error) and again):
                self.close()
                return
        if is_broken(error) or code.startswith(("MOVED", "READONLY", "LOADING", "CLUSTERDOWN")):
            self.close()
            self._server.look_again()
        raise translate(error, self._server.where) from error

    def _send(self, command: tuple[Any, ...]) -> Any:
        """Send and read without redis-py, whose own code takes longer than the server's answer."""
        if self._asking or self._changes != self._server.changes:
            # Hang up after a call that a signal handler interrupted, or when the master changed.
            self.close()
        sock = self._socket or self._connect()
        usual = SILENCE, runs_handlers()
        if self._limit != usual or self._until - time.monotonic() < SILENCE:
            self._fit_timeout(sock)
        reader, answer = self._reader, False
        self._asking = True
        try:
            with Unkilled(), InterruptibleWait():
                self._write(sock, hiredis.pack_command(command))
                while answer is False:
                    try:
                        data = sock.recv(65536)
                    except (TimeoutError, BlockingIOError) as error:
                        self._bear_silence(error)
                        self._fit_timeout(sock)
                        continue
                    if not data:
                        raise redis.ConnectionError("the line was closed")
                    reader.feed(data)
                    answer = reader.gets()
            self._asking = False
        except BaseException:
            self.close()  # hang up: the next call must not read a late answer of this call
            raise
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer

    def _write(self, sock: Any, data: bytes) -> None:
        rest: bytes | memoryview = data
        while True:
            try:
                sent = sock.send(rest)
                if sent == len(rest):
                    return
                rest = memoryview(rest)[sent:]
            except (TimeoutError, BlockingIOError) as error:
                self._bear_silence(error)
                self._fit_timeout(sock)

    def _fit_timeout(self, sock: Any) -> None:
        """Have the socket wait for ``SILENCE``, or less if the call must end earlier."""
        wait = min(SILENCE, max(0.01, self._until - time.monotonic()))
        limit = wait, runs_handlers()
        if limit != self._limit:  # only when the limit changes, since this costs system calls
            _set_timeout(sock, *limit)
            self._limit = limit

    def _bear_silence(self, error: TimeoutError | BlockingIOError) -> None:
        """Return if the call may wait longer: the silent server is the master, and time is left.

        Raises:
            TimeoutError, BlockingIOError: a signal handler has raised it.
            Replaced: another server is the master.
            redis.TimeoutError: the time is over.
        """
        if raised_by_handler(error):
            raise error
        server, connection = self._server, self._connection
        if connection is None:
            raise redis.ConnectionError("another thread has closed the connection")
        if self._changes != server.changes or server.is_replaced(connection, self._until):
            raise Replaced(f"{server.where} is the master now")
        if time.monotonic() >= self._until:
            raise redis.TimeoutError("it does not answer")

    def _connect(self) -> Any:
        self._changes = self._server.changes
        left = max(0.1, self._until - time.monotonic())
        self._connection = self._server.connect(left)
        self._reader = hiredis.Reader(replyError=redis.ResponseError)
        self._asking = False
        self._socket = socket_of(self._connection)
        self._limit = (0.0, False)  # a new socket has another limit
        # Another thread may have ended this session while this thread connected.
        if self._ended:
            self.close()
            raise TidemillError("this broker is closed")
        return self._socket

    def _load(self) -> None:
        self._server.loaded = True
        try:
            self._send((b"FUNCTION", b"LOAD", LIBRARY.text(clock.wall())))
        except TidemillError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            if "already exists" not in str(error):  # another process loaded the library first
                raise translate(error, self._server.where) from error

    def ask(self, *command: bytes, until: float = 0.0) -> Any:
        """Send a plain command and return its answer; errors as in :meth:`run`."""
        self._until = until or time.monotonic() + self._read_timeout
        try:
            return self._send(command)
        except TidemillError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            raise translate(error, self._server.where) from error

    def replicate(self, count: int, key: bytes, until: float) -> None:
        """Wait until ``count`` replicas have the writes of the last call.

        Raises:
            NotReplicated: fewer replicas had the writes in time.
            BrokerUnavailable: the server is away: the call must be repeated, perhaps on a new
            master.
        """
        if self._repeated:  # WAIT counts no write that came over another connection
            self.ask(b"SET", key + b":barrier", b"", until=until)
        milliseconds = max(1, int((until - time.monotonic()) * 1000))
        had = self.ask(b"WAIT", b"%d" % count, b"%d" % milliseconds, until=until + SILENCE)
        if had < count:
            raise NotReplicated(
                f"redis at {self._server.where} has stored this, but only {had} replicas had it in "
                f"time, and the url says replicas={count}: it counts, but a fail-over may lose it; "
                "see INFO replication, then put it again under its id"
            )

    def learn_nodes(self) -> None:
        """Ask a node of a cluster for the other nodes."""
        self._until = time.monotonic() + self._read_timeout
        self._learn_nodes()

    def _learn_nodes(self) -> None:
        slots = self.ask(b"CLUSTER", b"SLOTS", until=self._until)
        assert self._connection is not None
        self._server.learn_slots(slots, (self._connection.host, self._connection.port))

    def close(self) -> None:
        """Close the socket; the next call connects again."""
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.disconnect()

    def end(self) -> None:
        """Close for good, also while another thread connects."""
        self._ended = True
        self.close()


class ServerConnections:
    """The connections of one broker, for all threads. Each running call has its own connection."""

    def __init__(
        self, server: Server, key: bytes, retention: bytes, patience: float, replicas: int = 0
    ) -> None:
        self.server = server
        self.key = key
        self._replicas = replicas
        self._retention = retention
        self._patience = patience
        self._longest = max(STEP_TIMEOUT, patience)  # seconds that a call may take
        self._id = new_id()
        self._numbers = itertools.count(1)
        self._spares = Spares(self.new_connection)

    def new_connection(self, read_timeout: float | None = None) -> ServerConnection:
        timeout = self._longest if read_timeout is None else read_timeout
        return ServerConnection(self.server, timeout, f"{self._id}-{next(self._numbers)}")

    def head(self, session: tuple[bytes, bytes] = (b"", b"")) -> tuple[bytes, ...]:
        """The first arguments of every function except ``put_one``."""
        return _ahead(), self._retention, *session

    def call(self, verb: str, *args: bytes, once: bool = False, replicated: bool = False) -> Any:
        """Run a function on a spare connection; wait up to ``patience`` for an absent server."""
        # With ``once`` the store does the call once, however often it is sent. With ``replicated``
        # the call waits for the replicas that the URL asks for.
        line = self._spares.take()
        try:
            head = self.head(line.number() if once else (b"", b""))
            return self._patiently(line, verb, (*head, *args), replicated)
        finally:
            self._spares.give_back(line)

    def put(
        self, plain: Sequence[bytes] | None, pack: Callable[[], Sequence[bytes]], nonce: str = ""
    ) -> Any:
        """Put jobs, once; a ``plain`` single job goes through the faster function ``put_one``."""
        # ``pack`` packs the arguments of the function ``put``. Jobs with a ``nonce`` are stored
        # once, even if two processes put them.
        line = self._spares.take()
        try:
            session = _session_of(line, nonce)
            if plain is not None:
                args = (*session, *plain, _ahead())
                answer = self._patiently(line, "put_one", args, replicated=True)
                if answer != 0:
                    return answer
            args = (*self.head(session), *pack())
            return self._patiently(line, "put", args, replicated=True)
        finally:
            self._spares.give_back(line)

    def _patiently(
        self, line: ServerConnection, verb: str, args: Sequence[bytes], replicated: bool = False
    ) -> Any:
        now = time.monotonic()
        until, limit = now + self._patience, now + self._longest
        while True:
            try:
                answer = line.run_moved(verb, self.key, args, limit)
                if self._replicas and replicated and answer != 0:
                    line.replicate(self._replicas, self.key, limit)
                return answer
            except Away as error:
                self._pause(error, until)

    def _pause(self, error: Away, until: float) -> None:
        """Wait a moment for an absent server, or raise the error when patience is over."""
        now = time.monotonic()
        if now >= until:
            raise error
        with InterruptibleWait():
            time.sleep(max(0.01, min(self.server.pause(), until - now)))

    def ask(self, *command: bytes) -> Any:
        """Send a plain command on a spare connection; wait for an absent server like ``call``."""
        now = time.monotonic()
        until, limit = now + self._patience, now + self._longest
        line = self._spares.take()
        try:
            while True:
                try:
                    return line.ask(*command, until=limit)
                except Away as error:
                    self._pause(error, until)
        finally:
            self._spares.give_back(line)

    def learn_nodes(self) -> None:
        """Ask a node of a cluster for the other nodes, which know the master."""
        line = self._spares.take()
        try:
            line.learn_nodes()
        finally:
            self._spares.give_back(line)

    def close(self) -> None:
        """Close all connections for good; a connection in use closes when its call ends."""
        self._spares.close()


def _set_timeout(sock: Any, seconds: float, interrupted: bool) -> None:
    """Limit a wait by the kernel, since Python's own limit costs a ``poll`` for each wait."""
    # Signals may interrupt the main thread again and again. After each handler Python repeats the
    # wait, and the kernel's limit begins anew; Python's own limit does not.
    if interrupted or isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return
    sock.settimeout(None)
    packed = _TIMEVAL.pack(int(seconds), int(seconds % 1 * MICRO))
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, direction, packed)


def _ahead() -> bytes:
    """The microseconds that the server adds to its clock."""
    offset = clock.server_ahead()
    return b"%d" % int(offset * MICRO) if offset else b"0"


def _session_of(line: ServerConnection, nonce: str) -> tuple[bytes, bytes]:
    """Session and serial of a put, which the store does only once."""
    return (f"once {nonce}".encode(), _SERIAL.pack(1)) if nonce else line.number()
