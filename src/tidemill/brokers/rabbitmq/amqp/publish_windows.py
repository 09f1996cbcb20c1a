"""Publish windows: the messages for one place, in order; and batches that a caller waits for.

At first a window may have a few messages under way, and each confirm raises this limit by one. So a
silent queue gets few messages. If several hundred messages waited for one queue, the server would
stop reading from the whole connection, for all queues.
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

REFUSED = "refused a message (it is full, or has no majority)"

_STARTING = "is down or inaccessible"
"""The server's text for a queue whose node is away, and for every queue right after a start."""

_NEVER_MADE = ("ACCESS_REFUSED", "NOT_ALLOWED", "NOT_IMPLEMENTED", "PRECONDITION_FAILED")
"""The beginnings of the server's text for a queue that it will never make."""

_AGAIN, _AGAIN_MOST, _SILENT, _SILENT_MOST = 0.2, 2.0, 5.0, 60.0
"""Seconds until a place is tried again, at first and at most. The first pair is for a place that is
missing or refused a message, the second pair for a place that gives no answer."""

FIRST, MOST = 16, 1000
"""Messages of a window under way, at first and at most: enough to hide the delay of the disk."""


class Outgoing(msgspec.Struct):
    """A message to send, and the place that it goes to."""

    key: str
    properties: bytes
    body: bytes
    home: Place


def never_made(why: str) -> bool:
    """Whether a text of the server says that it will never make a queue."""
    return why.startswith(_NEVER_MADE)


class Batch:
    """Messages that a caller waits for together.

    Attributes:
        began: monotonic time at which the waiting call began.
        stored: the number of confirmed messages.
        unsure: the number of sent messages without an answer, on this connection or earlier ones.
        refusal: the reason why no more messages are sent, while some are still under way.
        tries: how often the server closed the channel of its messages.
    """

    __slots__ = (
        *("began", "done", "items", "refusal", "stored"),
        *("then", "tries", "trouble", "unsure"),
    )

    def __init__(
        self, items: Sequence[Outgoing], then: Callable[[], None] | None, began: float
    ) -> None:
        self.items = items
        self.began = began
        self.stored = self.unsure = self.tries = 0
        self.refusal = ""
        self.trouble: TidemillError | None = None
        self.done = Event()
        self.then = then

    @property
    def is_over(self) -> bool:
        """Whether no more messages of the batch are sent."""
        return bool(self.refusal) or self.done.is_set()

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


Entry = tuple[Batch, Outgoing, bool]
"""The batch of a message, the message, and True if it was sent before without an answer."""


class PublishWindow:
    """The messages for one place.

    Attributes:
        back: messages to send again, before all other messages, when no message is under way.
        queued: whether the window waits for its turn to send.
        target: the name of the place.
        halted: its queues are being made, or cannot be made for now.
        checking: the window waits for the check of its target.
        moved: monotonic time of its creation, or of the last answer other than a refusal.
        answered: monotonic time of the last answer other than a refusal; 0 for none.
        why: the server's reason why the place cannot be used now.
        pause: seconds of the latest pause.
    """

    __slots__ = (
        *("answered", "back", "halted", "home", "key", "moved", "queued"),
        *("pause", "target", "checking", "size", "todo", "under_way", "why"),
    )

    def __init__(self, item: Outgoing, now: float) -> None:
        self.key = item.key
        self.home = item.home
        self.todo: deque[Entry] = deque()
        self.back: list[Entry] = []
        self.under_way = 0
        self.size = FIRST
        self.queued = self.halted = self.checking = False
        self.target = self.home.name
        self.moved, self.answered = now, 0.0
        self.why, self.pause = "", 0.0

    @property
    def may_send(self) -> bool:
        """Whether the window has messages to send, and may send them."""
        if self.queued or self.halted or self.checking or self.back:
            return False
        return bool(self.todo) and self.under_way < self.size

    @property
    def is_idle(self) -> bool:
        """Whether the window can be forgotten."""
        busy = self.queued or self.halted or self.checking
        return not (busy or self.todo or self.back or self.under_way)

    def turn_back(self) -> None:
        """Move messages that came back to the front, in order, if no message is under way."""
        if self.back and not self.under_way:
            self.todo.extendleft(reversed(self.back))
            self.back = []

    def drop(self, batch: Batch) -> None:
        """Send no more messages of a batch."""
        self.todo = deque(entry for entry in self.todo if entry[0] is not batch)
        self.back = [entry for entry in self.back if entry[0] is not batch]

    def batches(self) -> list[Batch]:
        """The batches with messages to send."""
        return list({id(batch): batch for batch, _, _ in [*self.back, *self.todo]}.values())

    def lose(self) -> None:
        """Begin again with a small limit, and end all pauses: the connection is gone."""
        self.under_way, self.size = 0, FIRST
        self.halted = self.checking = False

    def next_pause(self) -> float:
        """Seconds until the place is tried again. They grow until the place takes a message."""
        if _STARTING in self.why:
            return _AGAIN
        least, most = (_SILENT, _SILENT_MOST) if self.why == SILENT else (_AGAIN, _AGAIN_MOST)
        if never_made(self.why):
            least = most
        self.pause = min(max(2 * self.pause, least), most)
        return self.pause

    @property
    def trouble(self) -> str:
        """A sentence that says what is wrong with the place."""
        name = self.home.name
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
        """Add a batch to the ends of its windows."""
        for key, group in itertools.groupby(batch.items, lambda item: item.key):
            entries = [(batch, item, False) for item in group]
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = PublishWindow(entries[0][1], now)
            window.todo += entries
            self.settle(window)

    def settle(self, window: PublishWindow) -> None:
        """Give a window its turn if it may send; forget an idle window."""
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
        """Send no more messages of a batch."""
        for window in self:
            window.drop(batch)
            self.settle(window)
