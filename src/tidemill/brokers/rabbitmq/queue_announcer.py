"""Writes the names of the queues that this process uses to the stream of names.

See :mod:`.queue_registry`.

The announcer writes a name before the first job goes to the queue, so that workers find the job. It
writes the name again every hour, since the stream keeps only the latest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pika

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.publish_channel import Outgoing
from tidemill.brokers.rabbitmq.put import Publisher
from tidemill.brokers.rabbitmq.queue_registry import Registry

_EVERY = 3600.0
"""Seconds after which the announcer writes the names again."""

_MOST = 10_000
"""Names that the announcer remembers. It forgets the names that were used first."""


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
        self._used: dict[str, None] = {}
        self._told: set[str] = set()  # names that were written over this connection
        self._comings = 0  # ``connects`` of the thread at the last announcement
        self._timing = self._telling = False

    def make_known(self, queues: Iterable[str], patience: float, began: float) -> None:
        """Write the new names, and sleep until the server has them: see ``put``."""
        if items := self.entries(queues):
            names = [item.body.decode() for item in items]
            self._publisher.put(items, patience, began=began)
            self._told.update(names)
            for name in names:
                self._registry.know(name)

    def entries(self, queues: Iterable[str]) -> list[Outgoing]:
        """Messages that announce the queues which this connection has not announced yet."""
        if self._comings != self._thread.connects:
            self._comings = self._thread.connects
            self._told.clear()
        self.use(queues)
        return [self._registry.entry(q) for q in dict.fromkeys(queues) if q not in self._told]

    def use(self, queues: Iterable[str]) -> None:
        """Mark queues as used: the process writes their names for as long as it lives."""
        for queue in queues:
            if queue not in self._used:
                self._used[queue] = None
                if len(self._used) > _MOST:
                    self._used.pop(next(iter(self._used)), None)

    # -- called by the connection thread --------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        if not self._timing:
            self._timing = True
            self._thread.later(_EVERY, self._repeat)

    def unblocked(self) -> None:
        """Do nothing: the announcer does not wait for the server."""

    def lost(self, why: str) -> None:
        """Do nothing: the publisher sends its unconfirmed messages again."""

    def _repeat(self) -> None:
        self._thread.later(_EVERY, self._repeat)
        names = dict.fromkeys([*self._used, *self._served()])
        if names and not self._telling:
            self._telling = True
            self._publisher.send([self._registry.entry(name) for name in names], self._told_again)

    def _told_again(self) -> None:
        self._telling = False
