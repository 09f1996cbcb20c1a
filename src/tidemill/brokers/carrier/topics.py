"""The calls for topics that a carrying broker passes on to its store: messages are not carried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.brokers.carrier.lending import LendingStore
from tidemill.brokers.contract.topics import Bindings, with_topics
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put


class TopicCalls:
    """Passes calls on to the store."""

    store: LendingStore

    def bind(self, queue: str, pattern: str) -> bool:
        return with_topics(self.store, "bind").bind(queue, pattern)

    def unbind(self, queue: str, pattern: str) -> bool:
        return with_topics(self.store, "unbind").unbind(queue, pattern)

    def bindings(self, *, txn: Any = None) -> Bindings:
        return with_topics(self.store, "bindings").bindings(txn=txn)

    def publish(
        self, jobs: Sequence[Envelope], version: str, *, txn: Any = None, nonce: str = ""
    ) -> list[Put] | None:
        return with_topics(self.store, "publish").publish(jobs, version, txn=txn, nonce=nonce)
