"""Publish with confirms: batches from any thread, over one connection, with a window per queue.

A batch is done when the server has confirmed all of it. After a connection breaks, only messages
that were sent and not confirmed are sent again. So a message may be stored twice, but never lost.
If a queue was deleted, its messages come back. Then the queue is made again, and its messages are
sent again. A place that cannot be made, or does not answer, delays only its own messages.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import pika

from tidemill.brokers.rabbitmq.amqp.confirm_channel import (
    Answer,
    ConfirmChannel,
    PublishOutcome,
    Sent,
)
from tidemill.brokers.rabbitmq.amqp.connection_check import DEAD, ConnectionCheck
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.destination_check import DestinationChecks
from tidemill.brokers.rabbitmq.amqp.publish_windows import (
    MOST,
    REFUSED,
    Batch,
    Outgoing,
    PublishWindow,
    PublishWindows,
    never_made,
)
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.destinations import Destinations
from tidemill.brokers.rabbitmq.errors import with_grant
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.core.errors import BrokerUnavailable, StoreFull, TidemillError
from tidemill.core.locks import Event, Lock

log = logging.getLogger("tidemill.rabbitmq")

_TURN = 64
"""Messages that one window sends before it is the turn of the next window."""

_REVIEW, _UNSURE = 0.25, 0.5
"""The most seconds between two checks of a put's patience; and the seconds that a refused put waits
for missing answers after its patience."""

_STUCK = 3.0
"""After this many seconds without an answer, messages under way do not count for ``MOST``."""

_TRIES, _REOPEN = 3, 0.5
"""Tries of a batch whose channel the server closes, maybe because of another batch; and seconds
until a new channel replaces a channel that the server closed at once."""


class Publisher:
    """Publishes over one connection."""

    def __init__(
        self, thread: ConnectionThread, declarer: Declarer, notice: Callable[[Place], Outgoing]
    ) -> None:
        self._thread = thread
        self._where = thread.settings.where
        self._readiness = Destinations(declarer, notice, self.send)
        self._check = ConnectionCheck(thread, self._owes)
        self._connection: pika.SelectConnection | None = None
        self._main: ConfirmChannel | None = None
        self._checks = DestinationChecks()
        self._windows = PublishWindows()
        self._stuck = 0  # messages under way that do not count for ``MOST``
        self._closed = self._pumping = False
        self._listeners: list[Event] = []  # set when no message is under way
        self._lock = Lock()
        self._new: deque[Batch] = deque()
        self._called = False  # True when the thread was asked to pump

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

        def look() -> None:
            self._listeners.append(quiet)
            self._pump()

        self._thread.do(look)
        return quiet.wait(patience)

    def close(self) -> None:
        """End all batches: nobody waits any longer."""

        def leave() -> None:
            self._closed = True
            batches = list(self._new)
            batches += [batch for window in self._windows for batch in window.batches()]
            sent = [entry for channel in self._channels() for entry in channel.sent.values()]
            batches += [batch for _, batch, _ in sent]
            for batch in batches:
                self._give_up(batch)

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
            self._thread.do(self._pump)

    # -- called by the connection thread --------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        self._connection = connection
        self._readiness.begin_anew()
        self._check.begin(connection)
        self._open_main()
        self._pump()  # makes and checks places

    def unblocked(self) -> None:
        self._pump()

    def lost(self, why: str) -> None:
        """Queue again the messages that were under way, before all others and in their order."""
        channels = self._channels()
        self._connection = self._main = None
        self._checks.forget()
        for channel in channels:
            self._take_back(channel)
        for window in self._windows:
            window.lose()
            self._windows.settle(window)

    def _open_main(self) -> None:
        connection = self._connection
        if self._main is None and connection is not None and connection.is_open:
            self._main = ConfirmChannel(connection, self)
            self._check.watch()

    def channel_opened(self, channel: ConfirmChannel) -> None:
        self._send_first(channel) if channel.destination else self._pump()

    def channel_closed(self, channel: ConfirmChannel, code: int, why: str) -> None:
        """The server refused a message and closed the channel. The connection may be well."""
        why = with_grant(why, self._thread.settings)
        log.error("rabbitmq closed the channel that publishes messages: %s", why)
        self._readiness.forget_all()  # somebody may have deleted our queues
        soon = not channel.sent
        for batch in {id(batch): batch for _, batch, _ in channel.sent.values()}.values():
            batch.tries += 1
            if batch.tries >= _TRIES and batch.then is None:
                self._give_up(batch, f"rabbitmq at {self._where}: {why}")
        self._drop_channel(channel, _REOPEN if soon or channel.destination else 0.0)

    def _drop_channel(self, channel: ConfirmChannel, pause: float) -> None:
        """Drop a channel. The messages under way over that channel are sent again."""
        windows = self._take_back(channel)
        if channel is self._main:
            self._main = None
            self._checks.proven.clear()
            self._thread.later(pause, self._open_main)
        else:
            for window in windows:
                self._halt(window, pause)
            self._end_check(channel)
        for window in windows:
            window.under_way = 0
            self._windows.settle(window)
        self._pump()

    def _take_back(self, channel: ConfirmChannel) -> list[PublishWindow]:
        windows: dict[str, PublishWindow] = {}
        refused: list[Batch] = []
        for window, batch, item in channel.take_back():
            windows[window.key] = window
            if not batch.is_over:
                window.back.append((batch, item, True))
            elif batch.refusal:
                refused.append(batch)
        for batch in refused:
            self._give_up(batch)
        return list(windows.values())

    # -- sending --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send as many messages as may be under way."""
        with self._lock:
            self._called = False
        if self._pumping:
            return  # the outer call of this method goes on
        self._pumping = True
        try:
            self._take_in()
            while self._may_send() and self._room() > 0 and (window := self._windows.next()):
                self._send_of(window)
        finally:
            self._pumping = False
        if self._listeners and not self._windows:
            listeners, self._listeners = self._listeners, []
            for quiet in listeners:
                quiet.set()

    def _send_of(self, window: PublishWindow) -> None:
        if not self._readiness.has(window):
            self._prepare(window)
        elif window.target in self._checks.proven:
            assert self._main is not None
            count = min(len(window.todo), window.size - window.under_way, self._room(), _TURN)
            self._send(window, count, self._main)
            self._windows.settle(window)
        elif self._connection is not None:
            self._checks.enter(window, self._connection, self)

    def _take_in(self) -> None:
        """Add new batches to the ends of their windows."""
        now = time.monotonic()
        while self._new:
            batch = self._new.popleft()
            self._check.watch()
            if self._closed:
                self._give_up(batch)
            else:
                self._windows.add(batch, now)

    def _may_send(self) -> bool:
        main = self._main
        may = main is not None and main.is_open and not main.spent
        return may and not self._thread.blocked and self._thread.is_up

    def _room(self) -> int:
        return MOST + self._stuck - (len(self._main.sent) if self._main else 0)

    def _send(self, window: PublishWindow, count: int, channel: ConfirmChannel) -> None:
        some: list[Sent] = []
        for batch, item, again in [window.todo.popleft() for _ in range(count)]:
            if not again:
                batch.unsure += 1
            some.append((window, batch, item))
        window.under_way += count
        channel.send(some)

    # -- making and checking --------------------------------------------------------------------

    def _prepare(self, window: PublishWindow) -> None:
        """Make the queues that a window needs. Other windows go on."""
        window.halted = True
        self._readiness.make(window, functools.partial(self._prepared, window))

    def _prepared(self, window: PublishWindow, why: str) -> None:
        if not why or not self._thread.is_up:  # success, or a lost connection
            self._resume(window)
            return
        if not window.why:
            log.error("the queue %s cannot be used now: %s", window.home.name, why)
        window.why = why
        if never_made(why):
            why = with_grant(why, self._thread.settings)
            text = f"rabbitmq at {self._where}: {window.home.name} cannot be made: {why}"
            for batch in window.batches():
                if batch.then is None:
                    self._give_up(batch, text)
        self._halt(window, window.next_pause())

    def _halt(self, window: PublishWindow, pause: float) -> None:
        """Send nothing to a place until the pause is over."""
        window.halted = True
        self._thread.later(pause, functools.partial(self._resume, window))

    def _resume(self, window: PublishWindow) -> None:
        window.halted = False
        self._windows.settle(window)
        self._pump()

    def _send_first(self, channel: ConfirmChannel) -> None:
        window = self._checks.first(channel)
        if window is not None:
            self._send(window, 1, channel)
        else:
            self._end_check(channel)

    def _end_check(self, channel: ConfirmChannel) -> None:
        for window in self._checks.end(channel):
            self._windows.settle(window)

    # -- answers --------------------------------------------------------------------------------

    def channel_answered(self, channel: ConfirmChannel, answers: list[Answer]) -> None:
        now, windows = time.monotonic(), dict[str, PublishWindow]()
        for window, batch, item, came in answers:
            window.under_way -= 1
            if came is not PublishOutcome.REFUSED:
                window.moved = window.answered = now
            windows[window.key] = window
            batch.unsure -= 1
            if came is PublishOutcome.STORED:
                window.size += window.size < MOST
                window.why, window.pause = "", 0.0
                batch.stored += 1
                if batch.stored == len(batch.items):
                    batch.end()
            elif came is PublishOutcome.RETURNED:
                self._came_back(window, batch, item)
            else:
                channel.spent = True
                self._refused(window, batch, item)
            if batch.refusal and not batch.unsure:
                self._give_up(batch)
        if channel.destination:
            if any(came is PublishOutcome.STORED for *_, came in answers):
                self._checks.proven.add(channel.destination)
            self._end_check(channel)
        for window in windows.values():
            self._windows.settle(window)
        if channel is self._main and channel.spent and not channel.sent:
            channel.close()
            self._drop_channel(channel, 0.0)
        self._check.heard()
        self._pump()

    def _came_back(self, window: PublishWindow, batch: Batch, item: Outgoing) -> None:
        if not window.back:
            log.warning("the queue %s was gone; it is made again", item.home.name)
            self._readiness.forget_all()
        if not batch.is_over:
            window.back.append((batch, item, False))

    def _refused(self, window: PublishWindow, batch: Batch, item: Outgoing) -> None:
        """A queue is full, or has no majority. Send the message again."""
        if not window.why and batch.then is not None:
            log.error("the queue %s %s; sending it again until stored", item.home.name, REFUSED)
        window.why = REFUSED
        if not batch.is_over:
            window.back.append((batch, item, False))
        if not window.halted:
            self._halt(window, window.next_pause())

    def _end_refused(self, window: PublishWindow, batch: Batch) -> None:
        """Send no more of a batch. It ends when all its messages under way were answered."""
        batch.refusal = f"rabbitmq at {self._where}: the queue {window.home.name} {REFUSED}"
        self._windows.drop(batch)

    def _owes(self) -> bool:
        """Whether answers are due. Also count the messages that do not count for ``MOST``."""
        late = time.monotonic() - _STUCK
        stuck = sum(window.under_way for window in self._windows if window.moved <= late)
        main = self._main
        if main is not None and main.sent:
            main.quiet += 1
            if main.quiet > DEAD and len({id(window) for window, _, _ in main.sent.values()}) > 1:
                main.close()  # other queues must not wait for a silent queue
                self._drop_channel(main, 0.0)
        if stuck != self._stuck:
            self._stuck = stuck
            self._pump()
        return bool(self._windows)

    # -- giving up ------------------------------------------------------------------------------

    def _channels(self) -> list[ConfirmChannel]:
        channels = (self._main, *self._checks.channels.values())
        return [channel for channel in channels if channel is not None]

    def _review(self, batch: Batch, patience: float) -> None:
        """Give up a batch if one of its windows had no answer for ``patience`` seconds."""
        self._take_in()
        since = time.monotonic() - patience
        sent = [one for channel in self._channels() for one in channel.sent.values()]
        waiting = {window.key for window, one, _ in sent if one is batch}
        for window in self._windows:
            quiet = max(window.answered, batch.began)
            if quiet <= since and (window.key in waiting or batch in window.batches()):
                if window.why == REFUSED and not batch.is_over:
                    self._end_refused(window, batch)
                if window.why != REFUSED or not batch.unsure or quiet <= since - _UNSURE:
                    self._give_up(batch, *self._reason(window))
                break

    def _reason(self, window: PublishWindow) -> tuple[str, type[TidemillError]]:
        if self._thread.blocked:
            why = f"rabbitmq at {self._where} lets nobody publish: {self._thread.blocked}"
            return why, StoreFull
        if not self._may_send():
            return self._thread.trouble, BrokerUnavailable
        return f"rabbitmq at {self._where}: {window.trouble}", BrokerUnavailable

    def _give_up(
        self, batch: Batch, why: str = "", kind: type[TidemillError] = BrokerUnavailable
    ) -> None:
        """End a batch, and say how much is stored. Messages under way may be stored, too."""
        if batch.done.is_set():
            return
        if batch.refusal:
            why, kind = batch.refusal, BrokerUnavailable
        elif kind is StoreFull and (batch.stored or batch.unsure):
            kind = BrokerUnavailable
        batch.end(kind(f"{why or 'the broker was closed'}; {batch.account()}"))
        self._windows.drop(batch)
