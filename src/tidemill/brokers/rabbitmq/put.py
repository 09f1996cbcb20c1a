"""Publish with confirms: batches from any thread, over one connection, a channel for each place.

A batch is done when the server has confirmed all of it. After a connection breaks, only messages
that were sent and not confirmed are sent again. So a message may be stored twice, but never lost.
If a queue was deleted, its messages come back. Then the queue is made again, and its messages are
sent again. A place that cannot be made, or does not answer, delays only its own messages.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import pika

from tidemill.brokers.rabbitmq.amqp.connection_thread import (
    ConnectionCheck,
    ConnectionListener,
    ConnectionThread,
)
from tidemill.brokers.rabbitmq.amqp.publish_channel import (
    REFUSED,
    Batch,
    Outgoing,
    PublishChannel,
)
from tidemill.brokers.rabbitmq.errors import with_grant
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.core.errors import BrokerUnavailable, StoreFull, TidemillError
from tidemill.core.locks import Event, Lock

_REVIEW, _UNSURE = 0.25, 0.5
"""The most seconds between two checks of a put's patience; and the seconds that a refused put waits
for missing answers after its patience."""

_CHANNELS = 500
"""The most channels that are open at a time. The server allows 2,047 for a connection."""


class Publisher(ConnectionListener):
    """Publishes over one connection.

    ``failed`` is the place of the failed jobs, which other places need. ``notice`` makes the
    message that tells workers of a listed place (``Place.listed``).
    """

    def __init__(
        self, thread: ConnectionThread, failed: Place, notice: Callable[[Place], Outgoing]
    ) -> None:
        self._thread = thread
        self.where = f"rabbitmq at {thread.settings.where}"
        self._failed = failed
        self.notice = notice
        self.check = ConnectionCheck(thread, self._owes)
        self.connection: pika.SelectConnection | None = None
        self._places: dict[str, PublishChannel] = {}
        self._deferred: dict[str, PublishChannel] = {}  # places that wait for a free channel
        self._closed = False
        self._listeners: list[Event] = []  # set when no message is under way
        self._lock = Lock()
        self._new: deque[Batch] = deque()
        self._called = False  # True when the thread was asked to take new batches in

    # -- from any thread ------------------------------------------------------------------------

    def put(self, items: Sequence[Outgoing], patience: float, *, began: float = 0.0) -> None:
        """Send messages, and sleep until the server has them, however many they are.

        The put fails when a place confirmed nothing for the ``patience``, in seconds. ``began`` is
        the monotonic time from which the patience counts, 0 for now. A message that a queue refuses
        is sent again during the patience.

        Raises:
            StoreFull: the server lets nobody publish, and no message was sent.
            BrokerUnavailable: the server does not answer, or never takes one of the messages; or a
                queue refuses a message, cannot be made, or does not answer in time. The error says
                how much is stored.
        """
        batch = Batch(items, None, began or time.monotonic())
        if not self._thread.is_up:
            self._thread.await_up(max(0.0, batch.began + patience - time.monotonic()))
        self._submit(batch)
        wait = batch.began + patience - time.monotonic()
        while not batch.done.wait(max(wait, 0.01)):
            self._thread.do(functools.partial(self._review, batch, patience))
            wait = min(patience / 4, _REVIEW)
        if batch.trouble is not None:
            raise batch.trouble

    def send(self, items: Sequence[Outgoing], then: Callable[[], None]) -> None:
        """Send; the connection thread calls ``then`` when the server has them, however late."""
        self._submit(Batch(items, then, time.monotonic()))

    def flush(self, patience: float) -> bool:
        """Sleep until all earlier messages are confirmed; False when that takes longer."""
        quiet = Event()
        if not self._thread.is_up:
            return False

        def listen() -> None:
            self._take_in()
            self._listeners.append(quiet)
            self.look()

        self._thread.do(listen)
        return quiet.wait(patience)

    def close(self) -> None:
        """End all batches: nobody waits any longer."""

        def leave() -> None:
            self._closed = True
            self._take_in()
            for batch in [batch for place in self._places.values() for batch in place.batches()]:
                self.give_up(batch)

        self._thread.do(leave)

    def _submit(self, batch: Batch) -> None:
        if not batch.items:
            batch.end()
            return
        with self._lock:
            self._new.append(batch)
            if self._called:
                return
            self._called = True
            self._thread.do(self._take_in)

    # -- in the connection thread ---------------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        self.connection = connection
        self.check.begin(connection)
        for place in list(self._places.values()):
            place.pump(begin=place.place.name == self._failed.name)

    def unblocked(self) -> None:
        for place in list(self._places.values()):
            place.pump()

    def lost(self) -> None:
        """Queue again the messages that were under way, before all others and in their order."""
        self.connection = None
        for place in self._places.values():
            place.lost()

    def _take_in(self) -> None:
        """Add new batches to the ends of their places."""
        with self._lock:
            self._called = False
        while self._new:
            batch = self._new.popleft()
            if self._closed:
                self.give_up(batch)
                continue
            for _, group in itertools.groupby(batch.items, lambda item: item.home.name):
                items = list(group)
                place = self._of(items[0].home)
                place.add(batch, items)
                place.pump()

    def _of(self, home: Place) -> PublishChannel:
        if home.name != self._failed.name and self._failed.name not in self._places:
            self._of(self._failed).pump(begin=True)  # the server moves messages there
        place = self._places.get(home.name)
        if place is None:
            place = self._places[home.name] = PublishChannel(home, self)
        return place

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` after some seconds."""
        self._thread.later(seconds, act)

    def with_grant(self, why: str) -> str:
        """The server's text, with the command that grants a missing right."""
        return with_grant(why, self._thread.settings)

    def may_open(self, place: PublishChannel) -> bool:
        """Whether a place may open a channel; else it may do so later, when another is idle."""
        room = _CHANNELS - sum(one.is_open for one in self._places.values())
        for idle in [one for one in self._places.values() if one.is_idle] if room <= 0 else ():
            idle.leave()
            del self._places[idle.place.name]
            room += 1
        if room <= 0:
            self._deferred[place.place.name] = place
        return room > 0

    @property
    def may_send(self) -> bool:
        """Whether the server reads publications."""
        return not self._thread.blocked and self._thread.is_up

    def look(self) -> None:
        """Let deferred places go on, and tell the listeners if no message is under way."""
        deferred, self._deferred = self._deferred, {}
        for place in deferred.values():
            place.pump()
        if self._listeners and all(place.is_idle for place in self._places.values()):
            listeners, self._listeners = self._listeners, []
            for quiet in listeners:
                quiet.set()

    def _owes(self) -> bool:
        for place in self._places.values():
            place.try_anew()
        return any(place.sent for place in self._places.values())

    # -- giving up ------------------------------------------------------------------------------

    def _review(self, batch: Batch, patience: float) -> None:
        """Give up a batch if one of its places had no answer for ``patience`` seconds."""
        self._take_in()
        now = time.monotonic()
        for place in list(self._places.values()):
            quiet = now - max(place.answered, batch.began)
            if quiet >= patience and (batch.dropped or batch in place.batches()):
                batch.dropped = True
                for one in self._places.values():
                    one.drop(batch)
                if place.why != REFUSED or not batch.unsure or quiet >= patience + _UNSURE:
                    self.give_up(batch, *self._reason(place))
                break

    def _reason(self, place: PublishChannel) -> tuple[str, type[TidemillError]]:
        if self._thread.blocked:
            return f"{self.where} lets nobody publish: {self._thread.blocked}", StoreFull
        if not self.may_send:
            return self._thread.trouble, BrokerUnavailable
        return f"{self.where}: {place.trouble}", BrokerUnavailable

    def give_up(
        self, batch: Batch, why: str = "", kind: type[TidemillError] = BrokerUnavailable
    ) -> None:
        """End a batch, and say how much is stored. Messages under way may be stored, too."""
        if batch.done.is_set():
            return
        if kind is StoreFull and (batch.stored or batch.unsure):
            kind = BrokerUnavailable
        batch.end(kind(f"{why or 'the broker was closed'}; {batch.account()}"))
        for place in self._places.values():
            place.drop(batch)
