"""Publishing with confirms: batches from any thread, over one line, lanes for the places.

A batch is done when the server has confirmed all of it. What was sent and not confirmed when a line
breaks is sent again over the next, and nothing else: that may then be there twice, and never not at
all. What no queue took (it was deleted under us) comes back, the queue is made again, and it is
sent again. A place that cannot be made, or does not answer, holds up what goes there and no more.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence

import pika

from tidemill.brokers.rabbitmq.declaring import Declarer
from tidemill.brokers.rabbitmq.lanes import MOST, REFUSED, Batch, Lane, Lanes, Outgoing, never_made
from tidemill.brokers.rabbitmq.line import Line
from tidemill.brokers.rabbitmq.names import Place
from tidemill.brokers.rabbitmq.pulse import DEAD, Pulse
from tidemill.brokers.rabbitmq.readiness import Readiness
from tidemill.brokers.rabbitmq.trials import Trials
from tidemill.brokers.rabbitmq.trouble import with_grant
from tidemill.brokers.rabbitmq.wire import Answer, Came, Sent, Wire
from tidemill.brokers.relay import NoPlace, Refused
from tidemill.clock import machine_time
from tidemill.errors import BrokerUnavailable, StoreFull, TidemillError
from tidemill.locks import Event, Lock

__all__ = ["Outgoing", "Publisher"]

log = logging.getLogger("tidemill.rabbitmq")

_TURN = 64
"""Messages that one lane sends before the others have their turn."""

_REVIEW = 0.5
"""Seconds, at most, between two looks whether a put has waited for its patience."""

_STUCK = 3.0
"""Seconds without an answer after which what a lane has under way leaves room for others."""

_UNFIT = 406
"""The code of what the server says of a message that it never takes: one that is too large."""

_TRIES = 3
"""So often a batch is sent when the server closes the channel: it may be another's fault."""

_REOPEN = 0.5
"""Seconds until a channel is opened again that the server closed as soon as it was open."""


class Publisher:
    """Publishes over one line."""

    def __init__(
        self, line: Line, declarer: Declarer, notice: Callable[[Place], Outgoing]
    ) -> None:
        self._line = line
        self._readiness = Readiness(declarer, notice, self.send)
        self._pulse = Pulse(line, self._owes)
        self._connection: pika.SelectConnection | None = None
        self._main: Wire | None = None
        self._trials = Trials()
        self._lanes = Lanes()
        self._stuck = 0  # messages under way that leave room for others
        self._closed = self._pumping = False
        self._listeners: list[Event] = []  # who wants to know that nothing is under way
        self._lock = Lock()
        self._new: deque[Batch] = deque()
        self._called = False  # the thread was told that there is something to do

    # -- from any thread ------------------------------------------------------------------------

    def put(self, items: Sequence[Outgoing], patience: float, *, once: bool = False) -> None:
        """Send, and sleep until the server has them, however many they are.

        A message that a queue refuses is sent again for the ``patience``, but for ``once``.

        Raises:
            StoreFull: the server lets nobody publish, and none of it was sent.
            Refused: it never takes this.
            NoPlace: a queue refused something, cannot be made, or does not answer for so long.
            BrokerUnavailable: the server does not answer. Each says how much is stored.
        """
        if not self._line.is_up:
            self._line.await_up(patience)
        batch = Batch(items, None, once=once)
        self._submit(batch)
        wait = patience
        while not batch.done.wait(wait):
            self._line.do(functools.partial(self._review, batch, patience))
            wait = min(patience / 4, _REVIEW)
        if batch.trouble is not None:
            raise batch.trouble

    def send(self, items: Sequence[Outgoing], then: Callable[[], None]) -> None:
        """Send; ``then`` is called in the line's thread when the server has them, however late."""
        self._submit(Batch(items, then))

    def flush(self, patience: float) -> bool:
        """Sleep until all that was sent before is confirmed; False when it takes longer."""
        quiet = Event()
        if not self._line.is_up:
            return False

        def look() -> None:
            self._listeners.append(quiet)
            self._pump()

        self._line.do(look)
        return quiet.wait(patience)

    def close(self) -> None:
        """Nobody waits any longer."""

        def leave() -> None:
            self._closed = True
            batches = list(self._new)
            batches += [batch for lane in self._lanes for batch in lane.batches()]
            batches += [batch for wire in self._wires() for _, batch, _ in wire.sent.values()]
            for batch in batches:
                self._give_up(batch)

        self._line.do(leave)

    def _submit(self, batch: Batch) -> None:
        if not batch.items:
            batch.end()
            return
        with self._lock:
            self._new.append(batch)
            if self._called:
                return
            self._called = True
            self._line.do(self._pump)

    # -- of the line ----------------------------------------------------------------------------

    def opened(self, connection: pika.SelectConnection) -> None:
        self._connection = connection
        self._readiness.begin_anew()
        self._pulse.begin(connection)
        self._open_main()
        self._pump()  # what is to be made, or tried

    def unblocked(self) -> None:
        """What waited for that goes out."""
        self._pump()

    def lost(self, why: str) -> None:
        """What was under way is to be sent again, before anything else and in its order."""
        wires = self._wires()
        self._connection = self._main = None
        self._trials.forget()
        for wire in wires:
            self._take_back(wire)
        for lane in self._lanes:
            lane.lose()
            self._lanes.settle(lane)

    def _open_main(self) -> None:
        connection = self._connection
        if self._main is None and connection is not None and connection.is_open:
            self._main = Wire(connection, self)
            self._pulse.watch()

    def wire_opened(self, wire: Wire) -> None:
        self._send_first(wire) if wire.trial else self._pump()

    def wire_closed(self, wire: Wire, code: int, why: str) -> None:
        """The server refused something we published; the line itself may be well."""
        why = with_grant(why, self._line.settings)
        log.error("rabbitmq closed the channel of what we publish: %s", why)
        self._readiness.forget_all()  # somebody may have deleted what we publish to
        soon = not wire.sent
        for batch in {id(batch): batch for _, batch, _ in wire.sent.values()}.values():
            batch.tries += 1
            if batch.tries >= _TRIES and batch.then is None:
                kind = Refused if code == _UNFIT else BrokerUnavailable
                self._give_up(batch, f"rabbitmq at {self._where}: {why}", kind)
        self._drop_wire(wire, _REOPEN if soon or wire.trial else 0.0)

    def _drop_wire(self, wire: Wire, pause: float) -> None:
        """Have a channel no more; what was under way over it is sent again."""
        lanes = self._take_back(wire)
        if wire is self._main:
            self._main = None
            self._trials.proven.clear()
            self._line.later(pause, self._open_main)
        else:
            for lane in lanes:
                self._halt(lane, pause)
            self._end_trial(wire)
        for lane in lanes:
            lane.under_way = 0
            self._lanes.settle(lane)
        self._pump()

    def _take_back(self, wire: Wire) -> list[Lane]:
        lanes: dict[str, Lane] = {}
        refused: list[Batch] = []
        for lane, batch, item in wire.take_back():
            lanes[lane.key] = lane
            if not batch.is_over:
                lane.back.append((batch, item, True))
            elif batch.refusal:
                refused.append(batch)
        for batch in refused:
            self._give_up(batch)
        return list(lanes.values())

    # -- sending --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send as much as may be under way."""
        with self._lock:
            self._called = False
        if self._pumping:
            return  # called from within, which goes on anyway
        self._pumping = True
        try:
            self._take_in()
            while self._may_send() and self._room() > 0 and (lane := self._lanes.next()):
                self._send_of(lane)
        finally:
            self._pumping = False
        if self._listeners and not self._lanes:
            listeners, self._listeners = self._listeners, []
            for quiet in listeners:
                quiet.set()

    def _send_of(self, lane: Lane) -> None:
        if not self._readiness.has(lane):
            self._prepare(lane)
        elif lane.target in self._trials.proven:
            self._send_some(lane)
            self._lanes.settle(lane)
        elif self._connection is not None:
            self._trials.enter(lane, self._connection, self)

    def _take_in(self) -> None:
        """What is new goes to the end of its lanes."""
        now = machine_time()
        while self._new:
            batch = self._new.popleft()
            self._pulse.watch()
            if self._closed:
                self._give_up(batch)
            else:
                self._lanes.add(batch, now)

    def _may_send(self) -> bool:
        main = self._main
        may = main is not None and main.is_open and not main.spent
        return may and not self._line.blocked and self._line.is_up

    def _room(self) -> int:
        return MOST + self._stuck - (len(self._main.sent) if self._main else 0)

    def _send_some(self, lane: Lane) -> None:
        assert self._main is not None
        count = min(len(lane.todo), lane.window - lane.under_way, self._room(), _TURN)
        self._send(lane, count, self._main)

    def _send(self, lane: Lane, count: int, wire: Wire) -> None:
        some: list[Sent] = []
        for batch, item, again in [lane.todo.popleft() for _ in range(count)]:
            if not again:
                batch.unsure += 1
            some.append((lane, batch, item))
        lane.under_way += count
        wire.send(some)

    # -- making and trying ----------------------------------------------------------------------

    def _prepare(self, lane: Lane) -> None:
        """Make what a lane needs; the others go on."""
        lane.halted = True
        self._readiness.make(lane, functools.partial(self._prepared, lane))

    def _prepared(self, lane: Lane, why: str) -> None:
        if not why or not self._line.is_up:  # for want of a line it is not its fault
            self._resume(lane)
            return
        if not lane.why:
            log.error("the queue %s cannot be used now: %s", lane.home.name, why)
        lane.why = why
        if never_made(why):
            why = with_grant(why, self._line.settings)
            said = f"rabbitmq at {self._where}: {lane.home.name} cannot be made: {why}"
            for batch in lane.batches():
                if batch.then is None:
                    self._give_up(batch, said, NoPlace)
        self._halt(lane, lane.next_pause())

    def _halt(self, lane: Lane, pause: float) -> None:
        """Send nothing to a place for a while."""
        lane.halted = True
        self._line.later(pause, functools.partial(self._resume, lane))

    def _resume(self, lane: Lane) -> None:
        lane.halted = False
        self._lanes.settle(lane)
        self._pump()

    def _send_first(self, wire: Wire) -> None:
        lane = self._trials.first(wire)
        if lane is not None:
            self._send(lane, 1, wire)
        else:
            self._end_trial(wire)

    def _end_trial(self, wire: Wire) -> None:
        for lane in self._trials.end(wire):
            self._lanes.settle(lane)

    # -- hearing --------------------------------------------------------------------------------

    def wire_answered(self, wire: Wire, answers: list[Answer]) -> None:
        now, lanes = machine_time(), dict[str, Lane]()
        for lane, batch, item, came in answers:
            lane.under_way -= 1
            if came is not Came.REFUSED:
                lane.moved = now
            lanes[lane.key] = lane
            batch.unsure -= 1
            if came is Came.STORED:
                lane.window += lane.window < MOST
                lane.why, lane.pause = "", 0.0
                batch.stored += 1
                if batch.stored == len(batch.items):
                    batch.end()
            elif came is Came.RETURNED:
                self._came_back(lane, batch, item)
            else:
                wire.spent = True
                self._refused(lane, batch, item)
            if batch.refusal and not batch.unsure:
                self._give_up(batch)
        if wire.trial:
            if any(came is Came.STORED for *_, came in answers):
                self._trials.proven.add(wire.trial)
            self._end_trial(wire)
        for lane in lanes.values():
            self._lanes.settle(lane)
        if wire is self._main and wire.spent and not wire.sent:
            wire.close()
            self._drop_wire(wire, 0.0)
        self._pulse.heard()
        self._pump()

    def _came_back(self, lane: Lane, batch: Batch, item: Outgoing) -> None:
        if not lane.back:
            log.warning("the queue %s was gone; it is made again", item.home.name)
            self._readiness.forget_all()
        if not batch.is_over:
            lane.back.append((batch, item, False))

    def _refused(self, lane: Lane, batch: Batch, item: Outgoing) -> None:
        """A queue is full, or has no majority: the message is sent again, if it may be."""
        said = f"{item.home.name} {REFUSED}"
        if batch.once:
            if not batch.is_over:
                self._end_refused(lane, batch)
            return
        if not lane.why and batch.then is not None:
            log.error("the queue %s; it is sent again until it is stored", said)
        lane.why = REFUSED
        if not batch.is_over:
            lane.back.append((batch, item, False))
        if not lane.halted:
            self._halt(lane, lane.next_pause())

    def _end_refused(self, lane: Lane, batch: Batch) -> None:
        """Send no more of a batch; it ends when all that is under way was answered."""
        batch.refusal = f"rabbitmq at {self._where}: the queue {lane.home.name} {REFUSED}"
        self._lanes.drop(batch)

    def _owes(self) -> bool:
        """Whether there is something to be answered; what does not move makes room."""
        since = machine_time() - _STUCK
        stuck = sum(lane.under_way for lane in self._lanes if lane.moved <= since)
        main = self._main
        if main is not None and main.sent:
            main.quiet += 1
            if main.quiet > DEAD and len({id(lane) for lane, _, _ in main.sent.values()}) > 1:
                main.close()  # it waits for one of them with the others
                self._drop_wire(main, 0.0)
        if stuck != self._stuck:
            self._stuck = stuck
            self._pump()
        return bool(self._lanes)

    # -- giving up ------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return self._line.settings.where

    def _wires(self) -> list[Wire]:
        return [wire for wire in (self._main, *self._trials.wires.values()) if wire is not None]

    def _review(self, batch: Batch, patience: float) -> None:
        """Give up a batch of which a part has not moved for so long."""
        self._take_in()
        since = machine_time() - patience
        sent = [one for wire in self._wires() for one in wire.sent.values()]
        waiting = {lane.key for lane, one, _ in sent if one is batch}
        for lane in self._lanes:
            if lane.moved <= since and (lane.key in waiting or batch in lane.batches()):
                if lane.why == REFUSED and not batch.is_over:
                    self._end_refused(lane, batch)
                if lane.why != REFUSED or not batch.unsure:
                    self._give_up(batch, *self._reason(lane))
                break

    def _reason(self, lane: Lane) -> tuple[str, type[TidemillError]]:
        if self._line.blocked:
            why = f"rabbitmq at {self._where} lets nobody publish: {self._line.blocked}"
            return why, StoreFull
        if not self._may_send():
            return self._line.trouble, BrokerUnavailable
        return f"rabbitmq at {self._where}: {lane.trouble}", NoPlace

    def _give_up(
        self,
        batch: Batch,
        why: str = "the broker was closed",
        kind: type[TidemillError] = BrokerUnavailable,
    ) -> None:
        """Tell who waits how much is stored; what is under way may be."""
        if batch.done.is_set():
            return
        if batch.refusal:
            why, kind = batch.refusal, NoPlace
        elif kind is StoreFull and (batch.stored or batch.unsure):
            kind = BrokerUnavailable
        batch.end(kind(f"{why}; {batch.account()}"))
        self._lanes.drop(batch)
