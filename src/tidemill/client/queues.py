"""Queues of messages without functions: put, get and acknowledge, as in beanstalkd."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter, QueueStats, check_users
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic import topics
from tidemill.brokers.generic.purges import (
    Purge,
    Restored,
    forget_purges,
    list_purges,
    purge,
    restore,
)
from tidemill.brokers.generic.topics import check_pattern, unbind_all
from tidemill.client.arguments import TEXT_OF_BODY, summary
from tidemill.client.display import html_table, plot, queue_facts
from tidemill.client.history import History, QueueNumbers
from tidemill.client.job_handle import Job
from tidemill.client.messages import Message, first
from tidemill.client.options import PUT_OPTIONS, Options, PutOptions
from tidemill.client.threads import in_thread
from tidemill.core.codec import pack, pack_pickle
from tidemill.core.config import Seconds, check_count, check_known, check_name, check_seconds
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.core.retry import MESSAGE
from tidemill.core.suggest import hint
from tidemill.core.words import counted
from tidemill.errors import InvalidOption, QueueFull, TidemillError
from tidemill.limits.declare import QUEUE_SETTINGS, QueueLimitChanges, QueueSettings

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class Queue:
    """One queue of raw messages, by name. Bodies are plain data and keep their types.

    ``max_size`` bounds the unfinished jobs; 0 means no bound. ``rate burst window concurrency``
    limit the starts of the queue's messages and tasks, over all workers, as in :class:`Limit`.
    ``breaker`` is a :class:`Breaker` or a number of failures. A later call keeps the settings that
    it does not give. A change at run time (:meth:`limit`) overrides the settings of the code until
    ``mill.limits.reset_queue``.
    """

    def __init__(self, runtime: Runtime, name: str, **settings: Unpack[QueueSettings]) -> None:
        check_known("a queue", settings, QUEUE_SETTINGS)
        max_size = settings.pop("max_size", None)
        self._runtime = runtime
        self.name = check_name("queue", name)
        self._options = Options(queue=name, retries=MESSAGE)
        if max_size is not None:
            check_count("max_size", max_size)
            runtime.features.need(Feature.MAX_SIZE, "max_size=")
            runtime.broker.set_queue(name, max_size=max_size)
        if settings:
            runtime.limits.declare_queue(name, settings)

    # -- producing ------------------------------------------------------------------------------

    def put(
        self, body: Any, *, timeout: Seconds | None = None, **options: Unpack[PutOptions]
    ) -> Job[Any]:
        """Store one message. The message is durable when this call returns.

        Args:
            body: plain data.
            timeout: seconds to wait for room in a queue with ``max_size``; by default none.
            options: ``id delay at ttr priority key expires retries
                limit tags headers``, and ``txn`` to store it in the caller's own transaction. With
                ``retries=5`` a message goes back to its place after its first failure. A
                ``Retries`` value has ``immediate=0, jitter=True`` unless you set them. The value
                ``Retries(5, delay=1, immediate=1, jitter=False)`` also returns the message to its
                place after its first failure.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
        """
        (job,) = self.put_many([body], timeout=timeout, **options)
        return job

    def put_many(
        self,
        bodies: Iterable[Any],
        *,
        timeout: Seconds | None = None,
        **options: Unpack[PutOptions],
    ) -> list[Job[Any]]:
        """Store many messages in one commit, all or none, in order; options as for ``put``.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: no message was stored.
        """
        runtime = self._runtime
        changed = self._options.changed("put", options, PUT_OPTIONS)
        runtime.features.use(changed)
        envelopes = [self._envelope(body, changed) for body in bodies]
        if changed.id and len(envelopes) > 1:
            raise InvalidOption("id names one message; leave it out of put_many")
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        if not envelopes:
            return []
        if seconds is None:
            return runtime.put(envelopes, changed.txn)
        if changed.txn is not None or runtime.batch_for() is not None:
            raise InvalidOption("timeout waits for room, which is not possible before the commit")
        deadline = time.monotonic() + seconds
        while True:
            try:
                return runtime.put(envelopes)
            except QueueFull:
                left = deadline - time.monotonic()
                if left <= 0 or not runtime.broker.wait_space(self.name, left):
                    raise

    def envelope(self, body: Any, **options: Unpack[PutOptions]) -> Envelope:
        """The envelope that a put with these options would store."""
        changed = self._options
        if options:
            changed = self._options.changed("put", options, PUT_OPTIONS)
            self._runtime.features.use(changed)
        return self._envelope(body, changed)

    def _envelope(self, body: Any, options: Options) -> Envelope:
        runtime = self._runtime
        envelope = options.envelope()
        envelope.body = pack_pickle(body) if runtime.pickles else pack(body)
        if len(envelope.body) <= TEXT_OF_BODY:
            envelope.text = summary((body,), {})
        if options.key is not None:
            envelope.key = options.key.of(body)
        if options.limit is not None:
            envelope.limit = runtime.limits.claim(options.limit, self.name, (body,), {})
        return runtime.seal(envelope)

    async def aput(
        self, body: Any, *, timeout: Seconds | None = None, **options: Unpack[PutOptions]
    ) -> Job[Any]:
        """As ``put``, without blocking the event loop."""
        (job,) = await self.aput_many([body], timeout=timeout, **options)
        return job

    async def aput_many(
        self,
        bodies: Iterable[Any],
        *,
        timeout: Seconds | None = None,
        **options: Unpack[PutOptions],
    ) -> list[Job[Any]]:
        """As ``put_many``, without blocking the event loop."""
        bodies = list(bodies)
        return await self._runtime.threaded_put(
            lambda: self.put_many(bodies, timeout=timeout, **options),
            options.get("txn"),
            waits=bool(timeout),
        )

    # -- consuming ------------------------------------------------------------------------------

    def get(self, timeout: Seconds | None = None) -> Message | None:
        """The next message; None after ``timeout`` seconds without a message.

        Without a timeout the call waits until a message comes or the app is closed. With
        ``timeout=0`` it returns at once.
        """
        return first(self.get_many(1, timeout))

    async def aget(self, timeout: Seconds | None = None) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return first(await self.aget_many(1, timeout))

    def get_many(self, n: int, timeout: Seconds | None = None) -> list[Message]:
        """Up to ``n`` messages (at most 1,000) in one exchange, as soon as one message is ready.

        Empty after ``timeout`` seconds without a message. Settle each message by itself.
        """
        return self._runtime.consumers.get_many([self.name], n, timeout)

    async def aget_many(self, n: int, timeout: Seconds | None = None) -> list[Message]:
        """As ``get_many``, without blocking the event loop."""
        return await self._runtime.consumers.aget_many([self.name], n, timeout)

    def __iter__(self) -> Iterator[Message]:
        """Iterate over messages until the app is closed."""
        consumers = self._runtime.consumers
        session = consumers.session
        while not session.over:
            yield from consumers.get_many([self.name], 1, None, session)

    async def __aiter__(self) -> AsyncIterator[Message]:
        consumers = self._runtime.consumers
        session = consumers.session
        while not session.over:
            for message in await consumers.aget_many([self.name], 1, None, session):
                yield message

    # -- managing -------------------------------------------------------------------------------

    def size(self) -> int:
        """The number of unfinished jobs: waiting, scheduled, ready and running."""
        self._runtime.features.need(Feature.INSPECT, "size()")
        return next((s.size for s in self._runtime.broker.stats() if s.name == self.name), 0)

    asize = in_thread(size)

    def pause(self) -> None:
        """Start no job and deliver no message until ``resume``. Puts are still accepted."""
        self._runtime.features.need(Feature.PAUSE, "pause()")
        self._runtime.broker.set_queue(self.name, paused=True)

    def resume(self) -> None:
        """Start jobs and deliver messages again."""
        self._runtime.features.need(Feature.PAUSE, "resume()")
        self._runtime.broker.set_queue(self.name, paused=False)

    def limit(self, **changes: Unpack[QueueLimitChanges]) -> None:
        """Change the limit of the queue at once: ``rate burst window concurrency breaker``.

        Settings that are not given stay; None removes a setting.

        Raises:
            InvalidOption: no setting is given, or a value cannot be used.
            FeatureMissing: the broker has no limits.
        """
        self._runtime.limits.set_queue(self.name, **changes)

    def delete(self, *, force: bool = False) -> int:
        """Delete the queue, its counters, settings and bindings; return the number of deleted jobs.

        A queue with running jobs is never deleted. A queue with other jobs, also finished jobs, is
        deleted only with ``force``, together with its jobs. The next put makes a new queue.

        Raises:
            TidemillError: the queue has jobs, or there is no such queue.
        """
        return delete_queue(self._runtime, self.name, force=force)

    # -- purging --------------------------------------------------------------------------------

    def purge(self, *, now: bool = False) -> int:
        """Remove all waiting, scheduled and ready jobs of the queue; return their number.

        The jobs are kept for some time, so that :meth:`restore` can bring them back. With ``now``
        they are deleted for good. When the store has no room to keep them, they are deleted, too,
        and a warning is logged.
        """
        return purge(self._runtime.broker, self.name, now=now).jobs

    def purges(self) -> list[Purge]:
        """The purges of the queue that can be restored, the latest first."""
        return list_purges(self._runtime.broker, self.name)

    def restore(self, purge_id: str = "") -> Restored:
        """Bring back the jobs of the latest purge, or of the named purge.

        The jobs get back their place, priority, due time and key. Their attempts begin anew.

        Raises:
            TidemillError: there is no purge to restore.
            FeatureMissing: the broker keeps no purged jobs.
        """
        return restore(self._runtime.broker, self.name, purge_id)

    # -- topics ---------------------------------------------------------------------------------

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
        self._runtime.features.need(Feature.TOPICS, what)
        return self._runtime.broker

    # -- in a notebook --------------------------------------------------------------------------

    def plot(self, since: Seconds = 3600, *, ax: Any = None) -> Any:
        """Draw how many jobs came in, and how they ended, with matplotlib; return the axes.

        Args:
            since: seconds before now at which the chart begins.
            ax: axes of matplotlib to draw into; new ones by default.

        Raises:
            FeatureMissing: the broker keeps no history.
            InvalidOption: matplotlib is not installed.
        """
        found = History(self._runtime).queues(since, queue=self.name)
        return plot(found[0] if found else QueueNumbers(self.name, 60, []), ax)

    def _repr_html_(self) -> str:
        return html_table(self, lambda: queue_facts(self._runtime.broker.stats(), self.name))

    def __repr__(self) -> str:
        return f"<queue {self.name}>"


# -- deleting ------------------------------------------------------------------------------------

_PAGE = 500


class QueueHasJobs(TidemillError):
    """The queue has jobs, so it is not deleted."""


def delete_queue(runtime: Runtime, name: str, *, force: bool) -> int:
    """Delete a queue and return the number of deleted jobs.

    A call that is killed may leave the queue with some of its jobs. The same call again completes
    the deletion.

    Raises:
        QueueHasJobs: the queue has jobs that must not be deleted.
        TidemillError: there is no such queue.
    """
    check_users(name)
    runtime.features.need(Feature.INSPECT, "deleting a queue")
    broker = runtime.broker
    rows = {row.name: row for row in broker.stats()}
    if (row := rows.get(name)) is None:
        raise no_such_queue(name, rows)
    if row.running:
        raise QueueHasJobs(
            f"queue {name!r} has {counted(row.running, 'running job')}; cancel or await them, then "
            "delete it"
        )
    if not force:
        _refuse_jobs(runtime, row)
    deleted, idle = 0, Filter(states=frozenset(State) - {State.RUNNING}, queue=name)
    while force and (records := broker.find(idle, _PAGE).records):
        deleted += sum(broker.delete([record.envelope.id for record in records]))
    if force:
        forget_purges(broker, name)
    if not broker.forget_queue(name):
        raise QueueHasJobs(f"queue {name!r} got a new job and is not deleted; try again")
    if Feature.TOPICS in broker.features:
        unbind_all(broker, name)
    return deleted


def no_such_queue(name: str, known: Iterable[str]) -> TidemillError:
    return TidemillError(f"no queue has the name {name!r} here; {hint(name, known)}")


def _refuse_jobs(runtime: Runtime, row: QueueStats) -> None:
    if row.size:
        raise QueueHasJobs(
            f"queue {row.name!r} has {counted(row.size, 'unfinished job')}; purge it first, or "
            "delete it with force, which deletes its jobs, too"
        )
    if runtime.broker.find(Filter(queue=row.name), 1).records:
        raise QueueHasJobs(
            f"queue {row.name!r} keeps finished jobs; delete it with force, which deletes them, too"
        )
