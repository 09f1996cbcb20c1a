"""The channel of one owner, for pushed messages and for acknowledgements.

All methods run in the connection thread, except those in the section "from any thread". A tag
belongs to its channel, and each channel has a number, the ``era``. When a channel is lost, the
server takes back the messages of that era.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pika
from pika.channel import Channel
from pika.spec import Basic

from tidemill.brokers.rabbitmq.amqp.connection import (
    Connection,
    Delivery,
    Properties,
    part,
    read_deliveries,
)
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionListener, ConnectionThread
from tidemill.brokers.rabbitmq.amqp.topology import SILENT, Declarer
from tidemill.brokers.rabbitmq.errors import with_grant
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.queue_state import Consumer, QueueState, Stage, in_hand, plan
from tidemill.core.locks import Event, Lock

_FEW, _STRAGGLE = 64, 0.02
"""With more than ``_FEW`` messages in hand, single acknowledgements wait ``_STRAGGLE`` seconds at
most. In this time earlier jobs probably end, and then one frame acknowledges all their messages."""


class Acknowledgements:
    """The messages in hand: messages of the current channel whose jobs have not ended."""

    # All methods run in the connection thread.

    def __init__(self, thread: ConnectionThread) -> None:
        self._thread = thread
        self._channel: Channel | None = None
        # The tags in hand in the order of arrival, each with its consumer.
        self.open: OrderedDict[int, Consumer] = OrderedDict()
        # Tags that wait to be acknowledged together with earlier tags.
        self._done: set[int] = set()
        self._timing = False  # True while the timer runs

    def begin_anew(self, channel: Channel | None) -> None:
        """Begin on a new channel: the server has taken back the messages in hand."""
        self._channel = channel
        self.open.clear()
        self._done.clear()

    def came(self, tag: int, consumer: Consumer) -> None:
        """Count a message that came."""
        self.open[tag] = consumer
        consumer.in_hand += 1

    def count(self, tags: Sequence[int]) -> tuple[list[int], bool]:
        """Take tags out of hand. Return the tags that were in hand."""
        # The second value is True when one of these messages came from a consumer that ends.
        left, fallen = list[int](), False
        for tag in tags:
            consumer = self.open.pop(tag, None)
            if consumer is not None:
                left.append(tag)
                consumer.in_hand -= 1
                fallen = fallen or consumer.stage is not Stage.BEGUN
        return left, fallen

    def acknowledge(self, tags: Sequence[int]) -> None:
        """Acknowledge counted tags. One frame covers all tags before the first open tag."""
        self._done.update(tags)
        if not self._done or self._channel is None:
            return
        first_open = next(iter(self.open), max(self._done) + 1)
        together = [tag for tag in self._done if tag < first_open]
        if together:
            self._channel.basic_ack(max(together), multiple=True)
            self._done.difference_update(together)
        if len(self.open) <= _FEW:
            self.acknowledge_all()
        elif self._done and not self._timing:
            self._timing = True
            self._thread.later(_STRAGGLE, self._ring)

    def _ring(self) -> None:
        self._timing = False
        self.acknowledge_all()

    def acknowledge_all(self) -> None:
        """Acknowledge at once all tags that wait for earlier tags."""
        if self._channel is not None and self._channel.is_open:
            for tag in sorted(self._done):
                self._channel.basic_ack(tag)
            self._done.clear()


log = logging.getLogger("tidemill.rabbitmq")

_PAUSE, _PAUSE_MOST = 5.0, 300.0
"""Seconds until a queue that cannot be made is tried again; a silent queue waits longer each time,
up to the second number."""

BEGINS_WITHIN = 10.0  # seconds within which a consumer must begin
_MADE_AGAIN = 0.5  # seconds until a deleted queue is made, or a closed channel opened, again


Arrival = tuple[QueueState, int, bool, Properties, bytes, bool]
"""A message that came: its place, its tag, whether it was handed out before, its properties, its
body, and whether there is credit for it."""


class ConsumerChannel(ConnectionListener):
    """A channel, opened again whenever it is lost."""

    def __init__(
        self,
        thread: ConnectionThread,
        declarer: Declarer,
        name: str,
        came: Callable[[Sequence[Arrival]], None],
        lost: Callable[[], None],
        states: Callable[[], Sequence[QueueState]],
    ) -> None:
        self._thread = thread
        self._declarer = declarer
        self._name = name
        self._came = came  # the connection thread calls this
        self._lost = lost
        self._states = states
        self._channel: Channel | None = None
        self._acknowledgements = Acknowledgements(thread)
        self._asked: deque[tuple[QueueState, Callable[[Any], None]]] = (
            deque()
        )  # the first question is under way
        self._unmade: set[str] = set()  # places that are being made, cannot be made, or are silent
        self._pauses: dict[str, float] = {}  # seconds before the next try of a silent place
        self._whose: dict[bytes, tuple[QueueState, Consumer]] = {}  # by the tag of the consumer
        self._syncing: list[Callable[[bool], None]] = []
        self._closed = False
        self._lock = Lock()
        self._acks: list[int] = []
        self._nacks: list[int] = []
        self._adjusting = False  # True when the credit has changed
        self._called = False  # True when the thread was asked to flush
        self._together = False  # True while a block of :meth:`together` runs
        self.era = 0
        thread.add(self)

    # -- from any thread ------------------------------------------------------------------------

    def ack(self, tag: int, era: int) -> None:
        self._answer(self._acks, tag, era)

    def nack(self, tag: int, era: int) -> None:
        """Return a message; the server gives it to another consumer."""
        self._answer(self._nacks, tag, era)

    def _answer(self, answers: list[int], tag: int, era: int) -> None:
        with self._lock:
            if era == self.era:
                answers.append(tag)
                self._call()

    def adjust(self) -> None:
        """Soon adjust the consumers to the credit of the queues."""
        with self._lock:
            self._adjusting = True
            self._call()

    def _call(self) -> None:
        if not (self._called or self._together):
            self._called = True
            self._thread.do(self._flush)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send the answers and adjustments of this block together; consumers end first."""
        # If answers went first, the server would send new messages in place of the acknowledged
        # ones, and send returned messages to this channel again.
        with self._lock:
            self._together = True
        try:
            yield
        finally:
            with self._lock:
                self._together = False
                if self._acks or self._nacks or self._adjusting:
                    self._call()

    def get(self, state: QueueState, then: Callable[[Any], None]) -> None:
        """Ask for one message of a place; call ``then(tag, redelivered, properties, body)``."""
        self._thread.do(lambda: self._ask(state, then))

    def sync(self, patience: float) -> bool:
        """Sleep until the server has all earlier acknowledgements; False if that is unknown."""
        answered, found = Event(), list[bool]()

        def heard(here: bool) -> None:
            found.append(here)
            answered.set()

        self._thread.do(lambda: self._sync(heard))
        return answered.wait(patience) and found[0]

    def silence(self) -> str:
        """The sentence for a server that does not answer."""
        return self._thread.silence()

    def close(self, patience: float) -> None:
        """Close the channel. Messages without an acknowledgement go back."""
        left = Event()

        def leave() -> None:
            self._closed = True
            self._flush()
            self._acknowledgements.acknowledge_all()
            channel = self._channel
            if channel is not None and channel.is_open:
                channel.add_on_close_callback(lambda *_: left.set())
                channel.close()
            else:
                left.set()

        self._thread.do(leave)
        left.wait(patience)
        self._thread.remove(self)

    # -- called by the connection thread --------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        if not self._closed:
            connection.channel(on_open_callback=self._channel_opened)

    def lost(self) -> None:
        """Begin a new era (number of a channel): the server has taken back all messages in hand."""
        with self._lock:
            self.era += 1
            self._acks.clear()
            self._nacks.clear()
            self._called = self._adjusting = False
        self._channel = None
        self._acknowledgements.begin_anew(None)
        self._whose.clear()
        self._unmade.clear()
        asked, self._asked = self._asked, deque()
        for _, then in asked:
            then(None)
        syncing, self._syncing = self._syncing, []
        for heard in syncing:
            heard(False)
        self._lost()

    def _channel_opened(self, channel: Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        heard = functools.partial(self._while_on, channel)
        channel.add_on_cancel_callback(heard(self._cancelled))
        channel.add_callback(heard(self._on_empty), [Basic.GetEmpty], one_shot=False)
        # pika would call a callback for one consumer at the first answer for any consumer.
        channel.add_callback(heard(self._begun), [Basic.ConsumeOk], one_shot=False)
        channel.add_callback(heard(self._ended), [Basic.CancelOk], one_shot=False)
        cast(Connection, channel.connection).hear(channel, read_deliveries, self._delivered)
        self._channel = channel
        self._acknowledgements.begin_anew(channel)
        self._adjust()
        if self._asked:
            self._get(self._asked[0][0])

    def _while_on(self, channel: Channel, heard: Callable[..., None]) -> Callable[..., None]:
        """Ignore the answers of an abandoned channel: callers now wait for another channel."""
        # An abandoned channel may wait for a silent queue. Its answers come when the queue answers.
        return lambda *said: heard(*said) if channel is self._channel else None

    def _channel_closed(self, channel: Channel, reason: Any) -> None:
        """The server closed the channel after an error, or this process closed it."""
        if channel is not self._channel or self._closed or not channel.connection.is_open:
            return
        why = with_grant(str(getattr(reason, "reply_text", reason)), self._thread.settings)
        log.error("rabbitmq took back our messages: %s", why)
        self.lost()
        self._declarer.forget_all()  # a queue may have gone
        self._thread.later(_MADE_AGAIN, functools.partial(self._reopen, channel))

    def _reopen(self, old: Channel) -> None:
        connection = old.connection
        if self._channel is None and connection.is_open and not self._closed:
            connection.channel(on_open_callback=self._channel_opened)

    def _cancelled(self, frame: Any) -> None:
        """The server ended a consumer, because its queue was deleted or has no leader."""
        for state, _ in self._consumers_of(frame):
            log.warning("the queue %s went away; it is made again", state.place.name)
            state.consumers = [state.got]  # the other consumers of the place end, too
        self._declarer.forget_all()
        self._thread.later(_MADE_AGAIN, self._adjust)

    # -- consuming ------------------------------------------------------------------------------

    def _adjust(self) -> None:
        if self._channel is None or not self._channel.is_open or self._closed:
            return
        for state in self._states():
            if state.place.name in self._unmade:
                continue
            if not state.credit or self._declarer.knows(state.place):
                self._fit(self._channel, state)
            else:
                self._unmade.add(state.place.name)
                self._declare(state.place, self._declared)

    def _declare(self, place: Place, declared: Callable[[Place, str], None]) -> None:
        """Declare a place; call ``declared`` in this thread, unless the channel is lost before."""
        then = functools.partial(self._hear, functools.partial(declared, place), self.era)
        was_silent = place.name in self._pauses
        self._declarer.declare(place, then, probe=True if was_silent else None)

    def _hear(self, heard: Callable[..., None], era: int, *said: str) -> None:
        self._thread.do(lambda: heard(*said) if era == self.era and not self._closed else None)

    def _declared(self, place: Place, why: str) -> None:
        if why:
            self._leave_alone(place, why)
        else:
            self._unmade.discard(place.name)
            self._adjust()

    def _leave_alone(self, place: Place, why: str) -> None:
        """Take nothing from a place for a while; other places go on."""
        name, pause = place.name, _PAUSE
        if why == SILENT:
            pause = self._pauses.get(name, _PAUSE)
            if name not in self._pauses:
                log.error("the queue %s does not answer; it is tried again in %g s", name, pause)
            self._pauses[name] = min(2 * pause, _PAUSE_MOST)
        else:
            why = with_grant(why, self._thread.settings)
            log.error("the queue %s cannot be made: %s", name, why)
        self._unmade.add(name)
        again = functools.partial(self._declare, place, self._declared)
        self._thread.later(pause, functools.partial(self._hear, again, self.era))

    def _fit(self, channel: Channel, state: QueueState) -> None:
        """Begin and end consumers, so that they bring as many messages as the credit."""
        state.forget()
        trim, state.trim = state.trim, False
        ends, begins = plan(state.consumers, state.credit, trim=trim)
        for consumer in ends:
            self._end(channel, consumer)
        if begins:
            self._begin(channel, state, begins)

    def _begin(self, channel: Channel, state: QueueState, prefetch: int) -> None:
        consumer = Consumer(f"{self._name[:200]}/{uuid.uuid4().hex[:12]}", prefetch)
        state.consumers.append(consumer)
        self._whose[consumer.tag.encode()] = state, consumer
        channel.basic_qos(prefetch_count=prefetch)
        channel.basic_consume(
            state.place.name, self._on_message, consumer_tag=consumer.tag, callback=_ignore
        )
        self._thread.later(
            BEGINS_WITHIN,
            lambda: None if consumer.known else self._give_up(channel, state, consumer),
        )

    def _end(self, channel: Channel, consumer: Consumer) -> None:
        """End a consumer before the next answers, which would make room for more messages."""
        # pika would send the cancel only after the answers to earlier requests, and
        # acknowledgements would come first. So this method sends the cancel itself, if this release
        # of pika can.
        consumer.stage = Stage.ENDING
        send = part(channel, "_send_method")
        if consumer.known and send is not None:
            send(Basic.Cancel(consumer_tag=consumer.tag))
        else:  # the consumer must begin first
            channel.basic_cancel(consumer.tag, _ignore)
            # Or pika would reject messages that still come; they would go back.
            if (cancelled := part(channel, "_cancelled")) is not None:
                cancelled.discard(consumer.tag)

    def _begun(self, frame: Any) -> None:
        for state, consumer in self._consumers_of(frame):
            consumer.known, state.begun = True, time.monotonic()
            self._pauses.pop(state.place.name, None)

    def _ended(self, frame: Any) -> None:
        for state, consumer in self._consumers_of(frame):
            consumer.stage, state.back = Stage.ENDED, time.monotonic()
            if (forget := part(self._channel, "_cleanup_consumer_ref")) is not None:
                forget(consumer.tag)
            self._whose.pop(consumer.tag.encode(), None)
        self._adjust()

    def _consumers_of(self, frame: Any) -> list[tuple[QueueState, Consumer]]:
        """The place and consumer that a frame names."""
        tag = frame.method.consumer_tag
        return [(s, one) for s in self._states() for one in s.consumers if one.tag == tag]

    def _give_up(self, channel: Channel, state: QueueState, consumer: Consumer) -> None:
        """Reopen the channel, since a consumer that does not begin delays all later requests."""
        if self._closed or not channel.is_open or consumer not in state.consumers:
            return
        self.lost()
        self._leave_alone(state.place, SILENT)
        channel.close()
        self._reopen(channel)

    def _on_message(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        """A message that came in pieces."""
        consumer = method.consumer_tag.encode()
        self._delivered([(consumer, method.delivery_tag, method.redelivered, properties, body)])

    def _delivered(self, deliveries: Sequence[Delivery]) -> None:
        arrivals: list[Arrival] = []
        for name, tag, redelivered, properties, body in deliveries:
            whose = self._whose.get(name)
            if whose is None:  # the channel was abandoned: the server has the message again
                continue
            state, consumer = whose
            self._acknowledgements.came(tag, consumer)
            wanted = bool(state.credit)
            if consumer.stage is not Stage.BEGUN:
                wanted = wanted and in_hand(state.consumers) <= state.credit
            arrivals.append((state, tag, redelivered, properties, body, wanted))
        self._came(arrivals)

    # -- basic.get ------------------------------------------------------------------------------

    def _ask(self, state: QueueState, then: Callable[[Any], None]) -> None:
        """Queue a question. A channel can ask for only one message at a time."""
        self._asked.append((state, then))
        if len(self._asked) == 1:
            self._get(state)

    def _get(self, state: QueueState) -> None:
        channel = self._channel
        if channel is None and self._thread.is_up and not self._closed:
            return  # the question follows when the channel is open
        if channel is None or not channel.is_open:
            self._got(None)
        elif self._declarer.knows(state.place):
            self._flush()  # first send returns: a returned message may be the answer
            channel.basic_get(state.place.name, self._while_on(channel, self._on_got))
        else:
            self._declare(state.place, lambda _, why: self._got(None) if why else self._get(state))

    def _got(self, found: Any) -> None:
        _, then = self._asked.popleft()
        then(found)
        if self._asked:
            self._get(self._asked[0][0])

    def _on_got(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        self._acknowledgements.came(method.delivery_tag, self._asked[0][0].got)
        self._got((method.delivery_tag, method.redelivered, properties, body))

    def _on_empty(self, _: Any) -> None:
        self._got(None)

    def _sync(self, heard: Callable[[bool], None]) -> None:
        self._flush()
        self._acknowledgements.acknowledge_all()
        self.round_trip(heard)

    def round_trip(self, heard: Callable[[bool], None]) -> None:
        """Call ``heard`` in the connection thread after one round trip to the server."""
        # ``heard`` gets True when the server has all earlier requests and its earlier messages have
        # arrived, and False when the channel was lost.
        channel = self._channel
        if channel is None or not channel.is_open:
            heard(False)
            return
        self._syncing.append(heard)
        answered = self._while_on(channel, lambda _: self._syncing.pop(0)(True))
        channel.basic_qos(prefetch_count=1, callback=answered)

    # -- answering ------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Adjust the consumers, and then send the answers, which make room for more messages."""
        with self._lock:
            self._called = False
            if self._together:
                return
            acks, nacks, adjust = self._acks[:], self._nacks[:], self._adjusting
            self._acks.clear()
            self._nacks.clear()
            self._adjusting = False
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        nacks, fewer = self._acknowledgements.count(nacks)
        acks, fallen = self._acknowledgements.count(acks)
        if adjust or fewer or fallen:
            self._adjust()
        for tag in nacks:
            channel.basic_nack(tag, requeue=True)
        self._acknowledgements.acknowledge(acks)


def _ignore(_: Any) -> None:
    pass
