"""Credit: the number of messages of each place that the server may push to an owner.

Credit is the number of jobs that the owner holds, plus the jobs that it still wants. Credit grows
at once. When the owner returns jobs, credit falls at once to the used credit. Once a second credit
falls to the highest need of this second. Messages that the owner did not want for a second go back,
so that other owners get these. After this the credit is the number of leased jobs, and the place
rests: no further messages come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.rabbitmq.amqp.channel import ConsumerChannel
from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.queue_state import HeldMessage, QueueState
from tidemill.brokers.rabbitmq.settle import Settlement
from tidemill.core.locks import RLock

UNWANTED = 1.0
"""Seconds after which unwanted messages go back."""


def _parts(missing: int, rows: Sequence[Sequence[QueueState]]) -> list[int]:
    """The share of each row of places. Only rows that may have messages share.

    If no row may have messages, each row gets the whole number.
    """
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
        hungry: the owner waits, because it wanted more messages than had come.
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
        self._asked = 0.0  # monotonic time of the last want whose owner waits
        self._looking = False
        self.hungry = False
        self.returned: list[HeldMessage] = []

    def is_for(self, state: QueueState) -> bool:
        """Whether the owner waits for messages of this place."""
        return self.hungry and state.wanted == self._asked

    def follow(
        self, want: Want, missing: int, rows: Sequence[Sequence[QueueState]], now: float
    ) -> None:
        """Set the credit for a want that lacks ``missing`` messages.

        The credit of a place is the number of messages that the owner holds, plus the place's share
        of the missing messages. So the owner holds few messages that other owners could use. A less
        urgent place gets no credit before the more urgent places are empty. The rows come in the
        order of their turns.
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
                # A place without a part of the missing messages gets its turn later, and rests.
                if part or not missing:
                    grows = state.need(part, now) or grows
                break
        if grows:
            self._channel.adjust()

    def settle(self) -> None:
        """End a step: lower the credit of an owner that returned jobs, since it has too many."""
        returned, self.returned = self.returned, []
        for state in {id(hold.state): hold.state for hold in returned}.values():
            returned += state.set_back(state.needs) if self.is_for(state) else state.rest()
        if returned:
            self._give_back(sorted(returned, key=lambda hold: hold.tag))
        self.plan_look()

    def rest(self, state: QueueState) -> None:
        """Lower the credit of a place to its leased messages, and return the other messages."""
        self._give_back(state.rest())

    def _give_back(self, holds: Sequence[HeldMessage]) -> None:
        """Return messages to the front in their order, and fit the consumers to the credit."""
        for hold in holds:
            self._settlement.give_back(hold)
        self._channel.adjust()

    # -- periodic look --------------------------------------------------------------------------

    def plan_look(self) -> None:
        """Look in a second, if a place may bring more messages than the owner uses."""
        if not self._looking and any(map(self._may_bring_more, self._states())):
            self._looking = True
            self._thread.do(lambda: self._thread.later(UNWANTED, self._look))

    def _may_bring_more(self, state: QueueState) -> bool:
        if not (len(state) or (state.credit and not state.resting)):
            return False
        return state.credit > state.needs or not self.is_for(state)

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock, self._channel.together():
            self._looking = False
            for state in filter(self._may_bring_more, self._states()):
                self._set_back(state, now)
            self.plan_look()

    def _set_back(self, state: QueueState, now: float) -> None:
        if not state.consumes or now - state.begun < UNWANTED:
            # Leave a new consumer alone: after a reconnect, the messages of running jobs come
            # first.
            return
        if not self.is_for(state) and now - state.wanted >= UNWANTED:
            self.rest(state)
        elif state.peak < state.credit:
            self._give_back(state.set_back(state.peak))
        state.peak = state.needs
