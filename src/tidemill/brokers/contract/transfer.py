"""The part of the contract that moves all jobs and schedules of a store to another store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.brokers.contract.schedules import Schedule
from tidemill.core.job import Record

__all__ = ["Departure", "Transfer"]


class Departure(msgspec.Struct, array_like=True, frozen=True):
    """The move of a whole store to another store.

    Attributes:
        mark: the id of this departure.
        where: the URL of the target, as errors show it.
        last: the highest sequence number that the source has used.
        sealed: True when nothing at all changes in the source any more.
    """

    mark: str
    where: str
    last: int = 0
    sealed: bool = False


class Transfer(Protocol):
    """Both ends of a move: the source departs, the target adopts."""

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        """Stop accepting, leasing and changing jobs, since all jobs go to ``where``.

        Running jobs still end, and workers get the command ``quiet``. ``seal`` also stops timers
        and pruning. A second call returns the departure that has begun.

        Raises:
            StoreMoved: the store is on its way to another target.
        """
        ...

    def stay(self) -> None:
        """Cancel a departure."""
        ...

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        """Store jobs of a departed store unchanged, together with the cursor, as one step.

        The jobs keep their order and come behind the jobs that were here before. Bounds such as
        ``max_size`` do not apply. No record is running. False: not stored, since the id or the key
        is taken here. Then the schedules follow, with new versions; False where the name is taken.
        """
        ...

    def adopted(self, mark: str) -> str:
        """The cursor of the last ``adopt`` of a departure; empty when there was none."""
        ...
