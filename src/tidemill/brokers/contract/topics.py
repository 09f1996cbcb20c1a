"""The part of the contract for topics: messages go to the queues bound to a matching pattern.

A store keeps the bindings as one table with a version, which each change replaces. The caller reads
the table, makes a copy of the message for each bound queue, and publishes the copies with the
version. The store compares the version in the commit that stores the copies. So a message reaches
all queues that were bound before it was published, or none. The caller makes the copies, since each
copy has its own id and signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put
from tidemill.core.topics import matches


class Binding(msgspec.Struct, array_like=True, frozen=True, order=True):
    """One queue that gets a copy of each message whose topic matches the pattern."""

    queue: str
    pattern: str


class Bindings(msgspec.Struct, array_like=True, frozen=True):
    """All bindings of a store, in order, and their version.

    The version is empty until the first binding is made.
    """

    version: str = ""
    table: tuple[Binding, ...] = ()

    def queues_for(self, topic: str) -> list[str]:
        """The names of the queues that are bound to a topic, in order."""
        return sorted({one.queue for one in self.table if matches(one.pattern, topic)})

    def bound(self, queue: str, pattern: str) -> Bindings:
        """The bindings with this binding added; the same object when the binding exists."""
        added = Binding(queue, pattern)
        return self if added in self.table else _changed({*self.table, added})

    def unbound(self, queue: str, pattern: str) -> Bindings:
        """The bindings without this binding; the same object when the binding does not exist."""
        gone = Binding(queue, pattern)
        return _changed({*self.table} - {gone}) if gone in self.table else self

    def without_queue(self, queue: str) -> Bindings:
        """The bindings without the bindings of a queue; the same object when the queue has none."""
        kept = {one for one in self.table if one.queue != queue}
        return self if len(kept) == len(self.table) else _changed(kept)


def _changed(table: set[Binding]) -> Bindings:
    return Bindings(new_id(), tuple(sorted(table)))


class Topics(Protocol):
    """Bindings, and putting copies to all queues that are bound."""

    def bind(self, queue: str, pattern: str) -> bool:
        """Bind a queue to a pattern, and make the queue if it is new.

        Returns False when the queue is bound to the pattern already.

        ``forget_queue`` deletes the bindings of its queue.

        Raises:
            StoreMoved: the store departs.
        """
        ...

    def unbind(self, queue: str, pattern: str) -> bool:
        """Delete a binding; False when there is no such binding.

        Raises:
            StoreMoved: the store departs.
        """
        ...

    def bindings(self, *, txn: Any = None) -> Bindings:
        """All bindings; with ``txn``, as the caller's transaction sees them."""
        ...

    def publish(
        self, jobs: Sequence[Envelope], version: str, *, txn: Any = None, nonce: str = ""
    ) -> list[Put] | None:
        """Put jobs if the bindings still have this version; else put nothing and return None.

        The step that stores the jobs compares the version, even when the list of jobs is empty.
        ``txn`` and ``nonce`` work as for ``put``. A repeated call with a ``nonce`` gets the answer
        of the call that put the jobs, even if the version has changed since then.

        Raises:
            DuplicateJob, QueueFull, StoreFull: as for ``put``; nothing was stored.
        """
        ...


def with_topics(broker: Broker, option: str) -> Topics:
    """The broker with its calls for topics.

    Raises:
        FeatureMissing: the broker keeps no bindings; the error names ``option``.
    """
    need(broker, Feature.TOPICS, option)
    return cast(Topics, broker)
