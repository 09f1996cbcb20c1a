"""Schedules through the server: list and change them."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.http.server_calls import ServerCalls


class Schedules(ServerCalls):
    """The calls of the contract for schedules."""

    def wall(self) -> float:
        now: float = self._call("wall")
        return now

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        found: list[Schedule | None] = self._call("schedules", names=list(names))
        return found

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        found: list[Schedule] = self._call("list_schedules", after=after, limit=limit)
        return found

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        done: list[Changed] = self._call("change_schedules", changes=changes)
        return done
