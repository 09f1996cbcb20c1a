"""Publish with confirms: batches from any thread, over one connection, a channel for each place.

A batch is done when the server has confirmed all of it. After a connection breaks, only messages
that were sent and not confirmed are sent again. So a message may be stored twice, but never lost.
If a queue was deleted, its messages come back. Then the queue is made again, and its messages are
sent again. ``docs/design/rabbitmq.md`` says why each place has a channel of its own, why few
messages are under way at first, and why a refusal costs a channel.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pika
from pika.channel import Channel
from pika.spec import Basic

from tidemill.brokers.rabbitmq.amqp.connection import (
    Confirm,
    Connection,
    decoded,
    encoded,
    publication,
    read_confirms,
)
from tidemill.brokers.rabbitmq.amqp.connection_thread import (
    ConnectionCheck,
    ConnectionListener,
    ConnectionThread,
)
from tidemill.brokers.rabbitmq.errors import with_grant
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.core.locks import Event, Lock
from tidemill.errors import BrokerUnavailable, StoreFull, TidemillError

log = logging.getLogger("tidemill.rabbitmq")

REFUSED = "refused a message (it is full, or has no majority)"

_STARTING = "is down or inaccessible"  # a queue whose node is away, every queue after a start

_NEVER_MADE = ("ACCESS_REFUSED", "NOT_ALLOWED", "NOT_IMPLEMENTED", "PRECONDITION_FAILED")
"""The beginnings of the server's text for a queue that it will never make."""

_AGAIN, _AGAIN_MOST = 0.2, 2.0  # seconds until a place is tried again, at first and at most
_SILENT = 60.0  # seconds without an answer after which messages are sent again over another channel

FIRST, MOST = 16, 1000
"""Messages of a place under way, at first and at most: enough to hide the delay of the disk."""

_TRIES = 3  # tries of a batch whose channel the server closes, maybe because of another batch


class Outgoing(msgspec.Struct):
    """A message to send, and the place that it goes to."""

    properties: bytes
    body: bytes
    home: Place


class Batch:
    """Messages that a caller waits for together."""

    def __init__(
        self, items: Sequence[Outgoing], then: Callable[[], None] | None, began: float
    ) -> None:
        self.items = items
        self.began = began  # monotonic time at which the waiting call began
        self.stored = 0  # the number of confirmed messages
        self.unsure = 0  # messages sent without an answer, on this connection or earlier ones
        self.tries = 0  # how often the server closed the channel of its messages
        self.dropped = False  # no more messages are sent, while some are still under way
        self.trouble: TidemillError | None = None
        self.done = Event()
        self.then = then

    @property
    def is_over(self) -> bool:
        """Whether no more messages of the batch are sent."""
        return self.dropped or self.done.is_set()

    def end(self, trouble: TidemillError | None = None) -> None:
        """End the batch once, and tell its caller."""
        if not self.done.is_set():
            self.trouble = trouble
            self.done.set()
            if self.then is not None and trouble is None:
                self.then()

    def account(self) -> str:
        """A sentence that says how many messages the server has."""
        if not self.stored and not self.unsure:
            return "nothing was stored"
        count = len(self.items)
        if not self.unsure:
            return f"{self.stored} of {count} were stored"
        return f"{self.stored} of {count} were stored, and {self.unsure} more may be"


Entry = tuple[Batch, Outgoing, bool]  # the last is True for a message sent before without answer


class PublishChannel:
    """The channel of one place; another channel replaces it after a refusal or a loss."""

    def __init__(self, place: Place, publisher: Publisher) -> None:
        self.place = place
        self.answered = 0.0  # monotonic time of the last answer other than a refusal; 0 for none
        self.why = ""  # the server's reason why the place cannot be used now
        self._publisher = publisher
        self._todo: deque[Entry] = deque()
        self._back: list[Entry] = []  # messages that came back, to be sent before all others
        self.sent: dict[int, Entry] = {}  # under way, by delivery tag
        self._returned: set[int] = set()
        self._next = 1  # the tag of the next message
        self._opened_at = 0.0
        self._size = FIRST
        self._pause = 0.0
        self._channel: Channel | None = None
        self._ready = self._pausing = False

    @property
    def is_idle(self) -> bool:
        """Whether the place has no message to send or under way."""
        return not (self._todo or self._back or self.sent)

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    @property
    def trouble(self) -> str:
        """A sentence that says what is wrong with the place."""
        if self.why == REFUSED:
            return f"the queue {self.place.name} {REFUSED}"
        return f"the queue {self.place.name} does not answer" + (
            f": {self.why}" if self.why else ""
        )

    def batches(self) -> list[Batch]:
        """The batches with messages to send or under way."""
        entries = [*self._back, *self._todo, *self.sent.values()]
        return list({id(batch): batch for batch, _, _ in entries}.values())

    def add(self, batch: Batch, items: Sequence[Outgoing]) -> None:
        self._todo += [(batch, item, False) for item in items]

    def drop(self, batch: Batch) -> None:
        """Send no more messages of a batch."""
        self._todo = deque(entry for entry in self._todo if entry[0] is not batch)
        self._back = [entry for entry in self._back if entry[0] is not batch]

    def pump(self, *, begin: bool = False) -> None:
        """Open the channel, or send as many messages as may be under way."""
        connection = self._publisher.connection
        if self._pausing or connection is None or not connection.is_open:
            return
        if self._channel is None:
            if (begin or self._todo) and self._publisher.may_open(self):
                self._ready = False
                self._next, self._opened_at = 1, time.monotonic()
                self._channel = connection.channel(on_open_callback=self._opened)
                self._channel.add_on_close_callback(self._closed)
        elif self._back:
            if not self.sent:
                self._replace()
        elif self._ready and self._publisher.may_send:
            count = min(len(self._todo), self._size - len(self.sent))
            if count > 0:
                self._send([self._todo.popleft() for _ in range(count)])

    def lost(self) -> None:
        """Begin again: the connection is gone, and so is the fate of the messages under way."""
        self._channel = None
        self._pausing = False
        self._size = FIRST
        self._take_back()

    def leave(self) -> None:
        """Close the channel of an idle place."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.close()

    def _take_back(self) -> None:
        """Put the messages without an answer, and those that came back, before all others."""
        sent = [(batch, item, True) for batch, item, _ in self.sent.values()]
        entries = [entry for entry in [*sent, *self._back] if not entry[0].is_over]
        self._todo.extendleft(reversed(entries))
        self.sent, self._back = {}, []
        self._returned.clear()

    def try_anew(self) -> None:
        """Replace a channel without an answer for long: its queue may have lost its log."""
        quiet = time.monotonic() - max(self.answered, self._opened_at)
        if self.sent and quiet > _SILENT and self._publisher.may_send:
            self._replace()

    def _replace(self) -> None:
        """Give up a channel whose messages came back, or get no answer."""
        self.leave()
        self._take_back()
        if self.why:
            self._wait()
        else:
            self.pump()

    def _wait(self) -> None:
        """Send nothing for a while, longer each time until the place takes a message."""
        self._pause = min(max(2 * self._pause, _AGAIN), _AGAIN_MOST)
        if _STARTING in self.why:
            self._pause = _AGAIN
        self._pausing = True
        self._publisher.thread.later(self._pause, self._go_on)

    def _go_on(self) -> None:
        self._pausing = False
        self.pump()

    def _send(self, some: Sequence[Entry]) -> None:
        for batch, _, again in some:
            batch.unsure += not again
        channel, connection = self._channel, self._publisher.connection
        assert channel is not None
        self.sent.update(zip(range(self._next, self._next + len(some)), some, strict=True))
        self._next += len(some)
        quick, name = cast(Connection, connection), self.place.name
        if quick.is_quick:
            number, most = channel.channel_number, quick.body_most
            frames = [publication(number, name, e.properties, e.body, most) for _, e, _ in some]
            quick.write(b"".join(frames), 3 * len(frames))
        else:
            for _, e, _ in some:
                channel.basic_publish("", name, e.body, decoded(e.properties), mandatory=True)
        self._publisher.check.watch()

    # -- called by the channel ------------------------------------------------------------------

    def _opened(self, channel: Channel) -> None:
        if channel is not self._channel:
            channel.close()
            return
        channel.add_on_return_callback(self._on_return)
        heard = functools.partial(self._confirmed, channel)
        cast(Connection, channel.connection).hear(channel, read_confirms, heard)
        channel.confirm_delivery(functools.partial(self._on_confirm, channel), callback=_ignore)
        channel.queue_declare(
            self.place.name,
            durable=True,
            arguments=self.place.arguments,
            callback=functools.partial(self._declared, channel),
        )

    def _declared(self, channel: Channel, _: Any) -> None:
        def ready() -> None:
            if channel is self._channel:
                self._ready = True
                self.pump()

        if self.place.listed:  # workers serve the queue only after a notice
            self._publisher.send([self._publisher.notice(self.place)], ready)
        else:
            ready()

    def _closed(self, channel: Channel, reason: Any) -> None:
        """The server closed the channel. The connection may be well."""
        if channel is not self._channel or not channel.connection.is_open:
            return  # if the connection has ended, it reports this itself
        why = with_grant(
            str(getattr(reason, "reply_text", reason)), self._publisher.thread.settings
        )
        self._channel = None
        if self._ready:
            log.error("rabbitmq closed the channel that publishes messages: %s", why)
            for batch in {id(batch): batch for batch, _, _ in self.sent.values()}.values():
                batch.tries += 1
                if batch.tries >= _TRIES and batch.then is None:
                    self._publisher.give_up(batch, f"{self._publisher.where}: {why}")
        else:
            if not self.why:
                log.error("the queue %s cannot be used now: %s", self.place.name, why)
            if why.startswith(_NEVER_MADE):
                text = f"{self._publisher.where}: {self.place.name} cannot be made: {why}"
                for batch in [one for one in self.batches() if one.then is None]:
                    self._publisher.give_up(batch, text)
        self.why = why
        self._take_back()
        self._wait()

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        """Remember that a message was returned. The server confirms this message right after."""
        returned = (encoded(properties), body)
        for tag, (_, item, _) in self.sent.items():
            if (item.properties, item.body) == returned and tag not in self._returned:
                self._returned.add(tag)
                break

    def _on_confirm(self, channel: Channel, frame: Any) -> None:
        """A confirm that came in pieces."""
        m = frame.method
        self._confirmed(channel, [(m.delivery_tag, m.multiple, isinstance(m, Basic.Ack))])

    def _confirmed(self, channel: Channel, confirms: Sequence[Confirm]) -> None:
        if channel is not self._channel:
            return
        for last, multiple, stored in confirms:
            tags = [last]
            if multiple:
                # The lambda is used at once, so that it sees the right ``last``.
                tags = list(itertools.takewhile(lambda tag: tag <= last, self.sent))  # noqa: B023
            for tag in tags:
                entry = self.sent.pop(tag, None)
                if entry is not None:
                    self._answered(tag, entry[0], entry[1], stored=stored)
        self._publisher.check.heard()
        self.pump()
        self._publisher.look()

    def _answered(self, tag: int, batch: Batch, item: Outgoing, *, stored: bool) -> None:
        batch.unsure -= 1
        if tag in self._returned:
            self._returned.discard(tag)
            if not self._back:
                log.warning("the queue %s was gone; it is made again", self.place.name)
            self.answered = time.monotonic()
            self._back.append((batch, item, False))
        elif stored:
            self.answered = time.monotonic()
            self._size += self._size < MOST
            self.why, self._pause = "", 0.0
            batch.stored += 1
            if batch.stored == len(batch.items):
                batch.end()
        else:  # the queue is full, or has no majority
            if not self.why and batch.then is not None:
                log.error(
                    "the queue %s %s; sending it again until stored", self.place.name, REFUSED
                )
            self.why = REFUSED
            self._back.append((batch, item, False))


_REVIEW, _UNSURE = 0.25, 0.5
"""The most seconds between two checks of a put's patience; and the seconds that a refused put waits
for missing answers after its patience."""

_CHANNELS = 500  # the most that are open at a time; the server allows 2,047 for a connection


class Publisher(ConnectionListener):
    """Publishes over one connection."""

    # ``failed`` is the place of the failed jobs, which other places need. ``notice`` makes the
    # message that tells workers of a listed place (``Place.listed``).

    def __init__(
        self, thread: ConnectionThread, failed: Place, notice: Callable[[Place], Outgoing]
    ) -> None:
        self.thread = thread
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
        if not self.thread.is_up:
            self.thread.await_up(max(0.0, batch.began + patience - time.monotonic()))
        self._submit(batch)
        wait = batch.began + patience - time.monotonic()
        while not batch.done.wait(max(wait, 0.01)):
            self.thread.do(functools.partial(self._review, batch, patience))
            wait = min(patience / 4, _REVIEW)
        if batch.trouble is not None:
            raise batch.trouble

    def send(self, items: Sequence[Outgoing], then: Callable[[], None]) -> None:
        """Send; the connection thread calls ``then`` when the server has them, however late."""
        self._submit(Batch(items, then, time.monotonic()))

    def flush(self, patience: float) -> bool:
        """Sleep until all earlier messages are confirmed; False when that takes longer."""
        quiet = Event()
        if not self.thread.is_up:
            return False

        def listen() -> None:
            self._take_in()
            self._listeners.append(quiet)
            self.look()

        self.thread.do(listen)
        return quiet.wait(patience)

    def close(self) -> None:
        """End all batches: nobody waits any longer."""

        def leave() -> None:
            self._closed = True
            self._take_in()
            for batch in [batch for place in self._places.values() for batch in place.batches()]:
                self.give_up(batch)

        self.thread.do(leave)

    def _submit(self, batch: Batch) -> None:
        if not batch.items:
            batch.end()
            return
        with self._lock:
            self._new.append(batch)
            if self._called:
                return
            self._called = True
            self.thread.do(self._take_in)

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
        return not self.thread.blocked and self.thread.is_up

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
        if self.thread.blocked:
            return f"{self.where} lets nobody publish: {self.thread.blocked}", StoreFull
        if not self.may_send:
            return self.thread.trouble, BrokerUnavailable
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


def _ignore(_: Any) -> None:
    pass
