"""Waits of callers that lease no jobs: for the end of jobs, and for room in a queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.rpc import LONGEST
from tidemill.brokers.http.server_calls import ServerCalls
from tidemill.core.job import Record


class Waits(ServerCalls):
    """Waits through the server. Each call waits for a while; then the broker repeats the call."""

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        until = time.monotonic() + timeout
        enough = any if first else all
        while True:
            records: list[Record | None] = self._wait("wait_for", until, ids=list(ids), first=first)
            while len(records) < len(ids):  # call again when not all records fit into one answer
                rest = list(ids[len(records) :])
                records += self._wait("wait_for", 0.0, ids=rest, first=False)
            over = enough(record is None or record.state.finished for record in records)
            if not ids or over or time.monotonic() >= until:
                return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while True:
            if self._wait("wait_space", until, queue=queue):
                return True
            if time.monotonic() >= until:
                return False

    def _wait(self, call: str, until: float, **arguments: Any) -> Any:
        """Make one call that waits, up to the server's longest wait."""
        self._check_open()
        seconds = max(0.0, min(until - time.monotonic(), LONGEST))
        return self._connections.call(call, extra=seconds, timeout=seconds, **arguments)
