"""How much an owner wants of each place, and so how much the server may push.

Credit is what the owner holds and misses, and so follows its measured work. It grows at once. It
falls at once to what is used when the owner gives jobs back, and once a second to the most that was
needed in that second. What nobody wanted for a second goes back, so that others get it, and credit
is what is leased from then on: the end of a job brings the next one, and nothing else comes.
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
"""Seconds after which what nobody wants goes back."""


def _parts(missing: int, rows: Sequence[Sequence[QueueState]]) -> list[int]:
    """What to ask each row for: those that may have something share it; else each may bring all."""
    open_rows = [any(s.may_bring for s in row if not s.place.alone) for row in rows]
    count = sum(open_rows)
    if not count:
        return [missing] * len(rows)
    each, more = divmod(missing, count)
    turns = iter([each + 1] * more + [each] * (count - more))
    return [next(turns) if is_open else 0 for is_open in open_rows]


class Credit:
    """That of one owner, whose ``lock`` it is: whoever calls has it.

    Attributes:
        hungry: more is wanted than there was, and the owner waits for it.
        returned: what the owner gives back in this step.
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
        self._asked = 0.0  # machine time of the last want that meant to wait
        self._looking = False
        self.hungry = False
        self.returned: list[HeldMessage] = []

    def is_for(self, state: QueueState) -> bool:
        """Whether somebody waits for its messages."""
        return self.hungry and state.wanted == self._asked

    def follow(
        self, want: Want, missing: int, rows: Sequence[Sequence[QueueState]], now: float
    ) -> None:
        """Somebody wants so much more than there was.

        Of each place we ask for as much as we hold of it, and for its part of what we miss, so that
        there is little that others could have and we do not use; of less urgent ones nothing before
        the more urgent are empty. The rows come in the order of their turns.
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
                if part or not missing:  # else its turn is later, and it rests if it rested
                    grows = state.need(part, now) or grows
                break
        if grows:
            self._channel.adjust()

    def settle(self) -> None:
        """The end of a step. Who gives jobs back has more than it can use."""
        returned, self.returned = self.returned, []
        for state in {id(hold.state): hold.state for hold in returned}.values():
            returned += state.set_back(state.needs) if self.is_for(state) else state.rest()
        if returned:
            self._give_back(sorted(returned, key=lambda hold: hold.tag))
        self.see_to_it()

    def rest(self, state: QueueState) -> None:
        """Nobody wants more of it than what is leased."""
        self._give_back(state.rest())

    def _give_back(self, holds: Sequence[HeldMessage]) -> None:
        """To the front, as they stood; and no more comes than there is credit for now."""
        for hold in holds:
            self._settlement.give_back(hold)
        self._channel.adjust()

    # -- looking now and then -------------------------------------------------------------------

    def see_to_it(self) -> None:
        """Look in a second, if what comes may be more than is used."""
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
            return  # what ran when a line broke comes back first
        if not self.is_for(state) and now - state.wanted >= UNWANTED:
            self.rest(state)
        elif state.peak < state.credit:
            self._give_back(state.set_back(state.peak))
        state.peak = state.needs
