"""Check a connection on which answers are missing, to detect a dead connection.

A silently cut connection brings nothing. A connection also brings nothing when the server has
stopped reading from it, because a queue takes no messages. Rare AMQP heartbeats detect the first
case late, and heartbeats never detect the second case. So while answers are missing, this module
asks the server to open a channel. If the server opens the channel, a queue is slow and the
connection works.

The check counts looks, not seconds. So a task that holds the interpreter lock cannot make a
connection seem dead: it delays the looks, too, and answers are read between two looks.
"""

from __future__ import annotations

from collections.abc import Callable

import pika
from pika.channel import Channel

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread

_EVERY = 1.0
"""Seconds between two looks."""

DEAD = 6
"""Looks without an answer after which a connection is given up."""

_ASK, _WELL = 2, -30
"""The count of looks at which the check asks the server, and the count after the answer."""


class ConnectionCheck:
    """The check of one connection, in its thread. ``owed`` tells whether answers are owed."""

    def __init__(self, thread: ConnectionThread, owed: Callable[[], bool]) -> None:
        self._thread = thread
        self._owed = owed
        self._connection: pika.SelectConnection | None = None
        self._looking = False
        self._quiet = 0

    def begin(self, connection: pika.SelectConnection) -> None:
        """Begin on a new connection."""
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
