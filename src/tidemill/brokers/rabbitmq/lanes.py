"""What goes to one place of the server, in its order; and what is waited for together.

A lane begins with a handful of messages under way, and may have one more for each that is
confirmed. So a queue that answers nobody has little of ours: of a line with some hundred messages
that no queue takes the server reads nothing more, whatever it is for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tidemill.brokers.rabbitmq.declaring import SILENT
from tidemill.brokers.rabbitmq.names import Place
from tidemill.errors import TidemillError
from tidemill.locks import Event

__all__ = ["MOST", "REFUSED", "Batch", "Entry", "Lane", "Lanes", "Outgoing", "never_made"]

REFUSED = "refused a message (it is full, or has no majority)"

_STARTING = "is down or inaccessible"
"""What a server says of a queue whose node is away, and of all when it has just started."""

_NEVER_MADE = ("ACCESS_REFUSED", "NOT_ALLOWED", "NOT_IMPLEMENTED", "PRECONDITION_FAILED")
"""How the server begins what it says of a queue that it will not make later, either."""

_AGAIN, _AGAIN_MOST, _SILENT, _SILENT_MOST = 0.2, 2.0, 5.0, 60.0
"""Seconds until a place is tried again, at first and at most: one that is not there or refused a
message, and one that holds up whoever asks for it."""

FIRST, MOST = 16, 1000
"""Messages of a lane that may be under way at first, and at most: enough to hide the disk."""


class Outgoing(msgspec.Struct):
    """A message to be sent: where to, and what has to be there for it."""

    exchange: str
    key: str
    properties: bytes
    body: bytes
    home: Place
    digits: tuple[int, ...] = ()


def never_made(why: str) -> bool:
    """Whether the server will not make a queue later, either."""
    return why.startswith(_NEVER_MADE)


class Batch:
    """Messages that are waited for together.

    Attributes:
        stored: of them, that the server has confirmed.
        unsure: that were sent and not answered, over this line or one before.
        refusal: why nothing more of it is sent, though something is still under way.
        once: a message that a queue refuses is not sent again.
        tries: how often the server closed the channel over it.
    """

    __slots__ = (
        *("done", "items", "once", "refusal", "stored"),
        *("then", "tries", "trouble", "unsure"),
    )

    def __init__(
        self, items: Sequence[Outgoing], then: Callable[[], None] | None, *, once: bool = False
    ) -> None:
        self.items = items
        self.once = once
        self.stored = self.unsure = self.tries = 0
        self.refusal = ""
        self.trouble: TidemillError | None = None
        self.done = Event()
        self.then = then

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is to be sent any more."""
        return bool(self.refusal) or self.done.is_set()

    def end(self, trouble: TidemillError | None = None) -> None:
        """Tell who waits; once."""
        if not self.done.is_set():
            self.trouble = trouble
            self.done.set()
            if self.then is not None and trouble is None:
                self.then()

    def account(self) -> str:
        """How much of it the server has."""
        if not self.stored and not self.unsure:
            return "nothing was stored"
        count = len(self.items)
        if not self.unsure:
            return f"{self.stored} of {count} were stored"
        return f"{self.stored} of {count} were stored, and {self.unsure} more may be"


Entry = tuple[Batch, Outgoing, bool]
"""A message, whose it is, and whether it was sent already and nobody knows what came of it."""


class Lane:
    """What goes to one place; a delay has one of its own.

    Attributes:
        back: what is to be sent again, before anything else, when nothing is under way.
        queued: it is among those that are to send something.
        target: the queue of the server that gets its messages: its home, or a first wait.
        halted: what it needs is being made, or cannot be for now.
        trying: it waits until the target was tried.
        moved: machine time of the last answer, or of when there was something to do again.
        why: what the server says of a place that it does not have now.
        pause: seconds that the place was left alone last.
    """

    __slots__ = (
        *("back", "digits", "halted", "home", "key", "moved", "queued"),
        *("pause", "target", "todo", "trying", "under_way", "why", "window"),
    )

    def __init__(self, item: Outgoing, now: float) -> None:
        self.key = item.key
        self.home = item.home
        self.digits = item.digits
        self.todo: deque[Entry] = deque()
        self.back: list[Entry] = []
        self.under_way = 0
        self.window = FIRST
        self.queued = self.halted = self.trying = False
        self.target = self.home.name
        if item.digits:  # that of the exchange and its first digit (:mod:`.delays`)
            self.target = f"{item.exchange}.{next(filter(None, item.digits))}"
        self.moved = now
        self.why, self.pause = "", 0.0

    @property
    def may_send(self) -> bool:
        """Whether it has something to send, and may."""
        if self.queued or self.halted or self.trying or self.back:
            return False
        return bool(self.todo) and self.under_way < self.window

    @property
    def is_idle(self) -> bool:
        """Whether it can be forgotten."""
        busy = self.queued or self.halted or self.trying
        return not (busy or self.todo or self.back or self.under_way)

    def turn_back(self) -> None:
        """What is to be sent again is the next, in its order, if all was answered."""
        if self.back and not self.under_way:
            self.todo.extendleft(reversed(self.back))
            self.back = []

    def drop(self, batch: Batch) -> None:
        """Send nothing more of it."""
        self.todo = deque(entry for entry in self.todo if entry[0] is not batch)
        self.back = [entry for entry in self.back if entry[0] is not batch]

    def batches(self) -> list[Batch]:
        """Those of which something is to be sent."""
        return list({id(batch): batch for batch, _, _ in [*self.back, *self.todo]}.values())

    def lose(self) -> None:
        """The line is gone, and what halted it."""
        self.under_way, self.window = 0, FIRST
        self.halted = self.trying = False

    def next_pause(self) -> float:
        """Seconds to leave the place alone, for ``why``; longer each time until it takes a message.
        """
        if _STARTING in self.why:
            return _AGAIN
        least, most = (_SILENT, _SILENT_MOST) if self.why == SILENT else (_AGAIN, _AGAIN_MOST)
        if never_made(self.why):
            least = most
        self.pause = min(max(2 * self.pause, least), most)
        return self.pause

    @property
    def trouble(self) -> str:
        """What is wrong with its place."""
        name = self.home.name + (" (delayed)" if self.digits else "")
        if self.why == REFUSED:
            return f"the queue {name} {REFUSED}"
        return f"the queue {name} does not answer" + (f": {self.why}" if self.why else "")


class Lanes:
    """All lanes that have something to do, and in what order they have their turn."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}  # by routing key
        self._ready: deque[Lane] = deque()

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, batch: Batch, now: float) -> None:
        """A batch goes to the end of its lanes."""
        for key, group in itertools.groupby(batch.items, lambda item: item.key):
            entries = [(batch, item, False) for item in group]
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(entries[0][1], now)
            lane.todo += entries
            self.settle(lane)

    def settle(self, lane: Lane) -> None:
        """Have a lane send what it may; one that has nothing to do is forgotten."""
        lane.turn_back()
        if lane.may_send:
            lane.queued = True
            self._ready.append(lane)
        elif lane.is_idle and self._lanes.get(lane.key) is lane:
            del self._lanes[lane.key]

    def next(self) -> Lane | None:
        """The lane whose turn it is to send something."""
        while self._ready:
            lane = self._ready.popleft()
            lane.queued = False
            if lane.may_send:
                return lane
            self.settle(lane)
        return None

    def drop(self, batch: Batch) -> None:
        """Send nothing more of it."""
        for lane in self:
            lane.drop(batch)
            self.settle(lane)
