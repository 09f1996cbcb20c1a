"""The part of the contract that moves all jobs and schedules of a store to another store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.brokers.contract.schedules import Schedule
from tidemill.core.job import Record


class Departure(msgspec.Struct, array_like=True, frozen=True):
    """The move of a whole store to another store.

    Attributes:
        mark: the id of this move.
        where: the URL of the target, as errors show it.
        last: the highest sequence number of a job in the source.
        sealed: True when the source changes nothing any more, not even by timers.
    """

    mark: str
    where: str
    last: int = 0
    sealed: bool = False


class Transfer(Protocol):
    """Both ends of a move: the source gives its jobs away, the target adopts them."""

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        """Stop accepting, leasing and changing jobs, since all jobs move to ``where``.

        Running jobs still end, and workers get the command ``quiet``. ``delete`` works until the
        seal. ``seal`` also stops timers and pruning. A second call returns the ``Departure`` of the
        first call.

        Raises:
            StoreMoved: the store is on its way to another target.
        """
        ...

    def stay(self) -> None:
        """Cancel the move: the store works again."""
        ...

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        """Store jobs of the source unchanged, together with the cursor, in one commit.

        The jobs keep their order and come after the jobs of this store. Bounds such as ``max_size``
        do not apply. No job may be running. Schedules are stored with new versions. The reply has
        an answer for each job, then for each schedule. False means that the job or schedule was not
        stored, since its id, key or name is taken here.
        """
        ...

    def adopted(self, mark: str) -> str:
        """The cursor of the last ``adopt`` with this mark; empty when nothing was adopted."""
        ...
