"""Lines to the server: made, checked, made again; calls on them, answered once however often sent.

A *line* is one connection at a time and a session: the calls made on it are numbered, the store
keeps the last answer of each session, so that a call whose reply was lost can be sent again.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
import time
from collections.abc import Sequence
from typing import Any

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection
from redis.retry import Retry
from redis.sentinel import Sentinel

from tidemill.brokers.redis import servertime
from tidemill.brokers.redis.address import Address
from tidemill.brokers.redis.library import LIBRARY
from tidemill.brokers.redis.servertime import MICRO
from tidemill.brokers.redis.trouble import Away, code_of, is_broken, translate
from tidemill.clock import new_id
from tidemill.errors import TidemillError

__all__ = ["CONNECT_TIMEOUT", "STEP_TIMEOUT", "Line", "Lines", "Server"]

CONNECT_TIMEOUT = 2.0
"""Seconds in which a server must answer a knock."""

STEP_TIMEOUT = 3.0
"""Seconds that a call may take at least; whoever has patience gives it longer."""

_BACKOFF, _BACKOFF_MOST = 0.05, 1.0
_DUE = b"due"  # the answer to a call before which more has come due than it should move
_MOVES = 5  # that are followed in one call
_MOVED = re.compile(r"MOVED \d+ (\S*):(\d+)")
_SERIAL = struct.Struct(">Q")


class Server:
    """Where the server is now, and how to get a connection to it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._nodes = list(address.hosts)  # all that were ever heard of
        self._node: tuple[str, int] | None = None  # that has our slot
        self._failures = 0
        self._next_try = 0.0
        self._trouble = ""

    @property
    def where(self) -> str:
        """For a sentence."""
        return f"{self._node[0]}:{self._node[1]}" if self._node else self.address.where

    def pause(self) -> float:
        """Seconds before it makes sense to try again."""
        return max(0.0, self._next_try - time.monotonic())

    def connect(self, read_timeout: float) -> AbstractConnection:
        """A connection, authenticated. A server that is dead is not tried again at once.

        Raises:
            BrokerUnavailable: it is away, or does not let us in.
        """
        if self.pause() > 0:
            raise Away(self._trouble)
        try:
            connection = self._connect(read_timeout)
        except Exception as error:
            self._node = None
            self._failures += 1
            most = min(_BACKOFF * 2 ** min(self._failures, 10), _BACKOFF_MOST)
            self._next_try = time.monotonic() + most * random.uniform(0.5, 1.0)
            translated = translate(error, self.where)
            self._trouble = str(translated)
            raise translated from error
        self._failures = 0
        return connection

    def _connect(self, read_timeout: float) -> AbstractConnection:
        failed: Exception | None = None
        for host, port in self._candidates():
            connection = self._make(host, port, read_timeout)
            try:
                connection.connect()
            except Exception as error:
                if not is_broken(error) or isinstance(error, redis.AuthenticationError):
                    raise
                failed = error
                continue
            self._node = host, port
            return connection
        raise failed or redis.ConnectionError("no address")

    def _candidates(self) -> list[tuple[str, int]]:
        if self.address.service:
            return [self._ask_sentinels()]
        known = [node for node in self._nodes if node != self._node]
        return [self._node, *known] if self._node else known

    def _ask_sentinels(self) -> tuple[str, int]:
        a = self.address
        options: dict[str, Any] = {
            "socket_timeout": CONNECT_TIMEOUT,
            "socket_connect_timeout": CONNECT_TIMEOUT,
            "retry": Retry(NoBackoff(), 0),
            "username": a.sentinel_user or None,
            "password": a.sentinel_password or None,
        }
        if a.tls is not None:
            options |= {"ssl": True, **a.tls}
        sentinel = Sentinel(list(a.hosts), sentinel_kwargs=options)
        try:
            host, port = sentinel.discover_master(a.service)
            return str(host), int(port)
        finally:
            for client in sentinel.sentinels:
                client.close()

    def _make(self, host: str, port: int, read_timeout: float) -> AbstractConnection:
        a = self.address
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "db": a.db,
            "username": a.user or None,
            "password": a.password or None,
            "socket_timeout": read_timeout,
            "socket_connect_timeout": CONNECT_TIMEOUT,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if a.tls is not None:
            return SSLConnection(**(options | a.tls))
        return Connection(**options)

    def moved(self, message: str) -> bool:
        """Go where a node of a cluster says the slot is; False when it does not say."""
        found = _MOVED.match(message)
        if not found:
            return False
        host = found[1] or (self._node[0] if self._node else self._nodes[0][0])
        self._node = host, int(found[2])
        self.learn([self._node])
        return True

    def learn(self, nodes: Sequence[tuple[str, int]]) -> None:
        """Remember nodes of the cluster: one of them will know, when this one is dead."""
        self._nodes += [node for node in nodes if node not in self._nodes]

    def look_again(self) -> None:
        """The node is not, or no longer, the master."""
        self._node = None


class Line:
    """One connection at a time. Used by one thread at a time."""

    def __init__(self, server: Server, read_timeout: float, session: str = "") -> None:
        self._server = server
        self._read_timeout = read_timeout
        self._connection: AbstractConnection | None = None
        self._socket: Any = None
        self._reader = hiredis.Reader()
        self._session = session.encode()
        self._serial = 0

    def number(self) -> tuple[bytes, bytes]:
        """Session and serial of a call that must be done once only."""
        self._serial += 1
        return self._session, _SERIAL.pack(self._serial)

    def run(self, verb: str, key: bytes, args: Sequence[bytes]) -> Any:
        """Have a function run, and its answer. A line that proves broken is made anew, once.

        Raises:
            BrokerUnavailable: nobody knows whether it ran, unless the error says so.
        """
        command = (b"FCALL", LIBRARY.function(verb), b"1", key, *args)
        for last in (False, *[True] * _MOVES):
            was_open = self._socket is not None
            try:
                return self._send(command)
            except TidemillError:
                raise
            except Exception as error:
                code = code_of(error)
                if "FUNCTION NOT FOUND" in code:
                    self._load()
                elif code.startswith("MOVED") and self._server.moved(str(error)):
                    self.close()
                    self._learn_nodes()
                elif is_broken(error) and was_open and not last:
                    self.close()
                else:
                    if is_broken(error) or code.startswith(("READONLY", "LOADING", "CLUSTERDOWN")):
                        self.close()
                        self._server.look_again()
                    raise translate(error, self._server.where) from error
        raise Away(f"redis at {self._server.where} sends us from node to node")

    def _send(self, command: tuple[Any, ...]) -> Any:
        """Send and read by ourselves: redis-py's ways take longer than the server's answer."""
        sock = self._socket or self._connect()
        reader = self._reader
        try:
            sock.sendall(hiredis.pack_command(command))
            while (answer := reader.gets()) is False:
                data = sock.recv(65536)
                if not data:
                    raise redis.ConnectionError("the line was closed")
                reader.feed(data)
        except BaseException:
            self.close()  # an answer may still be on its way: nobody must read it as another's
            raise
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer

    def _connect(self) -> Any:
        self._connection = self._server.connect(self._read_timeout)
        self._socket = self._connection._sock
        self._reader = hiredis.Reader(replyError=redis.ResponseError)
        return self._socket

    def _load(self) -> None:
        try:
            self._send((b"FUNCTION", b"LOAD", LIBRARY.text))
        except TidemillError:
            raise
        except Exception as error:
            if "already exists" not in str(error):  # somebody was faster
                raise translate(error, self._server.where) from error

    def ask(self, *command: bytes) -> Any:
        """The answer to a plain command; errors as :meth:`run`."""
        try:
            return self._send(command)
        except TidemillError:
            raise
        except Exception as error:
            raise translate(error, self._server.where) from error

    def _learn_nodes(self) -> None:
        """Ask a node for the others."""
        slots = self.ask(b"CLUSTER", b"SLOTS")
        nodes = [(node[0].decode(), int(node[1])) for slot in slots for node in slot[2:] if node[0]]
        self._server.learn(nodes)

    def close(self) -> None:
        """Hang up."""
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.disconnect()


class Lines:
    """The lines of one broker that any thread may use, as many as are in use at once."""

    def __init__(self, server: Server, key: bytes, retention: bytes, patience: float) -> None:
        self.server = server
        self.key = key
        self._retention = retention
        self._patience = patience
        self._id = new_id()
        self._numbers = itertools.count(1)
        self._spare: list[Line] = []

    def new_line(self, read_timeout: float | None = None) -> Line:
        """A line for one who keeps it."""
        timeout = max(STEP_TIMEOUT, self._patience) if read_timeout is None else read_timeout
        return Line(self.server, timeout, f"{self._id}-{next(self._numbers)}")

    def head(self, session: tuple[bytes, bytes] = (b"", b"")) -> tuple[bytes, ...]:
        """The arguments that every script begins with."""
        offset = servertime.server_offset()
        return b"%d" % int(offset * MICRO) if offset else b"0", self._retention, *session

    def call(self, verb: str, *args: bytes, once: bool = False) -> Any:
        """Run a script on a spare line, waiting for a server that is away as long as patience says.

        With ``once`` it is done once, however often it is sent.
        """
        line = self._take()
        try:
            head = self.head(line.number() if once else (b"", b""))
            return self._patiently(line, verb, (*head, *args))
        finally:
            self._spare.append(line)

    def put(
        self,
        jobs: Sequence[bytes],
        line_and_rank: tuple[bytes, bytes] | None,
        held: Sequence[bytes] = (),
        nonce: str = "",
    ) -> Any:
        """Put jobs, once; one that asks for nothing by the shortest way there is.

        ``held`` is what is said of jobs that wait for others. With a ``nonce`` it is once whoever
        calls.
        """
        line = self._take()
        try:
            session = (f"once {nonce}".encode(), _SERIAL.pack(1)) if nonce else line.number()
            if line_and_rank is not None:
                args = (*session, *jobs[:3], *line_and_rank)
                answer = self._patiently(line, "put_one", args)
                if answer != 0:
                    return answer
            count = b"%d" % (len(jobs) // 4)
            return self._patiently(line, "put", (*self.head(session), count, *jobs, *held))
        finally:
            self._spare.append(line)

    def _take(self) -> Line:
        """A line that nobody else uses, to be put back; both are atomic without a lock."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.new_line()

    def _patiently(self, line: Line, verb: str, args: Sequence[bytes]) -> Any:
        until = 0.0
        while True:
            try:
                answer = line.run(verb, self.key, args)
                if answer != _DUE:
                    return answer
                while line.run("tick", self.key, (*self.head(), b"0")):
                    pass
            except Away:
                now = time.monotonic()
                until = until or now + self._patience
                if now >= until:
                    raise
                time.sleep(max(0.01, min(self.server.pause(), until - now)))

    def ask(self, *command: bytes) -> Any:
        """The answer to a plain command."""
        line = self._take()
        try:
            return line.ask(*command)
        finally:
            self._spare.append(line)

    def close(self) -> None:
        """Hang up all that are spare."""
        spare, self._spare = self._spare, []
        for line in spare:
            line.close()

    def after_fork_child(self) -> None:
        """In a forked child: the lines are the parent's; close our copies."""
        self.close()
