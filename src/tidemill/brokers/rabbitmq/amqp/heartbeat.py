"""Whether a line that owes us answers still gives any.

Nothing comes over a line whose link was cut silently, and nothing over one of which the server
reads no more, since it waits for a queue that takes nothing. Heartbeats tell of the first late,
where they are rare, and of the second never. So as long as answers are owed and none comes, the
server is asked to open a channel: if it does, a queue is slow and the line is well.

It counts looks rather than seconds. A task that holds the interpreter lock holds up the looks with
the answers, which are read between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pika
from pika.channel import Channel

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread

__all__ = ["DEAD", "Heartbeat"]

_EVERY = 1.0
"""Seconds between two looks."""

DEAD = 6
"""Looks without an answer after which a line is given up."""

_ASK, _WELL = 2, -30
"""Looks after which the server is asked, and what an answer to that is worth."""


class Heartbeat:
    """Of one line; all in its thread. ``owed`` is asked once a look whether answers are."""

    def __init__(self, thread: ConnectionThread, owed: Callable[[], bool]) -> None:
        self._thread = thread
        self._owed = owed
        self._connection: pika.SelectConnection | None = None
        self._looking = False
        self._quiet = 0

    def begin(self, connection: pika.SelectConnection) -> None:
        """There is a new connection."""
        self._connection, self._quiet = connection, 0

    def watch(self) -> None:
        """Answers are owed from now on."""
        if not self._looking:
            self._looking = True
            self._thread.later(_EVERY, self._look)

    def heard(self) -> None:
        """One came."""
        self._quiet = 0

    def _look(self) -> None:
        self._looking = False
        connection = self._connection
        if not self._owed() or connection is None or not connection.is_open:
            self._quiet = 0
            return
        self.watch()
        if self._thread.blocked:  # it has said that it does not read
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
