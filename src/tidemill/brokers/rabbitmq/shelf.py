"""What an owner has of one place: messages the server pushed and nobody leased yet, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from tidemill.brokers.base import DEFAULT_TTR
from tidemill.brokers.rabbitmq.message import Carried
from tidemill.brokers.rabbitmq.names import Place

__all__ = ["Hold", "Shelf", "rounded"]

CREDIT_MOST, _EXACT = 4096, 16


class Hold:
    """A message in our hands: the server gives it to nobody else while the line lives.

    Attributes:
        tag, era: the server's, and of which channel; the tag is 0 when that is gone, and the
            message the server's again.
        run: what tells its message from any other, on whatever line.
        changed: its attempt was counted, and the message does not say so yet.
        deadline: machine time at which a message's ttr is over.
    """

    __slots__ = ("changed", "deadline", "era", "job", "leased", "run", "shelf", "tag", "token")

    def __init__(self, job: Carried, tag: int, era: int, shelf: Shelf) -> None:
        self.job = job
        self.tag = tag
        self.era = era
        self.shelf = shelf
        self.run = job.run
        self.token = 0
        self.leased = self.deadline = 0.0
        self.changed = False

    @property
    def ttr(self) -> float:
        """Seconds a consumer has for the message."""
        ttr = self.job.envelope.ttr
        return ttr if ttr > 0 else DEFAULT_TTR


class Shelf:
    """A place, as one owner sees it.

    Attributes:
        credit: how many messages the server may have handed out to us; 0: it is not consumed.
        consumer: its tag, and the credit it was given.
        held: how many messages of it are leased.
        empty: the server had none when it was asked, and none has come since.
        wanted: machine time at which something was last wanted of it.
        back: machine time at which a message was last sent there by ourselves.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.credit = 0
        self.consumer: tuple[str, int] = ("", 0)
        self.held = 0
        self.empty = self.asking = False
        self.wanted = self.back = 0.0
        self.arrivals = 0
        self._heap: list[tuple[int, int, Hold]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, hold: Hold) -> None:
        """A message came."""
        self.doubt()
        heapq.heappush(self._heap, (hold.job.envelope.rank, next(self._numbers), hold))

    def doubt(self) -> None:
        """The server may have something: an answer that is under way does not count."""
        self.arrivals += 1
        self.empty = self.asking = False

    def take(self) -> Hold:
        """The next one."""
        return heapq.heappop(self._heap)[2]

    def clear(self) -> Iterator[Hold]:
        """All of them, first first: given back in that order, they stand as they stood."""
        heap, self._heap = sorted(self._heap), []
        for _, _, hold in heap:
            yield hold

    def drop(self) -> None:
        """The line is gone: they are the server's again."""
        self._heap.clear()
        self.consumer = ("", 0)
        self.empty = self.asking = False


def rounded(credit: int) -> int:
    """A credit that need not change with each message: exact while it is small."""
    return min(CREDIT_MOST, credit if credit <= _EXACT else 1 << (credit - 1).bit_length())
