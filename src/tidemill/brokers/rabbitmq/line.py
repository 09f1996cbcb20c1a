"""A connection to the server, and the thread that alone touches it.

pika's connections belong to one thread. Others say what is to be done there (``do``) and go on;
who wants to hear of its coming and going is a ``User``. A connection that is lost is made again
until the line is closed. A process has two lines: one takes and acknowledges, one publishes. The
server stops reading from who publishes when it is short of memory or disk, and an acknowledgement
behind a publication would then wait with it, though it is just what makes room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import pika
from pika.adapters.select_connection import IOLoop

from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.trouble import is_final, sentence
from tidemill.errors import BrokerUnavailable

__all__ = ["Line", "User"]

log = logging.getLogger("tidemill.rabbitmq")

_PIKA = logging.getLogger("pika")
if _PIKA.level == logging.NOTSET:
    _PIKA.setLevel(logging.CRITICAL)  # it tells each step of a connection; we say what came of it

_PAUSE, _PAUSE_MOST = 0.1, 1.0
"""Seconds between two tries to connect."""


class User(Protocol):
    """Who works over a line. Called in the line's thread."""

    def opened(self, connection: pika.SelectConnection) -> None:
        """There is a new connection: nothing is declared, consumed or confirmed on it."""

    def lost(self, why: str) -> None:
        """The connection is gone, and all that was not acknowledged or confirmed is open."""


class Line:
    """A connection that is kept up."""

    def __init__(self, settings: Settings, role: str, heartbeat: int) -> None:
        self.settings = settings
        self.role = role
        self.blocked = ""
        self._heartbeat = heartbeat
        self._loop = IOLoop()
        self._connection: pika.SelectConnection | None = None
        self._users: list[User] = []
        self._state = threading.Condition()
        self._trouble = ""  # why it is not up
        self._final = False  # and will not be
        self._was_up = False
        self._pause = _PAUSE
        self._closing = False
        self._thread: threading.Thread | None = None

    # -- from any thread ------------------------------------------------------------------------

    def do(self, act: Callable[[], None]) -> None:
        """Have something done in the line's thread, soon and in order."""
        self._loop.add_callback_threadsafe(act)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something done in the line's thread, which this is called in, after a while."""
        self._loop.call_later(seconds, act)

    def start(self) -> None:
        """Connect; returns at once."""
        with self._state:
            if self._thread is None and not self._closing:
                name = f"tidemill-{self.role}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def add(self, user: User) -> None:
        """Have a user told from now on; if the line is up, that it is."""

        def join() -> None:
            self._users.append(user)
            if self._connection is not None:
                user.opened(self._connection)

        self.start()
        self.do(join)

    def remove(self, user: User) -> None:
        """Tell a user nothing more."""
        self.do(lambda: self._users.remove(user) if user in self._users else None)

    def await_up(self, patience: float) -> None:
        """Sleep until the line is up.

        Raises:
            BrokerUnavailable: it is not, after so many seconds, or the server refuses us.
        """
        self.start()
        with self._state:
            up = self._state.wait_for(lambda: self._connection or self._final, patience)
            if not up or self._connection is None:
                raise BrokerUnavailable(self._trouble or self.silence())

    def silence(self) -> str:
        """The sentence for a server that does not answer."""
        return f"rabbitmq at {self.settings.where} does not answer"

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, as far as we know."""
        return self._connection is not None

    @property
    def server(self) -> dict[str, Any]:
        """What the server says of itself."""
        connection = self._connection
        return dict(connection.server_properties or {}) if connection is not None else {}

    def close(self) -> None:
        """Hang up. What is not acknowledged goes back, what is not confirmed is open."""
        with self._state:
            self._closing = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self.do(self._hang_up)
            thread.join(5.0)

    def after_fork_child(self) -> None:
        """In a forked child: close our copy of what is the parent's, and say nothing on it."""
        transport = getattr(self._connection, "_transport", None)
        sock = getattr(transport, "_sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    # -- in the line's thread -------------------------------------------------------------------

    def _run(self) -> None:
        self._connect()
        while not self._closing:
            try:
                self._loop.start()
            except Exception:  # a bug of ours in a callback must not leave everybody waiting
                log.exception("the line to rabbitmq broke")
                if self._connection is not None:
                    self._drop("an error of its own")
            else:
                break

    def _connect(self) -> None:
        if not self._closing:
            pika.SelectConnection.create_connection(
                self.settings.parameters(self._heartbeat), self._connected, self._loop
            )

    def _connected(self, result: Any) -> None:
        if isinstance(result, BaseException):
            self._failed(result)
            return
        result.add_on_close_callback(self._closed)
        result.add_on_connection_blocked_callback(self._on_blocked)
        result.add_on_connection_unblocked_callback(self._on_unblocked)
        if self._trouble and self._was_up:
            log.info("rabbitmq at %s is back", self.settings.where)
        with self._state:
            self._connection = result
            self._trouble, self._pause, self._was_up = "", _PAUSE, True
            self._state.notify_all()
        for user in list(self._users):
            user.opened(result)

    def _failed(self, error: BaseException) -> None:
        final = is_final(error)
        self._say(sentence(error, self.settings))
        with self._state:
            self._final = final
            self._state.notify_all()
        self._again()

    def _closed(self, connection: Any, reason: BaseException) -> None:
        if connection is self._connection:
            self._say(sentence(reason, self.settings))
            self._drop(self._trouble)
            self._again()

    def _drop(self, why: str) -> None:
        with self._state:
            self._connection = None
        self.blocked = ""
        for user in list(self._users):
            user.lost(why)

    def _say(self, trouble: str) -> None:
        """Once for each time the server is away."""
        if not self._trouble and not self._closing:
            log.error("%s; trying again", trouble)
        self._trouble = trouble

    def _again(self) -> None:
        if self._closing:
            self._loop.stop()
        else:
            self._loop.call_later(self._pause, self._connect)
            self._pause = min(self._pause * 2, _PAUSE_MOST)

    def _on_blocked(self, _: Any, frame: Any) -> None:
        self.blocked = str(getattr(frame.method, "reason", "")) or "no reason given"
        log.warning("rabbitmq at %s lets nobody publish: %s", self.settings.where, self.blocked)

    def _on_unblocked(self, *_: Any) -> None:
        self.blocked = ""
        log.info("rabbitmq at %s lets us publish again", self.settings.where)

    def _hang_up(self) -> None:
        connection = self._connection
        if connection is not None and connection.is_open:
            connection.close()
        else:
            self._loop.stop()

