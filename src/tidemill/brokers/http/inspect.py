"""Inspection through the server: records, queues, owners and facts."""

from __future__ import annotations

from typing import Any

from tidemill.brokers.contract.inspection import Filter, Page, QueueStats
from tidemill.brokers.http.server_calls import ServerCalls
from tidemill.core.job import Record
from tidemill.core.owner import Owner


class Inspection(ServerCalls):
    """The calls of the contract that only read."""

    def get(self, job_id: str) -> Record | None:
        record: Record | None = self._call("get", job_id=job_id)
        return record

    def was_here(self, job_id: str) -> bool:
        was: bool = self._call("was_here", job_id=job_id)
        return was

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        page: Page = self._call("find", what=what, limit=limit, cursor=cursor)
        return page

    def ahead(self, job_id: str, most: int) -> int:
        number: int = self._call("ahead", job_id=job_id, most=most)
        return number

    def stats(self) -> list[QueueStats]:
        rows: list[QueueStats] = self._call("stats")
        return rows

    def owners(self) -> list[Owner]:
        owners: list[Owner] = self._call("owners")
        return owners

    def info(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._call("info")
        kept = {"store": facts.get("broker", ""), "kept_at": facts.get("url", "")}
        return {**facts, "broker": "http", "url": self.url, **kept}
