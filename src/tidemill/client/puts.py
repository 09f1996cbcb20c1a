"""Make jobs and messages, and put them: at once, together with others, or in a batch.

A publish puts a copy of a message into each queue that is bound to its topic, in one commit. Put
batching lets concurrent puts from event loops share commits: while one commit is under way, further
puts wait and go into the next. A batch stores its jobs in one commit at its end.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.topics import Bindings, bindings, check_topic
from tidemill.client.arguments import TEXT_OF_BODY, pack_checked_call, summary
from tidemill.client.context import is_importing
from tidemill.client.events import headers_of
from tidemill.client.job_handle import UNCOMMITTED, Job
from tidemill.client.options import PUBLISH_OPTIONS, Options
from tidemill.client.task import Call, warn_if_local
from tidemill.core.clock import clock, new_id
from tidemill.core.codec import (
    check_size,
    pack,
    pack_pickle,
    pack_pickle_call,
    pack_plain_call,
    sign,
)
from tidemill.core.commit_delay import EACH_CLIENT, CommitDelay
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope, Links
from tidemill.core.forks import check_fork
from tidemill.core.job import Put
from tidemill.core.locks import Lock
from tidemill.core.retry import MESSAGE
from tidemill.core.signals import SignalsDeferred
from tidemill.errors import InvalidOption, TidemillError, Unroutable

if TYPE_CHECKING:
    import asyncio

    from tidemill.runtime import Runtime


# -- envelopes -------------------------------------------------------------------------------------


def envelope_of(
    runtime: Runtime, call: Call[object], job_id: str = "", links: Links | None = None
) -> Envelope:
    """The envelope of a call's job. If ``job_id`` is empty, the call's options may give the id."""
    if call.missing is not None:
        raise call.missing
    options = call.options
    if options.given is not None:
        runtime.features.use(options)  # before the store is asked for the declared options
        options = runtime.declarations.complete(call.task, options)
    runtime.features.use(options)
    args, kwargs = call.args, call.kwargs
    if runtime.local_tasks and call.task in runtime.local_tasks:
        warn_if_local(runtime, call.task)
    envelope = options.envelope()
    envelope.task = call.task
    if runtime.event_handlers["enqueue"]:
        envelope.headers = headers_of(
            runtime.event_handlers["enqueue"], call, options.queue, options.tags
        )
    envelope.body = _body(runtime, call)
    if options.key is not None:
        envelope.key = options.key.of(*args, **kwargs)
    if options.limit is not None:
        envelope.limit = runtime.limits.claim(options.limit, call.task, args, kwargs)
    if len(envelope.body) <= TEXT_OF_BODY:
        envelope.text = summary(args, kwargs)
    if job_id:
        envelope.id = check_name("id", job_id)
    envelope.links = links
    return seal(runtime, envelope)


def _body(runtime: Runtime, call: Call[object]) -> bytes:
    if runtime.pickles:
        return pack_pickle_call(call.args, call.kwargs)
    body = pack_plain_call(call.args, call.kwargs)
    if body is not None:
        return body
    task = runtime.tasks.get(call.task)
    arguments = None if task is None else task.arguments
    return pack_checked_call(call.task, arguments, call.args, call.kwargs)


def seal(runtime: Runtime, envelope: Envelope) -> Envelope:
    """Complete an envelope: check its size, and add its id, its time and its signature."""
    check_size(envelope.body, envelope.headers, envelope.tags)
    envelope.id = envelope.id or new_id()
    envelope.created = clock.wall()
    envelope.pickled = runtime.pickles
    if runtime.keys:
        envelope.signature = sign(envelope, runtime.keys[0])
    return envelope


# -- publishing ------------------------------------------------------------------------------------

TOPIC = "topic"  # the header in each copy that holds the topic
_MOST_TOPICS = 10_000  # the most topics whose queues an app remembers

_ONE_QUEUE_ONLY = ("id", "key", "limit")

_MESSAGE = Options(retries=MESSAGE)


class Publication:
    """One published message: options and body, and handles of the copies once they are stored."""

    def __init__(self, topic: str, template: Envelope, *, mandatory: bool) -> None:
        self.topic = topic
        self.mandatory = mandatory
        self.jobs: list[Job[Any]] = []
        self._template = template

    def copies(self, runtime: Runtime, queues: Sequence[str]) -> list[Envelope]:
        """A copy for each queue; ``jobs`` become the handles of these copies."""
        copies = [
            runtime.seal(msgspec.structs.replace(self._template, queue=queue)) for queue in queues
        ]
        self.jobs[:] = [Job(runtime, copy.id) for copy in copies]
        return copies


class Topics:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known = 0, Bindings().queues_for  # of the bindings that the app read last

    def publish(
        self, topic: str, body: Any, *, mandatory: bool, options: Mapping[str, Any]
    ) -> list[Job[Any]]:
        """Publish one message; see :meth:`tidemill.Tidemill.publish`."""
        runtime = self._runtime
        runtime.features.need(Feature.TOPICS, "publish")
        checked = _checked(options)
        runtime.features.use(checked)
        topic = check_topic(topic)
        made = self._publication(topic, body, checked, mandatory=mandatory)
        if is_importing():
            return runtime.put(made.copies(runtime, [topic]))
        batch = runtime.batch_for(checked.txn)
        if batch is not None and batch.publish(made):
            return made.jobs
        if checked.txn is not None:
            runtime.features.need(Feature.TRANSACTIONS, "txn=")
        for job, put in zip(made.jobs, self.put([made], checked.txn), strict=True):
            job.placed = put.placed
        return made.jobs

    def _publication(
        self, topic: str, body: Any, options: Options, *, mandatory: bool
    ) -> Publication:
        template = options.envelope()
        template.headers = {**options.headers, TOPIC: topic}
        template.body = pack_pickle(body) if self._runtime.pickles else pack(body)
        if len(template.body) <= TEXT_OF_BODY:
            template.text = summary((body,), {})
        return Publication(topic, template, mandatory=mandatory)

    def put(self, parts: Sequence[Envelope | Publication], txn: Any = None) -> list[Put]:
        """Store jobs and the copies of publications in one commit, in order.

        Returns the puts of the jobs and of all copies.
        """
        bound = bindings(self._runtime.broker)
        version, queues_for = self._known
        if bound.version != version:
            queues_for = functools.lru_cache(_MOST_TOPICS)(bound.queues_for)
            self._known = bound.version, queues_for
        jobs: list[Envelope] = []
        for part in parts:
            if isinstance(part, Envelope):
                jobs.append(part)
                continue
            jobs += part.copies(self._runtime, queues_for(part.topic))
            if part.mandatory and not part.jobs:
                raise Unroutable(
                    f"no queue is bound to the topic {part.topic!r}, so nothing was stored; bind a "
                    "queue, or publish without mandatory"
                )
        return self._runtime.broker.put(jobs, txn=txn)


def _checked(given: Mapping[str, Any]) -> Options:
    for name in _ONE_QUEUE_ONLY:
        if given.get(name) is not None:
            raise InvalidOption(
                f"publish takes no {name}: it would hold for one message, and publish may store "
                "several; put the message into a queue with this option"
            )
    checked = _MESSAGE.changed("publish", given, PUBLISH_OPTIONS)
    if TOPIC in checked.headers:
        raise InvalidOption(f"publish sets the header {TOPIC!r} itself; choose another name")
    return checked


# -- sharing commits -------------------------------------------------------------------------------


class _WaitingPut(NamedTuple):
    envelope: Envelope
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Put]


class PutBatching:
    """The asynchronous puts of one app, from all its event loops."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiting: collections.deque[_WaitingPut] = collections.deque()
        self._busy = threading.Lock()
        self._commit_delay = CommitDelay(EACH_CLIENT)

    async def put(self, envelope: Envelope) -> Put:
        import asyncio

        check_fork()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Put] = loop.create_future()
        self._waiting.append(_WaitingPut(envelope, loop, future))
        self._commit_delay.arrived(len(self._waiting))
        if not self._busy.locked():
            self._start()
        return await future

    def _start(self) -> None:
        with SignalsDeferred():
            if self._busy.acquire(blocking=False):
                try:
                    self._runtime.threads.start(self._work)
                except BaseException:  # no thread could be started
                    self._busy.release()
                    raise

    def after_fork(self) -> None:
        """Forget the waiting puts in a forked child: the parent stores them."""
        self._waiting.clear()
        self._busy = threading.Lock()
        self._commit_delay = CommitDelay(EACH_CLIENT)

    def _work(self) -> None:
        while True:
            try:
                while self._waiting:
                    self._put_all([self._waiting.popleft() for _ in range(len(self._waiting))])
                    # Wait even without a pending put: starting a thread again costs more.
                    self._commit_delay.wait(self._waiting)
            finally:
                self._busy.release()
            # A put just before the release saw a busy thread and started none, so check again.
            if not self._waiting or not self._busy.acquire(blocking=False):
                return

    def _put_all(self, batch: list[_WaitingPut]) -> None:
        answers: list[Put | Exception]
        begun = time.monotonic()
        try:
            answers = list(self._runtime.broker.put([waiting.envelope for waiting in batch]))
        except Exception:  # no job was stored, so put each job alone: then only bad jobs fail
            answers = [self._put_one(waiting.envelope) for waiting in batch]
        self._commit_delay.expect(len(batch), len(self._waiting), time.monotonic() - begun)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Put], Any]]] = {}
        for waiting, answer in zip(batch, answers, strict=True):
            by_loop.setdefault(waiting.loop, []).append((waiting.future, answer))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_answer, pairs)

    def _put_one(self, envelope: Envelope) -> Put | Exception:
        try:
            return self._runtime.broker.put([envelope])[0]
        except Exception as error:
            return error


def _answer(pairs: list[tuple[asyncio.Future[Put], Any]]) -> None:
    with SignalsDeferred():
        for future, answer in pairs:
            if future.cancelled():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


# -- batches ---------------------------------------------------------------------------------------


class PendingPuts:
    """The jobs and publications that one commit stores, in order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._parts: list[Envelope | Publication] = []
        self._handles: list[list[Job[Any]]] = []  # of each part

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]]:
        jobs: list[Job[Any]] = [
            Job(self._runtime, envelope.id, pending=UNCOMMITTED) for envelope in envelopes
        ]
        self._parts += envelopes
        self._handles += [[job] for job in jobs]
        return jobs

    def publish(self, made: Publication) -> None:
        """Add a publication. Its queues are found when the publication is stored."""
        self._parts.append(made)
        self._handles.append(made.jobs)

    def holds(self, job_id: str) -> bool:
        return any(job.id == job_id for handles in self._handles for job in handles)

    def names(self) -> list[str]:
        """The task and the id of each job, and the topic of each publication, in order."""
        return [
            f"publication {part.topic}"
            if isinstance(part, Publication)
            else f"{part.task or 'message'} {part.id}"
            for part in self._parts
        ]

    def store(self, txn: Any = None) -> None:
        """Store all in one commit, or in the caller's transaction, and complete the handles.

        Raises:
            DuplicateJob, QueueFull, StoreFull, Unroutable: nothing was stored.
        """
        if not self._parts:
            return
        jobs = [part for part in self._parts if isinstance(part, Envelope)]
        if len(jobs) == len(self._parts):
            puts = self._runtime.broker.put(jobs, txn=txn)
        else:
            puts = self._runtime.topics.put(self._parts, txn)
        pending = UNCOMMITTED if txn is not None else ""
        for job, put in zip(itertools.chain(*self._handles), puts, strict=True):
            job.confirm(put.id, put.placed, pending=pending)  # a key may keep an older job


class OpenBatch(Protocol):
    """What a put may join: a batch, or in a Django project a transaction."""

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]] | None:
        """Add jobs; None when the batch has ended."""

    def publish(self, made: Publication) -> bool:
        """Add a publication; False when the batch has ended."""
        ...


class Batch:
    """A context manager for ``with``, and for ``async with`` in event loops."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._current = runtime.batch_variable
        self._lock = Lock()
        self._open = False
        self._pending = PendingPuts(runtime)

    def add(self, envelopes: Sequence[Envelope]) -> list[Job[Any]] | None:
        """Add jobs; None when the batch has ended.

        An asyncio task that began inside the batch keeps the batch in its context, also after the
        end.
        """
        with self._lock:
            if not self._open:
                return None
            return self._pending.add(envelopes)

    def publish(self, made: Publication) -> bool:
        """Add a publication; False when the batch has ended. The commit finds the queues."""
        with self._lock:
            if self._open:
                self._pending.publish(made)
            return self._open

    def holds(self, job_id: str) -> bool:
        """True while the job is in the open batch, and not in the store."""
        return self._open and self._pending.holds(job_id)

    @property
    def is_open(self) -> bool:
        """True between the batch's start and end."""
        return self._open

    def __enter__(self) -> None:
        around = self._current.get()
        if around is not None and around.is_open:
            raise TidemillError(
                "a batch inside a batch: leave the inner batch out, the outer one commits all"
            )
        if self._pending:
            raise TidemillError("this batch has ended; mill.batch() makes a new batch")
        try:
            with SignalsDeferred():
                self._open = True
                self._token = self._current.set(self)
        except BaseException:  # a signal handler has raised
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None:
            self._commit()

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is None:
            await self._runtime.threaded_put(self._commit)

    def _end(self) -> None:
        try:
            self._leave()
        except BaseException:  # a signal handler has raised
            self._leave()  # a batch that stays open would take later jobs
            raise

    def _leave(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._current.reset(self._token)

    def _commit(self) -> None:
        if self._pending:
            self._runtime.commit_batch(self._pending)
