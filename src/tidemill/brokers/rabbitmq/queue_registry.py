"""The registry of queues: a stream with the name of every queue, written at its first use.

The protocol cannot list the names of queues. The reader of a stream starts at its beginning, and
then gets each new entry. If a connection reads a stream too early (while it is being made, or just
after the server has started), the server closes the connection. So the registry reads over the
connection of the questions (:mod:`.amqp.topology`). The announcer writes a name before the first
job goes to the queue, and again every hour, since the stream keeps only the latest names.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import pika
from pika.channel import Channel

from tidemill.brokers.rabbitmq.amqp.connection import encoded
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionListener, ConnectionThread
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.layout import Names, is_pattern
from tidemill.brokers.rabbitmq.put import Outgoing, Publisher
from tidemill.core.locks import Event, Lock
from tidemill.errors import BrokerUnavailable

log = logging.getLogger("tidemill.rabbitmq")

_CREDIT = 500

_AGAIN = 1.0  # seconds until a lost stream is read again


class Registry(ConnectionListener):
    """The names of all queues, as they become known."""

    def __init__(self, thread: ConnectionThread, declarer: Declarer, names: Names) -> None:
        self._thread = thread
        self._declarer = declarer
        self._names = names
        self._heard: set[str] = set()
        self._marks: dict[str, Event] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._lock = Lock()
        self._joined = False

    def entry(self, queue: str, mark: str = "") -> Outgoing:
        """The message that announces a name."""
        properties = pika.BasicProperties(delivery_mode=2, message_id=mark or uuid.uuid4().hex)
        return Outgoing(encoded(properties), queue.encode(), self._names.registry)

    def listen(self, heard: Callable[[str], None]) -> None:
        """Call ``heard`` with every known name and every name to come."""
        self._join()
        with self._lock:
            self._listeners.append(heard)
        for queue in self.known():
            heard(queue)

    def _join(self) -> None:
        with self._lock:
            join, self._joined = not self._joined, True
        if join:
            self._thread.add(self)

    def unlisten(self, heard: Callable[[str], None]) -> None:
        with self._lock:
            self._listeners = [one for one in self._listeners if one != heard]

    def known(self) -> list[str]:
        with self._lock:
            return sorted(self._heard)

    def know(self, queue: str) -> None:
        """Add a name, and tell the listeners if the name is new."""
        with self._lock:
            new = bool(queue) and queue not in self._heard
            if new:
                self._heard.add(queue)
            listeners = list(self._listeners) if new else []
        for heard in listeners:
            heard(queue)

    def read_all(self, publish: Callable[[Outgoing], None], patience: float) -> list[str]:
        """All names that were announced before this call."""
        mark, seen = uuid.uuid4().hex, Event()
        self._marks[mark] = seen
        try:
            # Publish first: this makes the stream if it is missing. A read of a missing stream
            # closes the connection.
            publish(self.entry("", mark))
            self._join()
            if not seen.wait(patience):
                raise BrokerUnavailable(self._thread.silence())
        finally:
            self._marks.pop(mark, None)
        return self.known()

    # -- called by the connection thread --------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        if not connection.is_open:
            return  # the connection was lost: the next connection reads

        def consume(why: str) -> None:
            if not connection.is_open:
                return
            if why:  # for example, a server that has just started
                log.warning("the names of the queues cannot be read yet: %s", why)
                self._thread.later(_AGAIN, lambda: self.opened(connection))
            else:
                connection.channel(on_open_callback=functools.partial(self._consume, connection))

        self._declarer.declare(self._names.registry, consume, probe=False)

    def _consume(self, connection: pika.SelectConnection, channel: Channel) -> None:
        def again(*_: Any) -> None:  # the stream was deleted, or its leader has moved
            if connection.is_open:
                self._thread.later(_AGAIN, lambda: self.opened(connection))

        channel.add_on_cancel_callback(lambda _: channel.close())
        channel.add_on_close_callback(again)
        channel.basic_qos(prefetch_count=_CREDIT)
        channel.basic_consume(
            self._names.registry.name, self._on_name, arguments={"x-stream-offset": "first"}
        )

    def _on_name(self, channel: Channel, method: Any, properties: Any, body: bytes) -> None:
        channel.basic_ack(method.delivery_tag, multiple=True)
        queue = body.decode(errors="replace")
        if not is_pattern(queue):  # a pattern is no name of a queue: ignore it
            self.know(queue)
        mark = self._marks.get(properties.message_id or "")
        if mark is not None:
            mark.set()


_EVERY = 3600.0  # seconds after which the announcer writes the names again
_MOST = 10_000  # names that the announcer remembers. It forgets the names that were used first.


class Announcer:
    """The announcer of one process. ``served`` returns the queues that its owners take from."""

    def __init__(
        self,
        thread: ConnectionThread,
        publisher: Publisher,
        registry: Registry,
        served: Callable[[], Iterable[str]],
    ) -> None:
        self._thread = thread
        self._publisher = publisher
        self._registry = registry
        self._served = served
        self._used: dict[str, int] = {}  # by name: the connection over which it was written, or 0
        thread.do(self._wait)

    def make_known(self, queues: Iterable[str], patience: float, began: float) -> None:
        """Write the new names, and sleep until the server has them: see ``put``."""
        if items := self.entries(queues):
            connects = self._thread.connects
            self._publisher.put(items, patience, began=began)
            for name in [item.body.decode() for item in items]:
                self._used[name] = connects
                self._registry.know(name)

    def entries(self, queues: Iterable[str]) -> list[Outgoing]:
        """Messages that announce the queues which this connection has not announced yet."""
        self.use(queues)
        told, connects = self._used.get, self._thread.connects
        return [self._registry.entry(q) for q in dict.fromkeys(queues) if told(q) != connects]

    def use(self, queues: Iterable[str]) -> None:
        """Mark queues as used: the process writes their names for as long as it lives."""
        for queue in queues:
            if queue not in self._used:
                self._used[queue] = 0
                if len(self._used) > _MOST:
                    self._used.pop(next(iter(self._used)), None)

    # -- in the connection thread ---------------------------------------------------------------

    def _wait(self) -> None:
        self._thread.later(_EVERY, self._repeat)

    def _repeat(self) -> None:
        self._wait()
        names = dict.fromkeys([*self._used, *self._served()])
        self._publisher.send([self._registry.entry(name) for name in names], lambda: None)
