"""What an owner has of one place: messages the server pushed and nobody leased yet, in order."""

from __future__ import annotations

import operator
from collections import deque

from tidemill.brokers.rabbitmq.amqp.consumers import Consumer, Stage, in_hand
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.message import Carried
from tidemill.core.job import DEFAULT_TTR

__all__ = ["HeldMessage", "QueueState", "rounded"]

CREDIT_MOST, _EXACT = 4096, 4
"""The most credit a place is given; and how many of its binary digits are looked at."""


class HeldMessage:
    """A message in our hands: the server gives it to nobody else while the line lives.

    Attributes:
        tag, era: the server's, and of which channel; the tag is 0 when that is gone, and the
            message the server's again.
        run: what tells its message from any other, on whatever line.
        changed: its attempt was counted, and the message does not say so yet.
        deadline: machine time at which a message's ttr is over.
    """

    __slots__ = (
        *("changed", "deadline", "era", "job", "rank", "run"),
        *("state", "tag", "token"),
    )

    def __init__(self, job: Carried, tag: int, era: int, state: QueueState) -> None:
        self.job = job
        self.tag = tag
        self.era = era
        self.state = state
        self.run = job.run
        self.rank = job.envelope.rank
        self.token = 0
        self.deadline = 0.0
        self.changed = False

    @property
    def ttr(self) -> float:
        """Seconds a consumer has for the message."""
        ttr = self.job.envelope.ttr
        return ttr if ttr > 0 else DEFAULT_TTR


_rank = operator.attrgetter("rank")


class QueueState:
    """A place, as one owner sees it.

    Attributes:
        credit: how many messages the server may have handed out to us; 0: it is not consumed.
        trim: the server may hand out more than that, and is not to.
        needs: what credit the latest want took, and ``peak`` the most since it was last looked at.
        resting: nobody wants more of it than what is leased.
        consumers: what brings its messages, as the line's thread knows them; ``got`` stands for
            those that were asked for one by one.
        held: how many messages of it are leased, and not the server's again.
        empty: the server had none when it was asked, and none has come since.
        asking, late: the server is just being asked, and does not answer soon.
        wanted: machine time at which something was last wanted of it.
        back: machine time at which a message was last sent there by ourselves.
        begun: machine time at which a consumer of it last began.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.credit = self.needs = self.peak = 0
        self.trim = self.resting = False
        self._begin_anew()
        self.empty = self.asking = self.late = False
        self.wanted = self.back = self.begun = 0.0
        self.arrivals = 0
        self._holds: deque[HeldMessage] = deque()
        self._in_order = True

    def _begin_anew(self) -> None:
        self.held = 0
        self.got = Consumer("", 0, Stage.ENDED)
        self.consumers = [self.got]

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, hold: HeldMessage) -> None:
        """A message came."""
        self.doubt()
        holds = self._holds
        if holds and hold.rank < holds[-1].rank:
            self._in_order = False
        holds.append(hold)

    def _sort(self) -> deque[HeldMessage]:
        """Those more urgent first, and of equals those that came first."""
        if not self._in_order:
            self._holds, self._in_order = deque(sorted(self._holds, key=_rank)), True
        return self._holds

    def doubt(self) -> None:
        """The server may have something: an answer that is under way does not count."""
        self.arrivals += 1
        self.empty = self.asking = self.late = False

    @property
    def may_bring(self) -> bool:
        """Whether something is here, or the server may have something that it tells us of soon."""
        return bool(self._holds) or not (self.empty or self.late)

    def take(self, most: int = 1) -> list[HeldMessage]:
        """The next ones, at most so many."""
        holds = self._sort()
        return [holds.popleft() for _ in range(min(most, len(holds)))]

    def cut(self, most: int) -> list[HeldMessage]:
        """Those beyond so many, first first: given back in that order, they stand as they stood."""
        holds = list(self._sort())
        self._holds = deque(holds[:most])
        return holds[most:]

    def drop(self) -> None:
        """The line is gone: they are the server's again."""
        self._holds.clear()
        self._begin_anew()
        self.empty = self.asking = self.late = self.resting = False

    @property
    def consumes(self) -> bool:
        """In the line's thread: whether what there is credit for is here or can come."""
        known = [one for one in self.consumers if one.known]
        return not self.credit or bool(known) or in_hand(self.consumers) >= self.credit

    def forget(self) -> None:
        """In the line's thread: consumers that have ended, and nothing of them is in hand."""
        self.consumers = [
            one
            for one in self.consumers
            if one.in_hand or one.stage is not Stage.ENDED or one is self.got
        ]

    # -- credit ---------------------------------------------------------------------------------

    def need(self, missing: int, now: float) -> bool:
        """So many are wanted beside what is leased; True when that takes more credit."""
        self.needs = 1 if self.place.alone else rounded(self.held + missing)
        self.peak = max(self.peak, self.needs)
        self.wanted, self.resting = now, False
        if self.needs <= self.credit:
            return False
        self.credit = self.needs
        return True

    def set_back(self, credit: int) -> list[HeldMessage]:
        """Have so much credit and no more; those to be given back for it."""
        self.credit = self.peak = credit
        self.trim = True
        return self.cut(max(0, credit - self.held))

    def rest(self) -> list[HeldMessage]:
        """Nobody wants more of it: what is leased stays; those to be given back."""
        self.resting, self.empty = True, False
        self.needs = self.held
        return self.set_back(self.held)


def rounded(credit: int) -> int:
    """A credit that need not change with each message: exact while it is small."""
    step = 1 << max(0, (credit - 1).bit_length() - _EXACT)
    return min(CREDIT_MOST, -(-credit // step) * step)
