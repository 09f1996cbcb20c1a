"""What goes to one place of the server, in its order; and what is waited for together.

A publish window begins with a handful of messages under way, and may have one more for each that is
confirmed. So a queue that answers nobody has little of ours: of a line with some hundred messages
that no queue takes the server reads nothing more, whatever it is for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tidemill.brokers.rabbitmq.amqp.topology import SILENT
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.core.errors import TidemillError
from tidemill.core.locks import Event

__all__ = [
    "MOST",
    "REFUSED",
    "Batch",
    "Entry",
    "Outgoing",
    "PublishWindow",
    "PublishWindows",
    "never_made",
]

REFUSED = "refused a message (it is full, or has no majority)"

_STARTING = "is down or inaccessible"
"""What a server says of a queue whose node is away, and of all when it has just started."""

_NEVER_MADE = ("ACCESS_REFUSED", "NOT_ALLOWED", "NOT_IMPLEMENTED", "PRECONDITION_FAILED")
"""How the server begins what it says of a queue that it will not make later, either."""

_AGAIN, _AGAIN_MOST, _SILENT, _SILENT_MOST = 0.2, 2.0, 5.0, 60.0
"""Seconds until a place is tried again, at first and at most: one that is not there or refused a
message, and one that holds up whoever asks for it."""

FIRST, MOST = 16, 1000
"""Messages of a window that may be under way at first, and at most: enough to hide the disk."""


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
        began: machine time at which the call began that waits for it.
        stored: of them, that the server has confirmed.
        unsure: that were sent and not answered, over this line or one before.
        refusal: why nothing more of it is sent, though something is still under way.
        once: a message that a queue refuses is not sent again.
        tries: how often the server closed the channel over it.
    """

    __slots__ = (
        *("began", "done", "items", "once", "refusal", "stored"),
        *("then", "tries", "trouble", "unsure"),
    )

    def __init__(
        self,
        items: Sequence[Outgoing],
        then: Callable[[], None] | None,
        began: float,
        *,
        once: bool = False,
    ) -> None:
        self.items = items
        self.began = began
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


class PublishWindow:
    """What goes to one place; a delay has one of its own.

    Attributes:
        back: what is to be sent again, before anything else, when nothing is under way.
        queued: it is among those that are to send something.
        target: the queue of the server that gets its messages: its home, or a first wait.
        halted: what it needs is being made, or cannot be for now.
        trying: it waits until the target was tried.
        moved: machine time of the last answer, or of when there was something to do again.
        answered: machine time of the last answer but a refusal, 0 for none.
        why: what the server says of a place that it does not have now.
        pause: seconds that the place was left alone last.
    """

    __slots__ = (
        *("answered", "back", "digits", "halted", "home", "key", "moved", "queued"),
        *("pause", "target", "checking", "size", "todo", "under_way", "why"),
    )

    def __init__(self, item: Outgoing, now: float) -> None:
        self.key = item.key
        self.home = item.home
        self.digits = item.digits
        self.todo: deque[Entry] = deque()
        self.back: list[Entry] = []
        self.under_way = 0
        self.size = FIRST
        self.queued = self.halted = self.checking = False
        self.target = self.home.name
        if item.digits:  # the exchange and the first digit (``due.py``)
            self.target = f"{item.exchange}.{next(filter(None, item.digits))}"
        self.moved, self.answered = now, 0.0
        self.why, self.pause = "", 0.0

    @property
    def may_send(self) -> bool:
        """Whether it has something to send, and may."""
        if self.queued or self.halted or self.checking or self.back:
            return False
        return bool(self.todo) and self.under_way < self.size

    @property
    def is_idle(self) -> bool:
        """Whether it can be forgotten."""
        busy = self.queued or self.halted or self.checking
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
        self.under_way, self.size = 0, FIRST
        self.halted = self.checking = False

    def next_pause(self) -> float:
        """Seconds until the place is tried again: longer each time until it takes a message."""
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


class PublishWindows:
    """All windows with messages to send, in the order of their turns."""

    def __init__(self) -> None:
        self._windows: dict[str, PublishWindow] = {}  # by routing key
        self._ready: deque[PublishWindow] = deque()

    def __iter__(self) -> Iterator[PublishWindow]:
        return iter(list(self._windows.values()))

    def __bool__(self) -> bool:
        return bool(self._windows)

    def add(self, batch: Batch, now: float) -> None:
        """A batch goes to the end of its windows."""
        for key, group in itertools.groupby(batch.items, lambda item: item.key):
            entries = [(batch, item, False) for item in group]
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = PublishWindow(entries[0][1], now)
            window.todo += entries
            self.settle(window)

    def settle(self, window: PublishWindow) -> None:
        """Let a window send what it may; forget an idle window."""
        window.turn_back()
        if window.may_send:
            window.queued = True
            self._ready.append(window)
        elif window.is_idle and self._windows.get(window.key) is window:
            del self._windows[window.key]

    def next(self) -> PublishWindow | None:
        """The window whose turn it is to send."""
        while self._ready:
            window = self._ready.popleft()
            window.queued = False
            if window.may_send:
                return window
            self.settle(window)
        return None

    def drop(self, batch: Batch) -> None:
        """Send nothing more of it."""
        for window in self:
            window.drop(batch)
            self.settle(window)
