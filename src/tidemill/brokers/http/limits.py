"""Limits through the server: set and show them."""

from __future__ import annotations

from tidemill.brokers.http.server_calls import ServerCalls
from tidemill.core.limit_settings import LimitSettings
from tidemill.limits.arithmetic import Held, LimitStats


class Limits(ServerCalls):
    """The calls of the contract for limits."""

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._call("set_limit", name=name, terms=terms, queue=queue, declared=declared)

    def limits(self) -> list[LimitStats]:
        found: list[LimitStats] = self._call("limits")
        return found

    def held(self, job_id: str) -> Held | None:
        found: Held | None = self._call("held", job_id=job_id)
        return found
