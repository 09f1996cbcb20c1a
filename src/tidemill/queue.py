"""Messages without functions: put, get, acknowledge. As gmq, beanstalkd and the LMDB queue do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from tidemill.arguments import TEXT_OF_BODY, summary
from tidemill.brokers.base import Feature, Step
from tidemill.clock import wall_time
from tidemill.codec import pack, pack_pickle, unpack, unpack_pickle
from tidemill.config import Seconds, check_count, check_known, check_name, check_seconds, storable
from tidemill.deletion import delete_queue
from tidemill.errors import CodecError, InvalidOption, LeaseLost, QueueFull
from tidemill.job import Envelope, Lease, Outcome, Verdict
from tidemill.limits import TERMS, QueueSettings
from tidemill.options import PUT_OPTIONS, Options
from tidemill.retry import MESSAGE, Retries

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.consumers import Consumers
    from tidemill.handle import Job

__all__ = ["Message", "Queue"]


class Queue:
    """One queue of raw messages, by name. Bodies are any plain data; types are kept.

    ``max_size`` bounds its unfinished jobs; 0 means no bound. ``rate burst window concurrency``
    limit what is started of it, tasks too, over all workers (as :class:`Limit` has them), and
    ``breaker``, a :class:`Breaker` or a number of failures. What an app says of a queue adds up;
    it holds unless somebody changes the limit (:meth:`limit`): that stays, until it is given back
    to the code with ``mill.limits.reset_queue``.
    """

    def __init__(self, mill: Tidemill, name: str, **settings: Unpack[QueueSettings]) -> None:
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
        """Store one message; durable when this returns.

        Args:
            body: plain data.
            timeout: seconds to wait for room in a queue of ``max_size``; at once when not given.
            options: ``id delay at ttr priority key on_conflict unique_for max_wait expires retries
                tags headers``, and ``txn`` to store it inside the caller's own transaction.
                A ``Retries`` of your own has ``immediate=0, jitter=True`` unless you set them:
                ``Retries(5, delay=1, immediate=1, jitter=False)`` returns the message to its place
                after the first failed hand-out, as a number of retries does.

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
            raise InvalidOption("timeout waits for room, which must not be done before the commit")
        deadline = time.monotonic() + seconds
        while True:
            try:
                return mill.put(envelopes)
            except QueueFull:
                left = deadline - time.monotonic()
                if left <= 0 or not mill.broker.wait_space(self.name, left):
                    raise

    def envelope(self, body: Any, **options: Any) -> Envelope:
        """The job that a put with these options would store; nothing is stored.

        Raises:
            InvalidOption: an option is wrong; CodecError: the body cannot be encoded.
        """
        changed = self._options
        if options:
            changed = self._changed(options)
            self._mill.features.use(changed)
        return self._envelope(body, changed)

    def _changed(self, options: dict[str, Any]) -> Options:
        """The options of a put, checked. A number of retries keeps the delays of a message."""
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
            return await self._mill.threads.inside(txn, lambda: self.put_many(bodies, **options))
        bodies = list(bodies)
        run = self._mill.patiently if options.get("timeout") else self._mill.threaded
        return await run(lambda: self.put_many(bodies, **options))

    # -- consuming ------------------------------------------------------------------------------

    def get(self, timeout: Seconds | None = None) -> Message | None:
        """The next message; None when nothing came within ``timeout`` seconds."""
        return self._mill.get([self.name], timeout)

    def get_nowait(self) -> Message | None:
        """The next message if there is one."""
        return self._mill.get([self.name], 0)

    async def aget(self, timeout: Seconds | None = None) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return await self._mill.aget([self.name], timeout)

    def __iter__(self) -> Iterator[Message]:
        """Messages until the app is closed."""
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

    # -- looking after --------------------------------------------------------------------------

    def size(self) -> int:
        """Unfinished jobs: waiting, scheduled, ready and running."""
        self._mill.features.need(Feature.INSPECT, "size()")
        return next((s.size for s in self._mill.broker.stats() if s.name == self.name), 0)

    async def asize(self) -> int:
        """As ``size``, without blocking the event loop."""
        return await self._mill.threaded(self.size)

    def pause(self) -> None:
        """Hand out nothing until ``resume``; puts go on."""
        self._mill.features.need(Feature.PAUSE, "pause()")
        self._mill.broker.set_queue(self.name, paused=True)

    def resume(self) -> None:
        """Hand out again."""
        self._mill.features.need(Feature.PAUSE, "resume()")
        self._mill.broker.set_queue(self.name, paused=False)

    def limit(self, **changes: Any) -> None:
        """Change what is started of the queue, at once: ``rate burst window concurrency breaker``.

        What is not given stays; None lifts that part.
        """
        self._mill.limits.set_queue(self.name, **changes)

    def purge(self) -> int:
        """Delete everything that is not running or finished; how many that were."""
        return self._mill.broker.purge(self.name)

    def delete(self, *, force: bool = False) -> int:
        """Delete the queue with its counters and settings; returns how many jobs went with it.

        A queue with running jobs is never deleted. A queue with other jobs, also finished jobs, is
        deleted only with ``force``, and its jobs with it. The next put makes the queue anew.

        Raises:
            TidemillError: the queue has jobs, or there is no such queue.
        """
        return delete_queue(self._mill, self.name, force=force)

    def __repr__(self) -> str:
        return f"<queue {self.name}>"


class Message:
    """A leased message. As a context manager: acknowledged at the end, released on an error.

    Attributes:
        id, queue, body, key, tags, headers: as they were put.
        attempt: 1 the first time it is handed out, more after a redelivery.
        ttr: seconds to acknowledge it in, from the lease or the latest ``touch``; 0 for a message
            that is handed out at most once, and was acknowledged before it was handed out.
    """

    __slots__ = (
        *("id", "queue", "key", "tags", "headers", "attempt", "ttr"),
        *("_body", "_consumers", "_garbled", "_leased", "_owner", "_pickled", "_settled", "_token"),
    )

    def __init__(self, consumers: Consumers, owner: str, lease: Lease, envelope: Envelope) -> None:
        self._consumers = consumers
        self._owner = owner
        self._token = lease.token
        self.id = envelope.id
        self.queue = envelope.queue
        self.key = envelope.key
        self.tags = envelope.tags
        self.headers = envelope.headers
        self.attempt = lease.attempt
        self.ttr = 0.0 if envelope.at_most_once else lease.deadline
        self._body = envelope.body
        self._pickled = envelope.pickled
        self._leased = lease.leased
        self._settled = False
        self._garbled = False

    @property
    def body(self) -> Any:
        """The body.

        Raises:
            CodecError: it is not what a put of ours wrote. ``with message:`` then buries it.
        """
        try:
            # Pickled ones were verified before the message was handed out.
            return unpack_pickle(self._body) if self._pickled else unpack(self._body)
        except CodecError:
            self._garbled = True
            raise

    @property
    def at_most_once(self) -> bool:
        """True for a message that was put with ``ttr=0``."""
        return not self.ttr

    def claim(self) -> bool:
        """Acknowledge a message that is handed out at most once, before it is handed out.

        False when its lease was lost: the message is not its consumer's.
        """
        return not self.at_most_once or self._settle(Outcome.SUCCESS)

    def ack(self) -> bool:
        """It is done: forget it. False when the lease was lost; then nothing changes."""
        return self._settle(Outcome.SUCCESS)

    def release(self, delay: Seconds = 0) -> bool:
        """Put the message back into its place, after ``delay`` seconds. This counts no attempt."""
        return self._settle(Outcome.RELEASE, delay=check_seconds("delay", delay))

    def bury(self, reason: str = "buried") -> bool:
        """It cannot be done: keep it, failed, for a human to look at and kick."""
        return self._settle(Outcome.FAIL, error=str(reason))

    def touch(self, ttr: Seconds | None = None) -> bool:
        """More time: the ttr starts anew, or with another value. False when the lease was lost."""
        seconds = 0.0 if ttr is None else check_seconds("ttr", ttr)
        step = Step(self._owner, touch=[(self._token, seconds)])
        touched = self._consumers.exchange(step).touched[0]
        if touched and seconds:
            self.ttr = seconds
        return touched

    async def aack(self) -> bool:
        """As ``ack``."""
        return await self._consumers.mill.threaded(self.ack)

    async def arelease(self, delay: Seconds = 0) -> bool:
        """As ``release``."""
        return await self._consumers.mill.threaded(self.release, delay)

    async def abury(self, reason: str = "buried") -> bool:
        """As ``bury``."""
        return await self._consumers.mill.threaded(self.bury, reason)

    async def atouch(self, ttr: Seconds | None = None) -> bool:
        """As ``touch``."""
        return await self._consumers.mill.threaded(self.touch, ttr)

    def _settle(self, outcome: Outcome, *, delay: float = 0.0, error: str = "") -> bool:
        verdict = Verdict(
            self._token,
            outcome,
            delay=delay,
            error=storable(error)[:2000],
            started=self._leased,
            ended=wall_time(),
        )
        settled = self._consumers.exchange(Step(self._owner, verdicts=[verdict])).settled[0]
        self._settled = self._settled or settled
        return settled

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if self._settled:  # when it was handed out, or the block said what is to be
            return
        if error is None:
            if not self.ack():
                raise LeaseLost(
                    f"message {self.id} was not acknowledged within its ttr of {self.ttr:g} s; "
                    "another consumer may have it. Touch it while working, or put it with more ttr"
                )
        elif isinstance(error, CodecError) and self._garbled:
            self.bury(str(error))
        elif isinstance(error, Exception):
            # The store counts the attempt and delays the message by its retry policy.
            self._settle(Outcome.RETRY, error=f"{type(error).__name__}: {error}")
        else:
            self.release()  # the consumer was stopped; the message is not to blame

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        await self._consumers.mill.threaded(self.__exit__, kind, error, trace)

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue}, attempt {self.attempt}>"
