"""The channel of one owner: what the server pushes over it, and what is acknowledged on it.

All of it runs in the line's thread, but for ``ack`` and ``nack``, which anybody may call. A tag
belongs to the channel it came by: ``era`` tells channels apart, and a tag of another era is the
server's again already.
"""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import pika
from pika.channel import Channel
from pika.spec import Basic

from tidemill.brokers.rabbitmq.declaring import SILENT, Declarer
from tidemill.brokers.rabbitmq.line import Line
from tidemill.brokers.rabbitmq.shelf import Shelf
from tidemill.clock import machine_time

__all__ = ["Message", "Tap"]

log = logging.getLogger("tidemill.rabbitmq")

_TRY_AGAIN = 5.0
"""Seconds until what the server refused to make is tried again."""

_BEGINS, _TRY_LATER = 10.0, 300.0
"""Seconds a consumer has to begin; and until a queue that did not answer is asked again."""

_FEW, _STRAGGLE = 64, 0.02
"""With more messages than so many in hand one is not acknowledged by itself before that many
seconds, within which those before it are likely to be done: then one frame does for all."""

_ENDING = -1
"""The credit of a consumer that is to end."""

_MADE_AGAIN = 0.5
"""Seconds until a queue that went away is made again."""


class Message(Protocol):
    """Told of what comes, in the line's thread."""

    def __call__(
        self, shelf: Shelf, tag: int, properties: Any, body: bytes, *, redelivered: bool
    ) -> None: ...


class Tap:
    """A channel, made anew whenever it is lost."""

    def __init__(
        self,
        line: Line,
        declarer: Declarer,
        name: str,
        came: Message,
        lost: Callable[[], None],
        shelves: Callable[[], Sequence[Shelf]],
    ) -> None:
        self._line = line
        self._declarer = declarer
        self._name = name
        self._came = came
        self._lost = lost
        self._shelves = shelves
        self._channel: Channel | None = None
        self._open: OrderedDict[int, None] = OrderedDict()  # tags in hand, as they came
        self._done: set[int] = set()  # to be acknowledged with those before them
        self._stragglers: set[int] = set()  # of these: those that have waited for a while
        self._asked: deque[tuple[Shelf, Callable[[Any], None]]] = deque()  # the first is under way
        self._unmade: set[str] = set()  # places that are being made, or cannot be
        self._silent: set[str] = set()  # places that let whoever asks for them wait
        self._syncing: list[Callable[[bool], None]] = []
        self._opened_at = 0.0
        self._adjusting = self._closed = False
        self._lock = threading.Lock()
        self._acks: list[int] = []
        self._nacks: list[int] = []
        self._flushing = False
        self.era = 0
        line.add(self)

    # -- from any thread ------------------------------------------------------------------------

    def ack(self, tag: int, era: int) -> None:
        """The message is done with."""
        self._answer(self._acks, tag, era)

    def nack(self, tag: int, era: int) -> None:
        """The message is for somebody else."""
        self._answer(self._nacks, tag, era)

    def _answer(self, answers: list[int], tag: int, era: int) -> None:
        with self._lock:
            if era != self.era:
                return
            answers.append(tag)
            if self._flushing:
                return
            self._flushing = True
        self._line.do(self._flush)

    def adjust(self) -> None:
        """Have the consumers that the shelves' credit says, soon."""
        with self._lock:
            if self._adjusting:
                return
            self._adjusting = True
        self._line.do(self._adjust)

    def get(self, shelf: Shelf, then: Callable[[Any], None]) -> None:
        """Ask for one message of a place; ``then`` gets (tag, redelivered, properties, body)."""
        self._line.do(lambda: self._ask(shelf, then))

    def sync(self, patience: float) -> bool:
        """Sleep until the server has all that was acknowledged before; False: nobody knows."""
        answered, found = threading.Event(), list[bool]()

        def heard(here: bool) -> None:
            found.append(here)
            answered.set()

        self._line.do(lambda: self._sync(heard))
        return answered.wait(patience) and found[0]

    def close(self, patience: float) -> None:
        """Leave; what is not acknowledged goes back."""
        left = threading.Event()

        def leave() -> None:
            self._closed = True
            self._flush()
            if self._channel is not None and self._channel.is_open:
                self._ack_singly(self._done)
            channel = self._channel
            if channel is not None and channel.is_open:
                channel.add_on_close_callback(lambda *_: left.set())
                channel.close()
            else:
                left.set()

        self._line.do(leave)
        left.wait(patience)
        self._line.remove(self)

    # -- of the line ----------------------------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        if not self._closed:
            connection.channel(on_open_callback=self._channel_opened)

    def unblocked(self) -> None:
        """Nothing waits for that here."""

    def lost(self, why: str) -> None:
        """All in hand is the server's again."""
        with self._lock:
            self.era += 1
            self._acks.clear()
            self._nacks.clear()
            self._flushing = self._adjusting = False
        self._channel = None
        self._open.clear()
        self._done.clear()
        self._stragglers.clear()
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
        channel.add_on_cancel_callback(self._cancelled)
        channel.add_callback(self._on_empty, [Basic.GetEmpty], one_shot=False)
        self._channel, self._opened_at = channel, machine_time()
        self._adjust()
        if self._asked:
            self._get(self._asked[0][0])

    def _channel_closed(self, channel: Channel, reason: Any) -> None:
        """The server is angry with us; or we left."""
        if channel is not self._channel or self._closed or not channel.connection.is_open:
            return
        log.error("rabbitmq took back what we hold: %s", getattr(reason, "reply_text", reason))
        self.lost("")
        self._declarer.forget_all()  # a queue may have gone
        soon = machine_time() - self._opened_at > _MADE_AGAIN
        self._line.later(0.0 if soon else _MADE_AGAIN, functools.partial(self._reopen, channel))

    def _reopen(self, old: Channel) -> None:
        connection = old.connection
        if self._channel is None and connection.is_open and not self._closed:
            connection.channel(on_open_callback=self._channel_opened)

    def _cancelled(self, frame: Any) -> None:
        """The server ended a consumer: its queue was deleted, or has no leader."""
        for shelf in self._shelves():
            if shelf.consumer[0] == frame.method.consumer_tag:
                log.warning("the queue %s went away; it is made again", shelf.place.name)
                shelf.consumer = ("", 0)
        self._declarer.forget_all()
        self._line.later(_MADE_AGAIN, self._adjust)

    # -- consuming ------------------------------------------------------------------------------

    def _adjust(self) -> None:
        with self._lock:
            self._adjusting = False
        if self._channel is None or not self._channel.is_open or self._closed:
            return
        for shelf in self._shelves():
            if shelf.place.name in self._silent:
                continue
            if not shelf.credit or self._declarer.knows(shelf.place):
                self._consume(self._channel, shelf)
            elif shelf.place.name not in self._unmade:
                self._unmade.add(shelf.place.name)
                declared = functools.partial(self._declared, shelf.place.name)
                self._declarer.declare([shelf.place], declared)

    def _declared(self, name: str, why: str) -> None:
        if why and self._line.is_up:  # one that cannot be made holds up no other
            log.error("the queue %s cannot be made: %s", name, why)
            if why == SILENT:
                self._leave_alone(name)
            self._line.later(_TRY_AGAIN, functools.partial(self._declared, name, ""))
        else:
            self._unmade.discard(name)
            self._adjust()

    def _leave_alone(self, name: str) -> None:
        """A queue that has lost its log answers nobody, and holds up whoever asks: not so soon."""

        def try_again() -> None:
            self._silent.discard(name)
            self._adjust()

        if name not in self._silent:
            self._silent.add(name)
            self._line.later(_TRY_LATER, try_again)

    def _consume(self, channel: Channel, shelf: Shelf) -> None:
        """A consumer's credit cannot be changed: another takes its place.

        That begins when the first has ended. What was on its way to it goes back to the front of
        the queue, and would otherwise stand behind what the second had got meanwhile.
        """
        tag, credit = shelf.consumer
        if credit == shelf.credit or credit == _ENDING:
            return
        if tag:
            shelf.consumer = (tag, _ENDING)
            channel.basic_cancel(tag, lambda _: self._ended(channel, shelf, tag))
            cast("Any", channel)._cancelled.discard(
                tag
            )  # else pika itself rejects what still comes
            return
        new = f"{self._name[:200]}/{uuid.uuid4().hex[:12]}"
        channel.basic_qos(prefetch_count=shelf.credit)
        came = functools.partial(self._on_message, shelf)
        begun = list[Any]()
        channel.basic_consume(shelf.place.name, came, consumer_tag=new, callback=begun.append)
        shelf.consumer = (new, shelf.credit)
        self._line.later(_BEGINS, lambda: None if begun else self._give_up(channel, shelf))

    def _give_up(self, channel: Channel, shelf: Shelf) -> None:
        """A consumer has not begun: the channel waits for it, with all that is behind."""
        name = shelf.place.name
        if channel is not self._channel or self._closed or not channel.is_open:
            return
        log.error("the queue %s does not answer; it is tried again in %g s", name, _TRY_LATER)
        self._leave_alone(name)
        self.lost("")
        channel.close()
        self._reopen(channel)

    def _ended(self, channel: Channel, shelf: Shelf, tag: str) -> None:
        if channel is self._channel and shelf.consumer == (tag, _ENDING):
            shelf.consumer, shelf.back = ("", 0), machine_time()
            self._adjust()

    def _on_message(self, shelf: Shelf, _: Any, method: Any, properties: Any, body: bytes) -> None:
        tag = method.delivery_tag
        self._open[tag] = None
        self._came(shelf, tag, properties, body, redelivered=method.redelivered)

    # -- asking for one -------------------------------------------------------------------------

    def _ask(self, shelf: Shelf, then: Callable[[Any], None]) -> None:
        """One after the other: a channel can ask for no more at a time."""
        self._asked.append((shelf, then))
        if len(self._asked) == 1:
            self._get(shelf)

    def _get(self, shelf: Shelf) -> None:
        channel = self._channel
        if channel is None and self._line.is_up and not self._closed:
            return  # it is just being opened, and goes on then
        if channel is None or not channel.is_open:
            self._got(None)
        elif self._declarer.knows(shelf.place):
            self._flush()  # what went back before this may be what is asked for
            channel.basic_get(shelf.place.name, self._on_got)
        else:

            def declared(why: str) -> None:
                if channel is self._channel:  # else the loss of the line has answered
                    self._got(None) if why else self._get(shelf)

            self._declarer.declare([shelf.place], declared)

    def _got(self, found: Any) -> None:
        _, then = self._asked.popleft()
        then(found)
        if self._asked:
            self._get(self._asked[0][0])

    def _on_got(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        self._open[method.delivery_tag] = None
        self._got((method.delivery_tag, method.redelivered, properties, body))

    def _on_empty(self, _: Any) -> None:
        self._got(None)

    def _sync(self, heard: Callable[[bool], None]) -> None:
        self._flush()
        if self._channel is not None and self._channel.is_open:
            self._ack_singly(self._done)
        self.round_trip(heard)

    def round_trip(self, heard: Callable[[bool], None]) -> None:
        """Tell, in the line's thread, when the server has what was said until now, and all that it
        had sent by now is here; False: the channel was lost meanwhile."""
        channel = self._channel
        if channel is None or not channel.is_open:
            heard(False)
            return
        self._syncing.append(heard)
        channel.basic_qos(prefetch_count=1, callback=lambda _: self._syncing.pop(0)(True))

    # -- answering ------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Acknowledge: all up to the first that is still open at once."""
        with self._lock:
            self._flushing = False
            acks, nacks = self._acks[:], self._nacks[:]
            self._acks.clear()
            self._nacks.clear()
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        for tag in nacks:
            if self._open.pop(tag, 0) is None:
                channel.basic_nack(tag, requeue=True)
        self._done.update(tag for tag in acks if self._open.pop(tag, 0) is None)
        if not self._done:
            return
        first_open = next(iter(self._open), max(self._done) + 1)
        together = [tag for tag in self._done if tag < first_open]
        if together:
            channel.basic_ack(max(together), multiple=True)
            self._done.difference_update(together)
        if len(self._open) <= _FEW:
            self._ack_singly(self._done)
        elif self._done and not self._stragglers:
            self._stragglers = set(self._done)
            self._line.later(_STRAGGLE, self._ack_stragglers)

    def _ack_stragglers(self) -> None:
        """What waited for those before it has waited long enough."""
        stragglers, self._stragglers = self._stragglers & self._done, set()
        if self._channel is not None and self._channel.is_open:
            self._ack_singly(stragglers)
            self._flush()

    def _ack_singly(self, tags: set[int]) -> None:
        assert self._channel is not None
        for tag in sorted(tags):
            self._channel.basic_ack(tag)
        self._done -= tags
