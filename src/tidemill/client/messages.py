"""Queues of messages without functions: put, get and acknowledge, as in beanstalkd."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Unpack

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.client.arguments import TEXT_OF_BODY, summary
from tidemill.client.job_handle import Job
from tidemill.client.message import Message
from tidemill.client.options import PUT_OPTIONS, Options
from tidemill.client.queue_deletion import delete_queue
from tidemill.client.runtime import Runtime
from tidemill.core.codec import pack, pack_pickle
from tidemill.core.config import (
    Seconds,
    check_count,
    check_known,
    check_name,
    check_seconds,
)
from tidemill.core.errors import InvalidOption, QueueFull
from tidemill.core.job import Envelope
from tidemill.core.retry import MESSAGE, Retries
from tidemill.limits.declare import TERMS, QueueSettings

__all__ = ["Queue"]


class Queue:
    """One queue of raw messages, by name. Bodies are plain data and keep their types.

    ``max_size`` bounds the unfinished jobs; 0 means no bound. ``rate burst window concurrency``
    limit the starts of the queue's messages and tasks, over all workers, as in :class:`Limit`.
    ``breaker`` is a :class:`Breaker` or a number of failures. Settings of several calls add up. A
    change at run time (:meth:`limit`) goes before them, until ``mill.limits.reset_queue``.
    """

    def __init__(self, mill: Runtime, name: str, **settings: Unpack[QueueSettings]) -> None:
        check_known("a queue", settings, ("max_size", *TERMS))
        max_size = settings.pop("max_size", None)
        self._mill = mill
        self.name = check_name("queue", name)
        self._options = Options(queue=name, retries=MESSAGE)
        if max_size is not None:
            check_count("max_size", max_size)
            mill.features.need(Feature.MAX_SIZE, "max_size=")
            mill.broker.set_queue(name, max_size=max_size)
        if settings:
            mill.limits.declare_queue(name, settings)

    # -- producing ------------------------------------------------------------------------------

    def put(self, body: Any, *, timeout: Seconds | None = None, **options: Any) -> Job[Any]:
        """Store one message. It is durable when this returns.

        Args:
            body: plain data.
            timeout: seconds to wait for room in a queue with ``max_size``; default none.
            options: ``id delay at ttr priority key on_conflict unique_for max_wait expires retries
                tags headers``, and ``txn`` to store it inside the caller's own transaction.
                A ``Retries`` value has ``immediate=0, jitter=True`` unless you set them. With
                ``Retries(5, delay=1, immediate=1, jitter=False)`` a message goes back to its place
                after its first failure, as it does with a number of retries.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
        """
        (job,) = self.put_many([body], timeout=timeout, **options)
        return job

    def put_many(
        self, bodies: Iterable[Any], *, timeout: Seconds | None = None, **options: Any
    ) -> list[Job[Any]]:
        """Store many messages in one commit, all or none, in order; options as for ``put``."""
        mill = self._mill
        changed = self._changed(options)
        mill.features.use(changed)
        envelopes = [self._envelope(body, changed) for body in bodies]
        if changed.id and len(envelopes) > 1:
            raise InvalidOption("id names one message; leave it out of put_many")
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        if not envelopes:
            return []
        if seconds is None:
            return mill.put(envelopes, changed.txn)
        if mill.in_batch() or changed.txn is not None:
            raise InvalidOption("timeout waits for room, which is not possible before the commit")
        deadline = time.monotonic() + seconds
        while True:
            try:
                return mill.put(envelopes)
            except QueueFull:
                left = deadline - time.monotonic()
                if left <= 0 or not mill.broker.wait_space(self.name, left):
                    raise

    def envelope(self, body: Any, **options: Any) -> Envelope:
        """The envelope that a put with these options would store.

        Raises:
            InvalidOption: an option is wrong; CodecError: the body cannot be encoded.
        """
        changed = self._options
        if options:
            changed = self._changed(options)
            self._mill.features.use(changed)
        return self._envelope(body, changed)

    def _changed(self, options: dict[str, Any]) -> Options:
        """Check the options of a put. A number of retries keeps the delays of messages."""
        changed = self._options.changed("put", options, PUT_OPTIONS)
        if options.get("retries") is None or isinstance(options["retries"], Retries):
            return changed
        retries = msgspec.structs.replace(MESSAGE, limit=changed.retries.limit)
        return msgspec.structs.replace(changed, retries=retries)

    def _envelope(self, body: Any, options: Options) -> Envelope:
        mill = self._mill
        envelope = options.envelope()
        envelope.body = pack_pickle(body) if mill.pickles else pack(body)
        if len(envelope.body) <= TEXT_OF_BODY:
            envelope.text = summary((body,), {})
        if callable(options.key):
            envelope.key = check_name("key", options.key(body))
        if options.limit is not None:
            envelope.limit = mill.limits.claim(options.limit, self.name, (body,), {})
        return mill.seal(envelope)

    async def aput(self, body: Any, **options: Any) -> Job[Any]:
        """As ``put``, without blocking the event loop."""
        (job,) = await self.aput_many([body], **options)
        return job

    async def aput_many(self, bodies: Iterable[Any], **options: Any) -> list[Job[Any]]:
        """As ``put_many``, without blocking the event loop."""
        if (txn := options.get("txn")) is not None:
            return await self._mill.threads.in_transaction(
                txn, lambda: self.put_many(bodies, **options)
            )
        bodies = list(bodies)
        run = self._mill.patiently if options.get("timeout") else self._mill.threaded
        return await run(lambda: self.put_many(bodies, **options))

    # -- consuming ------------------------------------------------------------------------------

    def get(self, timeout: Seconds | None = None) -> Message | None:
        """The next message; None after ``timeout`` seconds without one."""
        return self._mill.consumers.get([self.name], timeout)

    def get_nowait(self) -> Message | None:
        """The next message; None if there is none now."""
        return self._mill.consumers.get([self.name], 0)

    async def aget(self, timeout: Seconds | None = None) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return await self._mill.consumers.aget([self.name], timeout)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until the app is closed."""
        consumers = self._mill.consumers
        session = consumers.session
        while not session.over:
            message = consumers.get([self.name], None, session=session)
            if message is not None:
                yield message

    async def __aiter__(self) -> AsyncIterator[Message]:
        consumers = self._mill.consumers
        session = consumers.session
        while not session.over:
            message = await consumers.aget([self.name], None, session)
            if message is not None:
                yield message

    # -- managing -------------------------------------------------------------------------------

    def size(self) -> int:
        """The number of unfinished jobs: waiting, scheduled, ready and running."""
        self._mill.features.need(Feature.INSPECT, "size()")
        return next((s.size for s in self._mill.broker.stats() if s.name == self.name), 0)

    async def asize(self) -> int:
        """As ``size``, without blocking the event loop."""
        return await self._mill.threaded(self.size)

    def pause(self) -> None:
        """Start no job and deliver no message until ``resume``. Puts go on."""
        self._mill.features.need(Feature.PAUSE, "pause()")
        self._mill.broker.set_queue(self.name, paused=True)

    def resume(self) -> None:
        """Start jobs and deliver messages again."""
        self._mill.features.need(Feature.PAUSE, "resume()")
        self._mill.broker.set_queue(self.name, paused=False)

    def limit(self, **changes: Any) -> None:
        """Change the limit of the queue at once: ``rate burst window concurrency breaker``.

        Settings that are not given stay; None removes one.
        """
        self._mill.limits.set_queue(self.name, **changes)

    def purge(self) -> int:
        """Delete all jobs that are neither running nor finished, and return their number."""
        return self._mill.broker.purge(self.name)

    def delete(self, *, force: bool = False) -> int:
        """Delete the queue with its counters and settings; returns the number of deleted jobs.

        A queue with running jobs is never deleted. A queue with other jobs, also finished jobs, is
        deleted only with ``force``, together with its jobs. The next put makes a new queue.

        Raises:
            TidemillError: the queue has jobs, or there is no such queue.
        """
        return delete_queue(self._mill, self.name, force=force)

    def __repr__(self) -> str:
        return f"<queue {self.name}>"
