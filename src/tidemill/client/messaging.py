"""The part of the app for messages: queues by name, and taking from several queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from tidemill.client.job_handle import Job
from tidemill.client.message import Message
from tidemill.client.messages import Queue
from tidemill.client.options import PublishOptions
from tidemill.client.runtime import Runtime
from tidemill.core.config import Seconds
from tidemill.limits.declare import QueueSettings


class Messaging:
    """The methods of :class:`tidemill.Tidemill` for messages."""

    def queue(self: Runtime, name: str, **settings: Unpack[QueueSettings]) -> Queue:
        """A queue of raw messages. The settings, if any, are stored: see :class:`Queue`.

        Raises:
            InvalidOption: the name or a setting is wrong.
            FeatureMissing: the broker lacks a feature that a setting needs.
        """
        return Queue(self, name, **settings)

    def publish(
        self: Runtime,
        topic: str,
        body: Any,
        *,
        mandatory: bool = False,
        **options: Unpack[PublishOptions],
    ) -> list[Job[Any]]:
        """Put a copy of a message into each queue that is bound to its topic, in one commit.

        Bind queues with :meth:`Queue.bind`. A queue gets one copy, however many of its patterns
        match. Each copy has an id of its own, and the topic in its header ``topic``.

        Args:
            topic: words between dots, such as ``"orders.eu.new"``.
            body: plain data.
            mandatory: True raises an error when no queue is bound to the topic.
            options: ``priority retries expires tags delay at ttr headers txn``, as for
                :meth:`Queue.put`. All copies have them.

        Returns:
            The handles of the copies; an empty list when no queue is bound. Inside a batch, the
            end of the batch fills the list.

        Raises:
            Unroutable: ``mandatory``, and no queue is bound; nothing was stored.
            QueueFull, StoreFull, InvalidOption: nothing was stored, in no queue.
            FeatureMissing: the broker has no topics.
        """
        return self.topics.publish(topic, body, mandatory=mandatory, options=options)

    async def apublish(
        self: Runtime,
        topic: str,
        body: Any,
        *,
        mandatory: bool = False,
        **options: Unpack[PublishOptions],
    ) -> list[Job[Any]]:
        """As ``publish``, without blocking the event loop."""

        def publish() -> list[Job[Any]]:
            return self.topics.publish(topic, body, mandatory=mandatory, options=options)

        return await self.threaded_put(publish, options.get("txn"))

    def get(self: Runtime, queues: Sequence[str], timeout: Seconds | None = None) -> Message | None:
        """The next message of several queues. An earlier queue goes before a later queue.

        Returns None after ``timeout`` seconds without a message; waits for ever without a timeout.

        Raises:
            BrokerUnavailable: the store cannot be reached, or another process has been writing to
                it for 30 s.
        """
        return self.consumers.get(queues, timeout)

    async def aget(
        self: Runtime, queues: Sequence[str], timeout: Seconds | None = None
    ) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return await self.consumers.aget(queues, timeout)

    def get_many(
        self: Runtime, queues: Sequence[str], n: int, timeout: Seconds | None = None
    ) -> list[Message]:
        """Up to ``n`` messages (at most 1,000) of several queues: see :meth:`Queue.get_many`."""
        return self.consumers.get_many(queues, n, timeout)

    async def aget_many(
        self: Runtime, queues: Sequence[str], n: int, timeout: Seconds | None = None
    ) -> list[Message]:
        """As ``get_many``, without blocking the event loop."""
        return await self.consumers.aget_many(queues, n, timeout)
