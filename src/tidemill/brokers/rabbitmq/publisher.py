"""Publishing with confirms: batches from any thread, one channel, one window.

A batch is done when the server has confirmed all of it. What was sent and not confirmed when a line
breaks is sent again over the next: it may then be there twice, and never not at all. What no queue
took (it was deleted under us) comes back, the queue is made again, and it is sent again.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pika
from pika.channel import Channel
from pika.spec import Basic

from tidemill.brokers.rabbitmq.declaring import Declarer
from tidemill.brokers.rabbitmq.line import Line
from tidemill.brokers.rabbitmq.names import Place
from tidemill.errors import BrokerUnavailable, StoreFull

__all__ = ["Outgoing", "Publisher"]

log = logging.getLogger("tidemill.rabbitmq")

_WINDOW = 1000
"""Messages under way at most: enough to hide the server's disk, and little to send again."""


_STARTING, _AGAIN = "is down or inaccessible", 0.2
"""What a server says of its queues when it has just started, and seconds until we ask again."""

_TRIES = 3
"""So often a batch is sent when the server closes the channel: it may be another's fault."""


class Outgoing(msgspec.Struct):
    """A message to be sent: where to, and what has to be there for it."""

    exchange: str
    key: str
    properties: pika.BasicProperties
    body: bytes
    home: Place
    digits: tuple[int, ...] = ()


class _Batch:
    """Messages that are waited for together."""

    def __init__(self, items: Sequence[Outgoing], then: Callable[[str], None] | None) -> None:
        self.items = deque(items)
        self.left = len(items)
        self.begun = False
        self.tries = 0
        self.dropped = False
        self.trouble = ""
        self.done = threading.Event()
        self.then = then

    def end(self, trouble: str = "") -> None:
        """Tell who waits; once."""
        if not self.done.is_set():
            self.trouble = trouble
            self.done.set()
            if self.then is not None:
                self.then(trouble)


class Publisher:
    """Publishes over one line."""

    def __init__(self, line: Line, declarer: Declarer) -> None:
        self._line = line
        self._declarer = declarer
        self._channel: Channel | None = None
        self._todo: deque[_Batch] = deque()
        self._sent: dict[int, tuple[_Batch, Outgoing]] = {}  # by delivery tag, as sent
        self._returned: set[int] = set()  # tags that no queue took
        self._tags = itertools.count(1)
        self._declaring = False
        self._confirmed = 0  # messages, ever
        self._listeners: list[threading.Event] = []  # who wants to know that nothing is under way
        self._lock = threading.Lock()
        self._called = False  # the thread was told that there is something to do

    # -- from any thread ------------------------------------------------------------------------

    def put(self, items: Sequence[Outgoing], patience: float) -> None:
        """Send, and sleep until the server has them, however many they are.

        Raises:
            StoreFull: the server lets nobody publish, and none of it was sent.
            BrokerUnavailable: it confirmed nothing for so many seconds; some of it may be there.
        """
        if not self._line.is_up:
            self._line.await_up(patience)
        batch = _Batch(items, None)
        self._submit(batch)
        seen = self._confirmed
        while not batch.done.wait(patience):
            if self._confirmed == seen:
                self._give_up(batch)
            seen = self._confirmed  # it works, on this or on what is before it
        if batch.trouble:
            raise BrokerUnavailable(f"rabbitmq at {self._line.settings.where}: {batch.trouble}")

    def send(self, items: Sequence[Outgoing], then: Callable[[str], None]) -> None:
        """Send; ``then`` is called in the line's thread when the server has them, however late."""
        self._submit(_Batch(items, then))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Have something done in the line's thread, which this is called in, after a while."""
        self._line.later(seconds, act)

    def flush(self, patience: float) -> bool:
        """Sleep until all that was sent before is confirmed; False when it takes longer."""
        quiet = threading.Event()
        if not self._line.is_up:
            return False

        def look() -> None:
            self._listeners.append(quiet)
            self._pump()

        self._line.do(look)
        return quiet.wait(patience)

    def _submit(self, batch: _Batch) -> None:
        with self._lock:
            self._todo.append(batch)
            if self._called:
                return
            self._called = True
        self._line.do(self._pump)

    def _give_up(self, batch: _Batch) -> None:
        with self._lock:
            batch.dropped = True
            begun = batch.begun
        blocked = self._line.blocked
        if blocked:
            reason = f"rabbitmq at {self._line.settings.where} lets nobody publish: {blocked}"
            if begun:
                raise BrokerUnavailable(f"{reason}; some of it may be stored later")
            raise StoreFull(f"{reason}; nothing was stored")
        raise BrokerUnavailable(
            f"{self._line.silence()}; what was put "
            + ("may be stored" if begun else "was not stored")
        )

    # -- of the line ----------------------------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        connection.channel(on_open_callback=self._channel_opened)

    def unblocked(self) -> None:
        """What waited for that goes out."""
        self._pump()

    def lost(self, why: str) -> None:
        """What was under way is to be sent again, before anything else and in its order."""
        self._channel = None
        self._declaring = False
        self._take_back()

    def _take_back(self) -> None:
        again: dict[int, tuple[_Batch, list[Outgoing]]] = {}
        for batch, item in self._sent.values():
            again.setdefault(id(batch), (batch, []))[1].append(item)
        self._sent, self._returned = {}, set()
        with self._lock:
            for batch, items in reversed(again.values()):
                batch.items.extendleft(reversed(items))
                if not any(batch is other for other in self._todo):
                    self._todo.appendleft(batch)

    def _channel_opened(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._ready(channel))

    def _ready(self, channel: Channel) -> None:
        self._tags = itertools.count(1)
        self._channel = channel
        self._pump()

    def _channel_closed(self, channel: Channel, reason: Any) -> None:
        """The server refused something we published; the line itself may be well."""
        if channel is not self._channel:
            return
        text = str(getattr(reason, "reply_text", reason))
        connection = channel.connection
        if not connection.is_open:
            return  # the line says so
        log.error("rabbitmq closed the channel of what we publish: %s", text)
        self._declarer.forget_all()  # somebody may have deleted what we publish to
        for batch in {id(batch): batch for batch, _ in self._sent.values()}.values():
            batch.tries += 1
            if batch.tries >= _TRIES:
                batch.dropped = True
                batch.end(text)
        self.lost(text)
        connection.channel(on_open_callback=self._channel_opened)

    # -- sending --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send as much as the window allows."""
        with self._lock:
            self._called = False
        while self._may_send() and not self._declaring and not self._line.blocked:
            batch = self._first()
            if batch is None or len(self._sent) >= _WINDOW:
                break
            item = batch.items[0]
            if not self._is_ready(item):
                self._prepare(batch, item)
            else:
                self._send_one(batch, batch.items.popleft())
        if self._listeners and not self._sent and self._first() is None:
            listeners, self._listeners = self._listeners, []
            for quiet in listeners:
                quiet.set()

    def _may_send(self) -> bool:
        channel = self._channel
        return channel is not None and channel.is_open and self._line.is_up

    def _first(self) -> _Batch | None:
        """The batch that is next, with something to send."""
        with self._lock:
            while self._todo:
                batch = self._todo[0]
                if batch.items and not batch.dropped:
                    batch.begun = True
                    return batch
                self._todo.popleft()
        return None

    def _send_one(self, batch: _Batch, item: Outgoing) -> None:
        assert self._channel is not None
        self._sent[next(self._tags)] = (batch, item)
        self._channel.basic_publish(
            item.exchange, item.key, item.body, item.properties, mandatory=True
        )

    def _is_ready(self, item: Outgoing) -> bool:
        declarer = self._declarer
        return declarer.knows(item.home) and (not item.digits or declarer.knows_waits(item.digits))

    def _prepare(self, batch: _Batch, item: Outgoing) -> None:
        """Make what an item needs, and go on."""
        self._declaring = True

        def waits(why: str) -> None:
            if why or not item.digits:
                done(why)
            else:
                self._declarer.declare_waits(item.digits, done)

        def done(why: str) -> None:
            if _STARTING in why and self._may_send():
                self._line.later(_AGAIN, functools.partial(done, ""))
                return
            self._declaring = False
            if why and self._may_send():  # not for want of a line
                batch.dropped = True
                batch.end(f"{item.home.name} cannot be made: {why}")
            self._pump()

        self._declarer.declare([item.home], waits)

    # -- hearing --------------------------------------------------------------------------------

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        """No queue took it: it is confirmed all the same, right after this."""
        returned = (method.exchange, method.routing_key, properties.correlation_id, body)
        for tag, (_, item) in self._sent.items():
            sent = (item.exchange, item.key, item.properties.correlation_id, item.body)
            if sent == returned and tag not in self._returned:
                self._returned.add(tag)
                break

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        tags = [method.delivery_tag]
        if method.multiple:
            tags = list(itertools.takewhile(lambda tag: tag <= method.delivery_tag, self._sent))
        accepted = isinstance(method, Basic.Ack)
        self._confirmed += len(tags)
        for tag in tags:
            batch, item = self._sent.pop(tag, (None, None))
            if batch is None or item is None:
                continue
            if tag in self._returned:
                self._returned.discard(tag)
                self._send_again(batch, item)
            elif accepted:
                batch.left -= 1
                if not batch.left:
                    batch.end()
            else:
                batch.dropped = True
                batch.end("it refused a message (a queue is full, or has no majority)")
        self._pump()

    def _send_again(self, batch: _Batch, item: Outgoing) -> None:
        log.warning("the queue %s was gone; it is made again", item.home.name)
        self._declarer.forget_all()
        batch.items.append(item)
        if batch.dropped:
            return
        with self._lock:
            if not any(batch is other for other in self._todo):
                self._todo.appendleft(batch)
