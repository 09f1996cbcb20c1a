"""Transfer through the server: move all jobs to another store, or adopt another store's jobs."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.schedules import Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.http.server_calls import ServerCalls
from tidemill.core.job import Record


class Transfer(ServerCalls):
    """The calls of the contract for a move between stores."""

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        departure: Departure = self._call("depart", where=where, seal=seal)
        return departure

    def stay(self) -> None:
        self._call("stay")

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        taken: list[bool] = self._call(
            "adopt", departure=departure, records=records, cursor=cursor, schedules=schedules
        )
        return taken

    def adopted(self, mark: str) -> str:
        cursor: str = self._call("adopted", mark=mark)
        return cursor
