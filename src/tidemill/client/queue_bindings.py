"""Bind queues to patterns of topics (:mod:`.topics` publishes the messages)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic import topics
from tidemill.client.threads import in_thread
from tidemill.core.topics import check_pattern

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class BoundQueue:
    """The part of a queue that binds it to patterns of topics."""

    _mill: Runtime
    name: str

    def bind(self, pattern: str) -> bool:
        """Bind the queue to a pattern: the queue gets a copy of each message to a matching topic.

        In a pattern ``*`` stands for exactly one word of a topic, and ``#`` for any number of
        words. Returns False if the queue is already bound to the pattern.
        """
        return topics.bind(self._store("bind()"), self.name, check_pattern(pattern))

    def unbind(self, pattern: str) -> bool:
        """Delete a binding; False when there is no such binding. The queue's messages stay."""
        return topics.unbind(self._store("unbind()"), self.name, check_pattern(pattern))

    def bindings(self) -> list[str]:
        """The patterns that the queue is bound to, in order."""
        table = topics.bindings(self._store("bindings()")).table
        return [one.pattern for one in table if one.queue == self.name]

    abind = in_thread(bind)
    aunbind = in_thread(unbind)
    abindings = in_thread(bindings)

    def _store(self, what: str) -> Store:
        self._mill.features.need(Feature.TOPICS, what)
        return self._mill.broker
