"""A connection to the server, and the only thread that uses it.

A pika connection belongs to one thread. Other threads pass callables to that thread (``do``). A
``ConnectionListener`` hears when the connection opens and when it is lost. The thread connects
again until ``close``. A process publishes over another connection than it acknowledges: the server
stops reading from publishers when it is short of room, and acknowledgements make room.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pika
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import AMQPError, AMQPHeartbeatTimeout

from tidemill.brokers.rabbitmq.amqp.connection import Connection, part
from tidemill.brokers.rabbitmq.errors import is_final, sentence
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.core.locks import Condition, Lock
from tidemill.core.signals import block_sigpipe
from tidemill.errors import BrokerUnavailable

log = logging.getLogger("tidemill.rabbitmq")

_PIKA = logging.getLogger("pika")
if _PIKA.level == logging.NOTSET:
    _PIKA.setLevel(logging.CRITICAL)  # pika logs each step of a connection; we log the outcome

_PAUSE, _PAUSE_MOST = 0.1, 1.0  # seconds between two tries to connect
_GOODBYE = 2.0  # seconds within which the server must close the connection, too


class ConnectionListener:
    """Listens to a connection. Called in the connection thread; by default, it does nothing."""

    def opened(self, connection: pika.SelectConnection) -> None:
        """There is a new connection: nothing is declared, consumed or confirmed on it yet."""

    def lost(self) -> None:
        """The connection is gone. The fate of unacknowledged and unconfirmed messages is open."""

    def unblocked(self) -> None:
        """The server reads publications again."""


class OutageLog:
    """Logs once for all connections that the server is gone, and once that it is back."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._away: set[str] = set()
        self._lock = Lock()

    def gone(self, role: str, trouble: str) -> None:
        """A connection broke."""
        with self._lock:
            first = not self._away
            self._away.add(role)
        if first:
            log.error("%s; trying again", trouble)

    def back(self, role: str) -> None:
        """A connection is open again."""
        with self._lock:
            last = self._away == {role}
            self._away.discard(role)
        if last:
            log.info("rabbitmq at %s is back", self._where)


class ConnectionThread:
    """Keeps a connection open. ``outages`` logs its losses and returns."""

    def __init__(
        self, settings: Settings, role: str, heartbeat: int, outages: OutageLog | None = None
    ) -> None:
        self.settings = settings
        self._outages = outages
        self.role = role
        # The reason why the server lets nobody publish; empty when it lets all publish.
        self.blocked = ""
        self._heartbeat = heartbeat
        self._loop = IOLoop()
        self._connection: pika.SelectConnection | None = None
        self._listeners: list[ConnectionListener] = []
        self._state = Condition()
        self._trouble = ""  # the reason why the connection is not open
        self._final = False  # True when no later try can succeed
        self._since = 0.0  # monotonic time at which the connection opened
        self._pause = _PAUSE
        self._closing = False
        self._connecting: Any = None
        self._thread: threading.Thread | None = None
        self.connects = 0  # the number of connections so far

    # -- from any thread ------------------------------------------------------------------------

    def do(self, act: Callable[[], None]) -> None:
        """Call ``act`` in the connection thread, soon and in order."""
        self._loop.add_callback_threadsafe(act)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after some seconds. Only the connection thread may call this."""
        self._loop.call_later(seconds, act)

    def start(self) -> None:
        """Start the thread, which connects. Returns at once."""
        with self._state:
            if self._thread is None and not self._closing:
                name = f"tidemill-{self.role}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None  # no thread can start: the next call tries again
                    raise

    def add(self, listener: ConnectionListener) -> None:
        """Add a listener. If the connection is open, the listener hears so at once."""

        def join() -> None:
            self._listeners.append(listener)
            if self._connection is not None:
                listener.opened(self._connection)

        self.start()
        self.do(join)

    def remove(self, listener: ConnectionListener) -> None:
        self.do(lambda: self._listeners.remove(listener) if listener in self._listeners else None)

    def await_up(self, patience: float) -> None:
        self.start()
        with self._state:
            up = self._state.wait_for(lambda: self._connection or self._final, patience)
            if not up or self._connection is None:
                raise BrokerUnavailable(self.trouble)

    def silence(self) -> str:
        """The sentence for a server that does not answer."""
        return f"rabbitmq at {self.settings.where} does not answer"

    @property
    def trouble(self) -> str:
        """The reason why the connection is not open, or does not work."""
        return self._trouble or self.silence()

    @property
    def is_up(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._connection is not None

    @property
    def server(self) -> dict[str, Any]:
        """The properties that the server reports."""
        connection = self._connection
        return dict(connection.server_properties or {}) if connection is not None else {}

    def close(self) -> None:
        """Close the connection. Unacknowledged messages go back; unconfirmed ones may be stored."""
        with self._state:
            self._closing = True
            thread, self._thread = self._thread, None
        if thread is None:
            with contextlib.suppress(Exception):  # fails when the loop is closed already
                self._loop.close()
        elif thread is not threading.current_thread():
            self.do(self._hang_up)
            thread.join(5.0)

    def after_fork_child(self) -> None:
        """In a forked child: close the copies of the parent's sockets, and send nothing on them."""
        self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the sockets of all connections, made or being made, without a goodbye."""
        making = part(self._connecting, "_connector")
        made = (self._connection, part(making, "_amqp_conn"))
        holders = (making, *(part(connection, "_transport") for connection in made))
        for sock in filter(None, (part(holder, "_sock") for holder in holders)):
            with contextlib.suppress(OSError):
                os.close(sock.detach())

    # -- in the connection thread ---------------------------------------------------------------

    def _run(self) -> None:
        block_sigpipe()
        self.do(self._connect)
        while True:
            try:
                self._loop.start()
                break
            except Exception:  # a bug in a callback must not leave all callers waiting
                log.exception("the connection to rabbitmq broke")
                self.do(self._begin_anew)
        self._close_sockets()
        self._loop.close()

    def _begin_anew(self) -> None:
        """Reconnect after a bug in a callback, since the state of the listeners is unknown."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(AMQPError):
                connection.close()
            self._drop()
        if self._connecting is None:
            self._pause = _PAUSE_MOST
            self._again()

    def _connect(self) -> None:
        if not (self._closing or self._connecting or self._connection):
            self._connecting = Connection.create_connection(
                self.settings.parameters(self._heartbeat), self._connected, self._loop
            )

    def _connected(self, result: Any) -> None:
        self._connecting = None
        if isinstance(result, BaseException):
            self._failed(result)
            return
        result.add_on_close_callback(self._closed)
        result.add_on_connection_blocked_callback(self._on_blocked)
        result.add_on_connection_unblocked_callback(self._on_unblocked)
        if self._outages is not None:
            self._outages.back(self.role)
        with self._state:
            self._connection = result
            self._trouble, self._since, self._final = "", time.monotonic(), False
            self.connects += 1
            self._state.notify_all()
        for listener in list(self._listeners):
            listener.opened(result)

    def _failed(self, error: BaseException) -> None:
        self._trouble = sentence(error, self.settings)
        with self._state:
            self._final = is_final(error)
            self._state.notify_all()
        self._again()

    def _closed(self, connection: Any, reason: BaseException) -> None:
        if connection is self._connection:
            self._trouble = sentence(reason, self.settings)
            if self._outages is not None and not self._closing:
                self._outages.gone(self.role, self._trouble)
            self._drop()
            self._again()

    def _drop(self) -> None:
        with self._state:
            self._connection = None
        self.blocked = ""
        for listener in list(self._listeners):
            listener.lost()

    def _again(self) -> None:
        if self._closing:
            self._end()
        else:
            # A connection that lasted a while resets the pause.
            if self._since and time.monotonic() - self._since > _PAUSE_MOST:
                self._pause, self._since = _PAUSE, 0.0
            self._loop.call_later(self._pause, self._connect)
            self._pause = min(self._pause * 2, _PAUSE_MOST)

    def _on_blocked(self, _: Any, frame: Any) -> None:
        self.blocked = str(getattr(frame.method, "reason", "")) or "no reason given"
        log.warning("rabbitmq at %s lets nobody publish: %s", self.settings.where, self.blocked)

    def _on_unblocked(self, *_: Any) -> None:
        self.blocked = ""
        log.info("rabbitmq at %s lets us publish again", self.settings.where)
        for listener in list(self._listeners):
            listener.unblocked()

    def cut(self, why: str) -> None:
        """Drop a dead connection without a goodbye, and reconnect. In the connection thread."""
        # pika itself calls this when heartbeats are missing. No other call closes at once.
        if (terminate := part(self._connection, "_terminate_stream")) is not None:
            terminate(AMQPHeartbeatTimeout(why))
        elif self._connection is not None:
            self._connection.close()

    def _hang_up(self) -> None:
        # Stop the loop even if the server no longer answers.
        self._loop.call_later(_GOODBYE, self._loop.stop)
        connection = self._connection
        if connection is not None and connection.is_open:
            connection.close()
        elif self._connecting is not None:
            _call_off(self._connecting)
        self._end()

    def _end(self) -> None:
        """Stop the loop, if the thread is closing and no connection is open any more."""
        if self._closing and not (self._connection or self._connecting):
            self._loop.stop()


def _call_off(connecting: Any) -> None:
    try:
        connecting.abort()
    except AssertionError:  # pika's abort fails while it waits for the server's greeting
        if (timer := part(connecting, "_connector", "_stack_timeout_ref")) is not None:
            timer.cancel()
        connection = part(connecting, "_connector", "_amqp_conn")
        if connection is not None and not connection.is_closing:
            connection.close()


_EVERY = 1.0  # seconds between two looks
DEAD = 6  # looks without an answer after which a connection is given up

_ASK, _WELL = 2, -30
"""The count of looks at which the check asks the server, and the count after the answer."""


class ConnectionCheck:
    """The check of one connection, in its thread. ``owed`` tells whether answers are owed.

    A silently cut connection brings nothing. A connection also brings nothing when the server has
    stopped reading from it, because a queue takes no messages. Rare AMQP heartbeats detect the
    first case late, and heartbeats never detect the second case. So while answers are missing, the
    check asks the server to open a channel. If the server opens the channel, a queue is slow and
    the connection works.

    The check counts looks, not seconds. So a task that holds the interpreter lock cannot make a
    connection seem dead: it delays the looks, too, and answers are read between two looks.
    """

    def __init__(self, thread: ConnectionThread, owed: Callable[[], bool]) -> None:
        self._thread = thread
        self._owed = owed
        self._connection: pika.SelectConnection | None = None
        self._looking = False
        self._quiet = 0

    def begin(self, connection: pika.SelectConnection) -> None:
        self._connection, self._quiet = connection, 0

    def watch(self) -> None:
        """Start to look: the server now owes answers."""
        if not self._looking:
            self._looking = True
            self._thread.later(_EVERY, self._look)

    def heard(self) -> None:
        """Count an answer: the connection works."""
        self._quiet = 0

    def _look(self) -> None:
        self._looking = False
        connection = self._connection
        if not self._owed() or connection is None or not connection.is_open:
            self._quiet = 0
            return
        self.watch()
        if self._thread.blocked:  # the server has said that it reads nothing for now
            self._quiet = 0
            return
        self._quiet += 1
        if self._quiet == _ASK:
            connection.channel(on_open_callback=self._opened)
        elif self._quiet >= DEAD:
            self._thread.cut(f"nothing was heard for {DEAD * _EVERY:g} s")

    def _opened(self, channel: Channel) -> None:
        if channel.connection is self._connection:
            self._quiet = _WELL
        channel.close()
