"""Bindings of queues to patterns of topics."""

from __future__ import annotations

from typing import Any

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.topics import Bindings
from tidemill.brokers.memory.part import Part


class Topics(Part):
    """The table of bindings."""

    def bind(self, queue: str, pattern: str) -> bool:
        with self._lock:
            self._jobs.check_here()
            self._jobs.queue(queue)
            return self._replace(self._jobs.bindings.bound(queue, pattern))

    def unbind(self, queue: str, pattern: str) -> bool:
        with self._lock:
            self._jobs.check_here()
            return self._replace(self._jobs.bindings.unbound(queue, pattern))

    def _replace(self, bindings: Bindings) -> bool:
        before, self._jobs.bindings = self._jobs.bindings, bindings
        return before is not bindings

    def bindings(self, *, txn: Any = None) -> Bindings:
        if txn is not None:
            raise lacks(self.url, Feature.TRANSACTIONS, "txn=")
        return self._jobs.bindings
