"""The timekeeper of a process: it holds the jobs of timer queues until they are due.

A timekeeper holds a job unacknowledged. It publishes a due job to its home with a confirm, and then
acknowledges the job. After a kill in between, the job is in both places, and runs twice.

The server hands out the first messages of each queue, up to a window. When the window is full, jobs
with a rest (the time until they are due) below the least delay of the queue move to the queue for
their rest. So a job beyond the window is reached in time: it waits at least the least delay, and in
this time all jobs before it leave the queue. A process returns its held jobs every few minutes,
before the server's ``consumer_timeout``. All of this runs in the connection thread, except where a
comment says otherwise.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pika

from tidemill.brokers.rabbitmq.amqp.channel import Arrival, ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection import Properties, decoded, encoded
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.layout import HOME, LEVELS, Names, least, level_of, most
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.put import Outgoing, Publisher
from tidemill.brokers.rabbitmq.queue_state import QueueState
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.core.locks import Event

_WINDOW = 256  # messages of a timer queue that are held at a time
_TOGETHER = 64  # messages that are confirmed and acknowledged together
_BYTES = 64_000_000  # of held bodies of all timer queues, above which windows get smaller
_HOLD_MOST, _LOOK_EVERY = 300.0, 60.0  # seconds to hold a message, and between two checks of them
_GRAIN = 0.0005  # seconds by which a timer may be early


class _Held:
    """A message that this process holds. Its tag is 0 when the server has the message again."""

    __slots__ = ("body", "due", "era", "key", "properties", "queue", "tag", "taken")

    def __init__(
        self, queue: _Queue, tag: int, era: int, properties: pika.BasicProperties, body: bytes
    ) -> None:
        self.queue = queue
        self.tag = tag
        self.era = era
        self.properties = properties
        self.body = body
        # A job that moves to another timer queue keeps the id of its run.
        self.key = (str(properties.correlation_id), queue.level)
        self.taken = clock.machine()
        self.due = self.taken + self._rest()

    def _rest(self) -> float:
        """Seconds until the message is due by our clock, at most the longest delay of its queue."""
        headers: Mapping[str, Any] = self.properties.headers or {}
        due = (float(headers["due"]) - float(headers.get("rest") or 0)) / 1000
        return min(max(0.0, due - clock.wall()), most(self.queue.level))


class _Queue:
    """A timer queue that this process serves, with its held messages, earliest first."""

    def __init__(self, level: int, state: QueueState) -> None:
        self.level = level
        self.state = state
        state.credit = _WINDOW
        self.waiting: list[tuple[float, int, _Held]] = []
        self.moving = 0

    @property
    def in_hand(self) -> int:
        """The number of messages that are held or are moving."""
        return len(self.waiting) + self.moving

    @property
    def is_full(self) -> bool:
        """True when the server may have messages beyond the window."""
        return self.in_hand >= self.state.credit

    def shrink(self) -> None:
        """Limit the window to the messages that are held now."""
        self.state.credit, self.state.trim = max(1, self.in_hand), True

    def take_until(self, due: float) -> list[_Held]:
        """Take out the messages that are due at this time."""
        taken: list[_Held] = []
        while self.waiting and self.waiting[0][0] <= due:
            taken.append(heapq.heappop(self.waiting)[2])
        return taken

    @property
    def next(self) -> float:
        """Machine time at which the next message must move."""
        if not self.waiting:
            return float("inf")
        return self.waiting[0][0] - (least(self.level) if self.is_full else 0.0)


class Timekeeper:
    def __init__(
        self,
        thread: ConnectionThread,
        declarer: Declarer,
        publisher: Publisher,
        names: Names,
        writer: Writer,
    ) -> None:
        self._thread = thread
        self._publisher = publisher
        self._names = names
        self._writer = writer
        self._numbers = itertools.count()
        self._in_use = QueueState(names.timers_in_use)
        self._in_use.credit = 2 * LEVELS
        self._noticed: dict[int, tuple[int, int]] = {}  # tag and era of a held notice, by level
        self._queues: dict[str, _Queue] = {}  # by name
        self._moving: dict[tuple[str, int], _Held] = {}
        self._bytes = 0  # bytes of the bodies that are held or are moving
        self._alarm = float("inf")  # machine time for which a timer is set
        self._closing = False
        self._channel = ConsumerChannel(
            thread, declarer, "timekeeper", self._came, self._lost, self._states
        )
        thread.do(self._renew)

    # -- from any thread ------------------------------------------------------------------------

    def close(self, patience: float) -> None:
        """Acknowledge the moved messages, and then return the held messages."""
        stopped = Event()
        self._thread.do(lambda: self._stop(stopped))
        stopped.wait(patience)
        self._publisher.flush(patience)
        self._channel.close(patience)

    # -- in the connection thread ---------------------------------------------------------------

    def _stop(self, stopped: Event) -> None:
        self._closing = True
        for state in self._states():
            state.credit = 0
        self._channel.adjust()
        stopped.set()

    def _states(self) -> list[QueueState]:
        return [self._in_use, *(queue.state for queue in self._queues.values())]

    def _came(self, arrivals: Sequence[Arrival]) -> None:
        for state, tag, _, properties, body, wanted in arrivals:
            queue = self._queues.get(state.place.name)
            if self._closing or not wanted:
                self._channel.nack(tag, self._channel.era)
            elif queue is None:
                self._notice(tag, body)
            else:
                self._hold(queue, tag, properties, body)
                if self._bytes > _BYTES and queue.in_hand < queue.state.credit:
                    queue.shrink()
                    self._channel.adjust()
        self._look()

    def _notice(self, tag: int, body: bytes) -> None:
        """Serve the timer queue that a notice names."""
        # One notice of each queue stays unacknowledged, so that a later timekeeper gets it.
        level = int(body) if body.isdigit() else LEVELS
        place = self._names.timer(level)
        if level in self._noticed or level >= LEVELS:
            self._channel.ack(tag, self._channel.era)
            return
        self._noticed[level] = tag, self._channel.era
        if place.name not in self._queues:
            self._queues[place.name] = _Queue(level, QueueState(place))
            self._channel.adjust()

    def _hold(self, queue: _Queue, tag: int, properties: Properties, body: bytes) -> None:
        basic = decoded(properties)
        try:
            held = _Held(queue, tag, self._channel.era, basic, body)
        except (KeyError, TypeError, ValueError):
            self._put_aside(queue, tag, basic, body)
            return
        before = self._moving.get(held.key)
        if before is not None:
            # The connection was lost during the move: the message came again, with a new tag.
            before.tag, before.era = tag, self._channel.era
        else:
            heapq.heappush(queue.waiting, (held.due, next(self._numbers), held))
            self._bytes += len(body)

    def _put_aside(self, queue: _Queue, tag: int, basic: pika.BasicProperties, body: bytes) -> None:
        """Move a message that is no delayed job of tidemill to the failed jobs."""
        place, era = queue.state.place, self._channel.era
        item = self._writer.write_unreadable(place, basic, body, "it does not say when it is due")
        self._publisher.send([item], lambda: self._thread.do(lambda: self._channel.ack(tag, era)))

    # -- moving on ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Move the due messages on, and set a timer for the next."""
        if self._closing:
            return
        now = clock.machine()
        for queue in self._queues.values():
            self._move(queue.take_until(now))
            if queue.is_full and queue.level:
                self._move(queue.take_until(now + least(queue.level)))
        first = min((queue.next for queue in self._queues.values()), default=float("inf"))
        if first < self._alarm:
            self._alarm = first
            self._thread.later(max(0.0, first - now), self._ring)

    def _ring(self) -> None:
        # If the alarm was set to a later time, another timer will ring.
        if clock.machine() >= self._alarm - _GRAIN:
            self._alarm = float("inf")
            self._look()

    def _move(self, some: Sequence[_Held]) -> None:
        for start in range(0, len(some), _TOGETHER):
            together, items = list[_Held](), list[Outgoing]()
            for held in some[start : start + _TOGETHER]:
                item = self._onward(held)
                if item is None:
                    self._bytes -= len(held.body)
                    self._put_aside(held.queue, held.tag, held.properties, held.body)
                else:
                    together.append(held)
                    items.append(item)
                    held.queue.moving += 1
                    self._moving[held.key] = held
            if items:
                stored = functools.partial(self._stored, together)
                self._publisher.send(items, functools.partial(self._thread.do, stored))

    def _onward(self, held: _Held) -> Outgoing | None:
        """The message for the next place of a job; None if its headers name no place."""
        basic = held.properties
        home = self._names.named(str((basic.headers or {}).get(HOME)))
        if home is None:
            return None
        ours = {k: v for k, v in (basic.headers or {}).items() if not k.startswith("x-")}
        rest = held.due - clock.machine()
        if rest > 0:
            level = min(level_of(rest), held.queue.level - 1)
            home = self._names.timer(level)
        else:
            del ours[HOME]
        basic.headers = ours or None
        return Outgoing(encoded(basic), held.body, home)

    def _stored(self, together: Sequence[_Held]) -> None:
        """Acknowledge moved messages: the server has confirmed their copies."""
        point("timers.moved")
        for held in together:
            del self._moving[held.key]
            self._bytes -= len(held.body)
            held.queue.moving -= 1
            if held.tag:
                self._channel.ack(held.tag, held.era)
        self._grow()
        self._look()

    def _grow(self) -> None:
        """Widen again the windows that large bodies made smaller."""
        if self._bytes <= _BYTES // 2:
            small = [one for one in self._queues.values() if one.state.credit < _WINDOW]
            for queue in small:
                queue.state.credit = min(_WINDOW, 2 * queue.state.credit)
            if small:
                self._channel.adjust()

    # -- giving back ----------------------------------------------------------------------------

    def _renew(self) -> None:
        """Return messages that were held for long; the server delivers these again at once."""
        if self._closing:
            return
        self._thread.later(_LOOK_EVERY, self._renew)
        before = clock.machine() - _HOLD_MOST
        for queue in self._queues.values():
            old = [one for one in queue.waiting if one[2].taken <= before]
            if old:
                queue.waiting = [one for one in queue.waiting if one[2].taken > before]
                heapq.heapify(queue.waiting)
                for held in sorted((held for *_, held in old), key=lambda held: held.tag):
                    self._bytes -= len(held.body)
                    self._channel.nack(held.tag, held.era)
        for tag, era in self._noticed.values():
            self._channel.nack(tag, era)
        self._noticed.clear()

    def _lost(self) -> None:
        """Forget the held messages: the server has them again."""
        self._in_use.drop()
        self._noticed.clear()
        for queue in self._queues.values():
            queue.state.drop()
            queue.waiting.clear()
        self._bytes = sum(len(held.body) for held in self._moving.values())
        for held in self._moving.values():
            held.tag = 0
