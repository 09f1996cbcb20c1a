"""How much an owner wants of each place, and so how much the server may push.

Credit is what the owner holds and misses, and so follows its measured work. It grows at once. It
falls at once to what is used when the owner gives jobs back, and once a second to the most that was
needed in that second. What nobody wanted for a second goes back, so that others get it, and credit
is what is leased from then on: the end of a job brings the next one, and nothing else comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.brokers.base import Want
from tidemill.brokers.rabbitmq.ends import Ends
from tidemill.brokers.rabbitmq.line import Line
from tidemill.brokers.rabbitmq.shelf import Hold, Shelf
from tidemill.brokers.rabbitmq.tap import Tap
from tidemill.clock import machine_time
from tidemill.locks import RLock

__all__ = ["UNWANTED", "Appetite"]

UNWANTED = 1.0
"""Seconds after which what nobody wants goes back."""


def _parts(missing: int, rows: Sequence[Sequence[Shelf]]) -> list[int]:
    """What to ask each row for: those that may have something share it; else each may bring all."""
    open_rows = [any(s.may_bring for s in row if not s.place.alone) for row in rows]
    count = sum(open_rows)
    if not count:
        return [missing] * len(rows)
    each, more = divmod(missing, count)
    turns = iter([each + 1] * more + [each] * (count - more))
    return [next(turns) if is_open else 0 for is_open in open_rows]


class Appetite:
    """That of one owner, whose ``lock`` it is: whoever calls has it.

    Attributes:
        hungry: more is wanted than there was, and the owner waits for it.
        returned: what the owner gives back in this step.
    """

    def __init__(
        self,
        line: Line,
        tap: Tap,
        ends: Ends,
        lock: RLock,
        shelves: Callable[[], Sequence[Shelf]],
    ) -> None:
        self._line = line
        self._tap = tap
        self._ends = ends
        self._lock = lock
        self._shelves = shelves
        self._asked = 0.0  # machine time of the last want that meant to wait
        self._looking = False
        self.hungry = False
        self.returned: list[Hold] = []

    def is_for(self, shelf: Shelf) -> bool:
        """Whether somebody waits for its messages."""
        return self.hungry and shelf.wanted == self._asked

    def follow(self, want: Want, missing: int, rows: Sequence[Sequence[Shelf]], now: float) -> None:
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
            for shelf in row:
                if shelf.place.alone or not shelf.may_bring:
                    grows = shelf.need(part or min(1, missing), now) or grows
                    continue
                if part or not missing:  # else its turn is later, and it rests if it rested
                    grows = shelf.need(part, now) or grows
                break
        if grows:
            self._tap.adjust()

    def settle(self) -> None:
        """The end of a step. Who gives jobs back has more than it can use."""
        returned, self.returned = self.returned, []
        for shelf in {id(hold.shelf): hold.shelf for hold in returned}.values():
            returned += shelf.set_back(shelf.needs) if self.is_for(shelf) else shelf.rest()
        if returned:
            self._give_back(sorted(returned, key=lambda hold: hold.tag))
        self.see_to_it()

    def rest(self, shelf: Shelf) -> None:
        """Nobody wants more of it than what is leased."""
        self._give_back(shelf.rest())

    def _give_back(self, holds: Sequence[Hold]) -> None:
        """To the front, as they stood; and no more comes than there is credit for now."""
        for hold in holds:
            self._ends.give_back(hold)
        self._tap.adjust()

    # -- looking now and then -------------------------------------------------------------------

    def see_to_it(self) -> None:
        """Look in a second, if what comes may be more than is used."""
        if not self._looking and any(map(self._may_bring_more, self._shelves())):
            self._looking = True
            self._line.do(lambda: self._line.later(UNWANTED, self._look))

    def _may_bring_more(self, shelf: Shelf) -> bool:
        if not (len(shelf) or (shelf.credit and not shelf.resting)):
            return False
        return shelf.credit > shelf.needs or not self.is_for(shelf)

    def _look(self) -> None:
        now = machine_time()
        with self._lock, self._tap.together():
            self._looking = False
            for shelf in filter(self._may_bring_more, self._shelves()):
                self._set_back(shelf, now)
            self.see_to_it()

    def _set_back(self, shelf: Shelf, now: float) -> None:
        if not shelf.consumes or now - shelf.begun < UNWANTED:
            return  # what ran when a line broke comes back first
        if not self.is_for(shelf) and now - shelf.wanted >= UNWANTED:
            self.rest(shelf)
        elif shelf.peak < shelf.credit:
            self._give_back(shelf.set_back(shelf.peak))
        shelf.peak = shelf.needs
