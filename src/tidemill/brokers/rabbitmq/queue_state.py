"""An owner's view of one place: the pushed messages that nobody leased yet, in order."""

from __future__ import annotations

import operator
from collections import deque

from tidemill.brokers.rabbitmq.amqp.consumers import Consumer, Stage, in_hand
from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.message import Carried
from tidemill.core.job import DEFAULT_TTR

CREDIT_MOST, _EXACT = 4096, 4
"""The most credit of a place, and the leading binary digits that a rounded credit keeps."""


class HeldMessage:
    """A message in this process. While the connection lives, no other process gets it.

    Attributes:
        tag, era: the delivery tag, and the number of its channel. The tag is 0 when the channel is
            gone and the server has the message again.
        run: the name of the message, which is the same on every connection.
        changed: True when the attempt was counted, and the message on the server has the old count.
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
        """Seconds that a consumer has for the message."""
        ttr = self.job.envelope.ttr
        return ttr if ttr > 0 else DEFAULT_TTR


_rank = operator.attrgetter("rank")


class QueueState:
    """A place, as one owner sees it.

    Attributes:
        credit: the number of messages that the server may hand out to the owner; 0: no consumer.
        trim: the consumers can bring more than the credit, so some of them must end.
        needs, peak: the credit that the latest want needed, and the most since the last look.
        resting: the owner wants no messages of the place beyond the leased messages.
        consumers: the consumers of the place, as the connection thread knows them; ``got`` counts
            the messages that were fetched one by one.
        held: the number of leased messages, without messages that the server has again.
        empty: the server had no message at the last question, and none has come since.
        asking: a question to the server has no answer yet. late: the answer is late.
        wanted: monotonic time at which somebody last wanted messages of the place.
        back: monotonic time at which this owner last sent a message there, or a consumer ended.
        begun: monotonic time at which a consumer of the place last began.
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
        """Add a message that came."""
        self.doubt()
        holds = self._holds
        if holds and hold.rank < holds[-1].rank:
            self._in_order = False
        holds.append(hold)

    def _sort(self) -> deque[HeldMessage]:
        """The messages, most urgent first, and equally urgent messages in the order of arrival."""
        if not self._in_order:
            self._holds, self._in_order = deque(sorted(self._holds, key=_rank)), True
        return self._holds

    def doubt(self) -> None:
        """Count the place as not empty, and ignore an answer that is under way."""
        self.arrivals += 1
        self.empty = self.asking = self.late = False

    @property
    def may_bring(self) -> bool:
        """Whether a message is here, or the server may have one and answers soon."""
        return bool(self._holds) or not (self.empty or self.late)

    def take(self, most: int = 1) -> list[HeldMessage]:
        """Take the next messages, ``most`` at most."""
        holds = self._sort()
        return [holds.popleft() for _ in range(min(most, len(holds)))]

    def cut(self, most: int) -> list[HeldMessage]:
        """Take out all messages except the first ``most``, in the order for their return."""
        holds = list(self._sort())
        self._holds = deque(holds[:most])
        return holds[most:]

    def drop(self) -> None:
        """Forget all messages: the connection is gone, and the server has them again."""
        self._holds.clear()
        self._begin_anew()
        self.empty = self.asking = self.late = self.resting = False

    @property
    def consumes(self) -> bool:
        """In the connection thread: whether the messages of the credit are here or can come."""
        known = [one for one in self.consumers if one.known]
        return not self.credit or bool(known) or in_hand(self.consumers) >= self.credit

    def forget(self) -> None:
        """In the connection thread: forget ended consumers whose messages are all settled."""
        self.consumers = [
            one
            for one in self.consumers
            if one.in_hand or one.stage is not Stage.ENDED or one is self.got
        ]

    # -- credit ---------------------------------------------------------------------------------

    def need(self, missing: int, now: float) -> bool:
        """Ask for ``missing`` messages besides the leased messages; True when the credit grows."""
        self.needs = 1 if self.place.alone else rounded(self.held + missing)
        self.peak = max(self.peak, self.needs)
        self.wanted, self.resting = now, False
        if self.needs <= self.credit:
            return False
        self.credit = self.needs
        return True

    def set_back(self, credit: int) -> list[HeldMessage]:
        """Lower the credit to exactly this value. Return the messages that must go back."""
        self.credit = self.peak = credit
        self.trim = True
        return self.cut(max(0, credit - self.held))

    def rest(self) -> list[HeldMessage]:
        """Lower the credit to the leased messages. Return the messages that must go back."""
        self.resting, self.empty = True, False
        self.needs = self.held
        return self.set_back(self.held)


def rounded(credit: int) -> int:
    """Round a credit up, so that the credit changes rarely. Small credits stay exact."""
    step = 1 << max(0, (credit - 1).bit_length() - _EXACT)
    return min(CREDIT_MOST, -(-credit // step) * step)
