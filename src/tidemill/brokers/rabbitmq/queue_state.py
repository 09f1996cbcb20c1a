"""An owner's view of one place: the pushed messages that nobody leased yet, and the consumers.

The prefetch of a consumer cannot change, so the credit of a place is several consumers
(``docs/design/rabbitmq.md``). Messages of an ended consumer stay with the owner.

    begun ──(cancel)──► ending ──(cancel-ok)──► ended ──(none of its messages in hand)──► forgotten

No new consumer begins before the cancel-ok: its messages would overtake messages that went back. A
full consumer brings no more messages, so a new consumer may begin when it is told to end.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

from tidemill.brokers.rabbitmq.layout import Place
from tidemill.brokers.rabbitmq.message import Carried
from tidemill.core.job import DEFAULT_TTR

_PART = 64  # a new consumer has at least 1/64 of the credit, so that a place has few consumers

_TINY = 4
"""A full consumer ends if its prefetch is less than 1/4 of a new consumer's prefetch. Each consumer
costs the server its own step."""


class Stage(enum.Enum):
    """The stage of a consumer's life."""

    BEGUN = enum.auto()
    ENDING = enum.auto()
    ENDED = enum.auto()


class Consumer:
    __slots__ = ("in_hand", "known", "prefetch", "stage", "tag")

    def __init__(self, tag: str, prefetch: int, stage: Stage = Stage.BEGUN) -> None:
        self.tag = tag
        self.prefetch = prefetch
        self.in_hand = 0  # the number of its messages that are neither acknowledged nor returned
        self.known = False  # True when the server has said that the consumer has begun
        self.stage = stage

    @property
    def room(self) -> int:
        """The number of messages that the consumer may bring before an acknowledgement."""
        return self.prefetch - self.in_hand if self.stage is Stage.BEGUN else 0


def in_hand(consumers: Sequence[Consumer]) -> int:
    """The number of messages in hand from these consumers."""
    return sum([one.in_hand for one in consumers])


def plan(
    consumers: Sequence[Consumer], credit: int, *, trim: bool = False
) -> tuple[list[Consumer], int]:
    """Choose the consumers that end, and the prefetch of a consumer that begins, or 0."""
    # With ``trim`` the consumers then bring no more than the credit; without ``trim`` a little
    # more.
    begun = [one for one in consumers if one.stage is Stage.BEGUN]
    if not credit:
        return begun, 0
    part = credit // _PART
    spare = sum([one.in_hand + one.room for one in consumers]) - credit
    if spare > (0 if trim else part):
        ends: list[Consumer] = []
        for one in sorted(begun, key=lambda one: -one.room):
            if spare <= 0 or one.room <= 0:
                break
            ends.append(one)
            spare -= one.room
        return ends, 0
    if spare >= 0 or any(one.stage is Stage.ENDING for one in consumers):
        return [], 0
    begins = max(-spare, part)
    return [one for one in begun if one.room <= 0 and one.prefetch * _TINY < begins], begins


CREDIT_MOST, _EXACT = 4096, 4
"""The most credit of a place, and the leading binary digits that a rounded credit keeps."""


class HeldMessage:
    """A message in this process. While the connection lives, no other process gets it."""

    __slots__ = ("changed", "deadline", "era", "job", "run", "state", "tag", "token")

    def __init__(self, job: Carried, tag: int, era: int, state: QueueState) -> None:
        self.job = job
        # tag, era: the delivery tag, and the number of its channel. The tag is 0 when the channel
        # is gone and the server has the message again.
        self.tag = tag
        self.era = era
        self.state = state
        self.run = job.run  # the name of the message, which is the same on every connection
        self.token = 0
        self.deadline = 0.0  # machine time at which a message's ttr is over
        # True when the attempt was counted, and the message on the server has the old count.
        self.changed = False

    @property
    def ttr(self) -> float:
        """Seconds that a consumer has for the message."""
        ttr = self.job.envelope.ttr
        return ttr if ttr > 0 else DEFAULT_TTR


class QueueState:
    """A place, as one owner sees it. Times are monotonic."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.credit = 0  # messages that the server may hand out to the owner; 0: no consumer
        self.needs = self.peak = 0  # the credit for the latest want; the most since the last look
        self.trim = False  # the consumers can bring more than the credit, so some of them must end
        self.resting = False  # the owner wants no messages beyond the leased messages
        self._begin_anew()
        self.empty = False  # no message at the last question to the server, and none came since
        self.asking = self.late = False  # a question has no answer yet; the answer is late
        self.wanted = 0.0  # when somebody last wanted messages of the place
        self.back = 0.0  # when this owner last sent a message there, or a consumer ended
        self.begun = 0.0  # when a consumer of the place last began
        self.arrivals = 0
        self._holds: deque[HeldMessage] = deque()

    def _begin_anew(self) -> None:
        self.held = 0  # leased messages, without messages that the server has again
        # ``got`` counts the messages that were fetched one by one.
        self.got = Consumer("", 0, Stage.ENDED)
        self.consumers = [self.got]

    def __len__(self) -> int:
        return len(self._holds)

    def add(self, hold: HeldMessage) -> None:
        self.arrivals += 1  # an answer that is under way is out of date
        self.empty = self.asking = self.late = False
        self._holds.append(hold)

    @property
    def may_bring(self) -> bool:
        """Whether a message is here, or the server may have one and answers soon."""
        return bool(self._holds) or not (self.empty or self.late)

    def take(self, most: int = 1) -> list[HeldMessage]:
        return [self._holds.popleft() for _ in range(min(most, len(self._holds)))]

    def cut(self, most: int) -> list[HeldMessage]:
        """Take out all messages except the first ``most``, in the order for their return."""
        holds = list(self._holds)
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
