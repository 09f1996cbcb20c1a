"""Credit: how many messages of each place the server may push to an owner.

Credit is the number of jobs that the owner holds and misses, so it follows measured work. It grows
at once. It falls at once to the used credit when the owner returns jobs. Once a second it falls to
the highest need of that second. Messages that nobody wanted for a second go back, so that other
owners get them. From then on the credit equals the leased jobs: the end of a job brings the next
job, and nothing else comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.queue_state import HeldMessage, QueueState
from tidemill.brokers.rabbitmq.settle import Settlement
from tidemill.core.clock import machine_time
from tidemill.core.locks import RLock

__all__ = ["UNWANTED", "Credit"]

UNWANTED = 1.0
"""Seconds after which unwanted messages go back."""


def _parts(missing: int, rows: Sequence[Sequence[QueueState]]) -> list[int]:
    """The share of each row. Rows that may have messages share; if no row may, each gets all."""
    open_rows = [any(s.may_bring for s in row if not s.place.alone) for row in rows]
    count = sum(open_rows)
    if not count:
        return [missing] * len(rows)
    each, more = divmod(missing, count)
    turns = iter([each + 1] * more + [each] * (count - more))
    return [next(turns) if is_open else 0 for is_open in open_rows]


class Credit:
    """The credit of one owner, with the owner's ``lock``, which every caller holds.

    Attributes:
        hungry: the owner waits for more messages than there were.
        returned: the messages that the owner returns in this step.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        channel: ConsumerChannel,
        settlement: Settlement,
        lock: RLock,
        states: Callable[[], Sequence[QueueState]],
    ) -> None:
        self._thread = thread
        self._channel = channel
        self._settlement = settlement
        self._lock = lock
        self._states = states
        self._asked = 0.0  # machine time of the last want that waits
        self._looking = False
        self.hungry = False
        self.returned: list[HeldMessage] = []

    def is_for(self, state: QueueState) -> bool:
        """Whether the owner waits for messages of this place."""
        return self.hungry and state.wanted == self._asked

    def follow(
        self, want: Want, missing: int, rows: Sequence[Sequence[QueueState]], now: float
    ) -> None:
        """Follow a want that misses so many messages.

        The credit of a place is the messages that we hold and its share of the missing messages. So
        we hold few messages that other owners could use. A less urgent place gets no credit before
        the more urgent places are empty. The rows come in the order of their turns.
        """
        self.hungry = want.sleep and missing > 0
        if not (want.sleep and want.count):
            return
        self._asked, grows = now, False
        for row, part in zip(rows, _parts(missing, rows), strict=True):
            for state in row:
                if state.place.alone or not state.may_bring:
                    grows = state.need(part or min(1, missing), now) or grows
                    continue
                if part or not missing:  # else its turn is later, and a resting place rests on
                    grows = state.need(part, now) or grows
                break
        if grows:
            self._channel.adjust()

    def settle(self) -> None:
        """End a step. An owner that returns jobs has more than it can use."""
        returned, self.returned = self.returned, []
        for state in {id(hold.state): hold.state for hold in returned}.values():
            returned += state.set_back(state.needs) if self.is_for(state) else state.rest()
        if returned:
            self._give_back(sorted(returned, key=lambda hold: hold.tag))
        self.see_to_it()

    def rest(self, state: QueueState) -> None:
        """Lower the credit of a place to its leased messages, and return the other messages."""
        self._give_back(state.rest())

    def _give_back(self, holds: Sequence[HeldMessage]) -> None:
        """Return messages to the front in their order, and fit the consumers to the credit."""
        for hold in holds:
            self._settlement.give_back(hold)
        self._channel.adjust()

    # -- periodic look --------------------------------------------------------------------------

    def see_to_it(self) -> None:
        """Look in a second, if a place may bring more messages than are used."""
        if not self._looking and any(map(self._may_bring_more, self._states())):
            self._looking = True
            self._thread.do(lambda: self._thread.later(UNWANTED, self._look))

    def _may_bring_more(self, state: QueueState) -> bool:
        if not (len(state) or (state.credit and not state.resting)):
            return False
        return state.credit > state.needs or not self.is_for(state)

    def _look(self) -> None:
        now = machine_time()
        with self._lock, self._channel.together():
            self._looking = False
            for state in filter(self._may_bring_more, self._states()):
                self._set_back(state, now)
            self.see_to_it()

    def _set_back(self, state: QueueState, now: float) -> None:
        if not state.consumes or now - state.begun < UNWANTED:
            return  # after a broken connection, running jobs come first
        if not self.is_for(state) and now - state.wanted >= UNWANTED:
            self.rest(state)
        elif state.peak < state.credit:
            self._give_back(state.set_back(state.peak))
        state.peak = state.needs
