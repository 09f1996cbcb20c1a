"""The app: where tasks are declared, calls become jobs, and the broker is opened at first use."""

from __future__ import annotations

import contextvars
import fnmatch
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from tidemill.arguments import TEXT_OF_BODY, summary
from tidemill.batch import Batch
from tidemill.brokers.base import Broker, Feature, Filter, Page, QueueStats, check_url, open_broker
from tidemill.clock import new_id, wall_time
from tidemill.codec import pack_call, pack_pickle_call, sign
from tidemill.compose import Composition
from tidemill.config import (
    Seconds,
    check_app,
    check_known,
    check_name,
    check_size,
    default_url,
    url_from_environment,
)
from tidemill.consumers import Consumers
from tidemill.deferral import restarted
from tidemill.enqueuing import enqueue_composed, enqueue_many, given, is_composed, txn_of
from tidemill.errors import InvalidOption
from tidemill.features import Features
from tidemill.finding import Found
from tidemill.gathered import GatheredPuts
from tidemill.groups import JobGroup
from tidemill.handle import Job
from tidemill.inline import run_inline
from tidemill.job import Envelope, Links
from tidemill.limits import Limits, QueueSettings
from tidemill.locks import LongLock
from tidemill.middleware import Middleware
from tidemill.options import TASK_OPTIONS, Options
from tidemill.queue import Message, Queue
from tidemill.schedules.book import Schedules
from tidemill.task import (
    AsyncTask,
    Call,
    Declare,
    Task,
    doubt,
    make_task,
    no_such_task,
    task_name,
)
from tidemill.threads import ACTING, WAITING, Threads

__all__ = ["Tidemill"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H")
log = logging.getLogger("tidemill")

_OWN_OPTIONS = (
    *("url", "env", "prefix", "secret_keys", "serializer", "allow_imports", "middleware", "sync"),
)


class Tidemill:
    """One app on one broker.

    Args:
        url: where the jobs live; ``$TIDEMILL_URL`` when not given, else LMDB in ``.tidemill``
            beside the nearest ``pyproject.toml`` or ``.git`` upward, else here.
        env: the caller's own ``lmdb.Environment`` to live in, instead of a URL; ``prefix`` leads
            the names of our databases in it. It needs ``max_dbs`` of at least 16 more than it uses.
        secret_keys: keys to sign jobs with; the first signs, all verify. Without keys nothing is
            signed.
        serializer: ``"msgpack"``, or ``"pickle"``, which needs ``secret_keys``.
        allow_imports: patterns of dotted paths that jobs may name without a declared task.
        middleware: layers around every job, outermost first.
        sync: True runs every call at once, in the caller, and stores nothing.
        defaults: options all tasks start from, as ``retries=`` or ``timeout=``.

    Raises:
        InvalidOption: an option is wrong; the sentence names it.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        env: Any = None,
        prefix: str = "tidemill-",
        secret_keys: Sequence[str | bytes] = (),
        serializer: str = "msgpack",
        allow_imports: Sequence[str] = (),
        middleware: Sequence[Middleware] = (),
        sync: bool = False,
        **defaults: Any,
    ) -> None:
        check_app(url, env, serializer, secret_keys, allow_imports)
        named = url_from_environment() if url is None and env is None else url
        if named is not None:  # a mistake is seen here, not at the first job
            check_url(named)
        check_known("Tidemill", defaults, (*TASK_OPTIONS, *_OWN_OPTIONS))
        self.features = Features(self, named)
        given = Options().changed("Tidemill", defaults, TASK_OPTIONS)
        self.defaults, self.tasks = self.features.declare(given), dict[str, Task[..., Any]]()
        self.keys = [k.encode() if isinstance(k, str) else bytes(k) for k in secret_keys]
        self.pickles = serializer == "pickle"
        self.allow_imports = tuple(allow_imports)
        self.middleware = tuple(middleware)
        self.sync = sync
        self.threads, self.waiters = _pools()
        self.before_close: list[Callable[[], None]] = []  # ends the workers of this process
        self.inner: set[str] = set()  # tasks declared inside functions, that nobody named
        self.looking = False  # True: its broker is opened to read, so no file is made
        self._url, self._found = url, url is None  # a url that was looked for is worth a log line
        self._env = env, prefix
        self._broker: Broker | None = None
        self._lock = LongLock()
        self.consumers = Consumers(self)  # the owners this process takes messages by
        self.gathered = GatheredPuts(self)
        self.schedules = Schedules(self)
        self.limits = Limits(self)
        self._batch: contextvars.ContextVar[Batch | None] = contextvars.ContextVar(
            "tidemill_batch", default=None
        )
        _apps.add(self)
        if env is not None:  # at first use the caller may be inside a transaction, too late to open
            self._open()

    def after_fork_child(self) -> None:
        """In a forked child: no lock is held and nobody is at work there."""
        self._lock = LongLock()
        self.gathered.after_fork()

    # -- the broker -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the jobs live, password and all; ``broker.url`` may be shown."""
        if self._url is None and self._env[0] is None:
            self._url = default_url()
        return self._url or self.broker.url

    @property
    def broker(self) -> Broker:
        """The broker, opened at first use."""
        return self._broker or self._open()

    @restarted
    def _open(self) -> Broker:
        env, prefix = self._env
        with self._lock:
            if self._broker is None and env is not None:
                from tidemill.brokers.lmdb import LmdbBroker

                self._broker = LmdbBroker.around(env, prefix)
            elif self._broker is None:
                self._broker = open_broker(self.url, reading=self.looking)
                if self._found:
                    log.info("jobs live in %s", self._broker.url)
            return self._broker

    def close(self) -> None:
        """Give up the broker; it is opened again when next needed. Idempotent."""
        for end in list(self.before_close):
            end()
        self.consumers.close()
        with self._lock:
            broker, self._broker = self._broker, None
            pools = self.threads, self.waiters
            self.threads, self.waiters = _pools()
        try:
            if broker is not None:
                broker.close()
        finally:
            for pool in pools:
                pool.close()

    def __enter__(self) -> Tidemill:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- declaring ------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, /, *, name: str | None = None, **options: Any) -> Declare: ...
    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Declare a function, sync or async, as a task: ``@mill.task`` or ``@mill.task(queue=…)``.

        Options: ``name queue priority retries timeout expires key on_conflict unique_for max_wait
        result_ttl tags``, and ``schedule``: a cron text, seconds or a ``When``, to run it without
        arguments.

        Raises:
            InvalidOption: an option is wrong, the name is taken, or the function is a lambda.
        """
        check_known("a task", options, (*TASK_OPTIONS, "name", "schedule"))
        name, schedule = options.pop("name", None), options.pop("schedule", None)
        checked = self.features.declare(self.defaults.changed("a task", options, TASK_OPTIONS))
        if name is not None:
            check_name("task name", name)

        def declare(function: Callable[..., Any]) -> Task[..., Any]:
            task = self._declare(function, name, checked)
            if schedule is not None:
                self.schedules.declare_own(task.name, task.call(), schedule)
            return task

        return declare(function) if function is not None else declare

    def _declare(
        self, function: Callable[..., Any], name: str | None, options: Options
    ) -> Task[..., Any]:
        own = task_name(function)
        name = name or own
        before = self.tasks.get(name)
        if before is not None and (
            before.function.__module__ != function.__module__
            or before.function.__qualname__ != function.__qualname__
        ):
            raise InvalidOption(
                f"task {name!r} is declared twice: by {before.function.__module__}."
                f"{before.function.__qualname__} and by {own}; give one another name="
            )
        self.limits.check_shared(name, options.limit)
        task = self.tasks[name] = make_task(self, function, name, options)
        if name == own and "<locals>" in function.__qualname__:
            self.inner.add(name)
        return task

    def schedule(self, name: str, call: Call[Any], when: Any = None, /, **options: Any) -> None:
        """Have a call made again and again: see :meth:`Schedules.declare`."""
        self.schedules.declare(name, call, when, **options)

    def may_import(self, path: str) -> bool:
        """True when jobs may name this dotted path without a declared task."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.allow_imports)

    # -- enqueueing -----------------------------------------------------------------------------

    def call(self, task: str, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """The call of a task by its name, or of a dotted path, not made: as ``task.call(…)``.

        Raises:
            InvalidOption: there is no such task, and ``allow_imports`` does not allow the path.
            TypeError: the task does not take these arguments.
        """
        known = self.tasks.get(task)
        if known is not None:
            return known.call(*args, **kwargs)
        check_name("task", task)
        if not self.may_import(task):
            raise no_such_task(self, task)
        return Call(task, args, kwargs, self.defaults)

    @overload
    def enqueue(self, call: Call[R], /) -> Job[R]: ...
    @overload
    def enqueue(self, call: Composition[H], /) -> H: ...
    @overload
    def enqueue(self, call: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    def enqueue(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Enqueue a call, or a dotted path (or the name of a task) with its arguments.

        Or a chain, a group, a flow; then the handle is that of all of it.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
            CodecError: an argument has no encoding.
        """
        what: Any = given(self, call, args, kwargs)
        if is_composed(what):
            return enqueue_composed(self, what)
        if self.sync:
            return run_inline(self, what)
        return self.put([self.envelope(what)], what.options.txn)[0]

    @overload
    async def aenqueue(self, call: Call[R], /) -> Job[R]: ...
    @overload
    async def aenqueue(self, call: Composition[H], /) -> H: ...
    @overload
    async def aenqueue(self, call: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    async def aenqueue(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As ``enqueue``, without blocking the event loop; concurrent calls share commits."""
        what = given(self, call, args, kwargs)
        if self.sync or self.in_batch():
            return self.enqueue(what)
        if (txn := txn_of(what)) is not None:
            return await self.threads.inside(txn, lambda: self.enqueue(what))
        if is_composed(what):
            return await self.threaded(enqueue_composed, self, what)
        put = await self.gathered.put(self.envelope(what))
        return Job(self, put.id, put.placed)

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Enqueue many calls in one durable commit, all or none, in order."""
        if self.sync:
            return [self.enqueue(call) for call in calls]
        return enqueue_many(self, calls)

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """As ``enqueue_many``, without blocking the event loop."""
        calls = list(calls)
        if self.sync or self.in_batch():
            return self.enqueue_many(calls)
        for txn in [call.options.txn for call in calls if call.options.txn is not None]:
            return await self.threads.inside(txn, lambda: self.enqueue_many(calls))
        return await self.threaded(lambda: self.enqueue_many(calls))

    def batch(self) -> Batch:
        """Everything enqueued inside, by this thread or task, becomes one commit at the end.

        Handles are given at once; an exception inside stores nothing; waiting inside is an error.
        """
        return Batch(self, self._batch)

    @property
    def current_batch(self) -> Batch | None:
        """The batch this code runs in."""
        batch = self._batch.get()
        return batch if batch is not None and batch.is_open else None

    def in_batch(self) -> bool:
        """True inside ``with mill.batch()``."""
        return self.current_batch is not None

    def put(self, envelopes: Sequence[Envelope], txn: Any = None) -> list[Job[Any]]:
        """Store jobs, now or with the batch: the one way in."""
        batch = self._batch.get()
        if batch is not None:
            if txn is not None and batch.is_open:
                raise InvalidOption("txn inside a batch: both say what commits; leave one out")
            jobs = batch.add(envelopes)
            if jobs is not None:
                return jobs
        if txn is not None:
            self.features.need(Feature.TRANSACTIONS, "txn=")
        return [Job(self, put.id, put.placed) for put in self.broker.put(envelopes, txn=txn)]

    def envelope(self, call: Call[Any], job_id: str = "", links: Links | None = None) -> Envelope:
        """The job that stands for a call: encoded, checked, signed."""
        if call.lacks is not None:
            raise call.lacks
        options = call.options
        self.features.use(options)
        args, kwargs = call.args, call.kwargs
        if self.inner and call.task in self.inner:
            doubt(self, call.task)
        envelope = options.envelope()
        envelope.task = call.task
        encode = pack_pickle_call if self.pickles else pack_call
        envelope.body = encode(args, kwargs)
        if not isinstance(options.key, str):
            envelope.key = check_name("key", options.key(*args, **kwargs))
        if options.limit is not None:
            envelope.limit = self.limits.claim(options.limit, call.task, args, kwargs)
        if len(envelope.body) <= TEXT_OF_BODY:
            envelope.text = summary(args, kwargs)
        if job_id:
            envelope.id = check_name("id", job_id)
        envelope.links = links
        return self.seal(envelope)

    def seal(self, envelope: Envelope) -> Envelope:
        """What every job of this app gets at last: an id, its time, a signature."""
        check_size(envelope.body, envelope.headers, envelope.tags)
        envelope.id = envelope.id or new_id()
        envelope.created = wall_time()
        envelope.pickled = self.pickles
        if self.keys:
            envelope.signature = sign(envelope, self.keys[0])
        return envelope

    # -- looking --------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job[Any]:
        """A handle on the job with this id; nothing is read yet."""
        return Job(self, check_name("id", job_id))

    def group(self, group_id: str) -> JobGroup[Any]:
        """A handle on the group, or flow, with this id; nothing is read yet."""
        return JobGroup(self, check_name("id", group_id))

    def find(self, what: Filter | None = None, *, limit: int = 100, cursor: str = "") -> Page:
        """Records of jobs, newest first."""
        return self.broker.find(what or Filter(), limit, cursor)

    def jobs(self, **what: Any) -> Found:
        """Handles of all jobs that match, newest first: :class:`Found` says by what."""
        return Found(self, **what)

    def queues(self) -> list[QueueStats]:
        """Every queue in numbers."""
        return self.broker.stats()

    # -- messages -------------------------------------------------------------------------------

    def queue(self, name: str, **settings: Unpack[QueueSettings]) -> Queue:
        """A queue of raw messages, and the settings that hold for it from now on: see ``Queue``."""
        return Queue(self, name, **settings)

    def get(self, queues: Sequence[str], timeout: Seconds | None = None) -> Message | None:
        """The next message of several queues: all of the first before any of the second.

        Returns None when nothing came within ``timeout`` seconds; without one, waits for ever.
        Raises BrokerUnavailable when another process holds an LMDB store's write lock as long.
        """
        return self.consumers.get(queues, timeout)

    async def aget(self, queues: Sequence[str], timeout: Seconds | None = None) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return await self.consumers.aget(queues, timeout)

    # -- asyncio --------------------------------------------------------------------------------

    async def threaded(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a thread of this app's own: never in the loop's small pool."""
        return await self.threads.run(function, *args)

    async def patiently(self, function: Callable[..., T], *args: Any) -> T:
        """As ``threaded``, for a call that waits: it takes no thread from those that act."""
        return await self.waiters.run(function, *args)


def _pools() -> tuple[Threads, Threads]:
    return Threads("act", ACTING), Threads("wait", WAITING)


_apps: weakref.WeakSet[Tidemill] = weakref.WeakSet()


def _after_fork_child() -> None:
    for mill in list(_apps):
        mill.after_fork_child()


os.register_at_fork(after_in_child=_after_fork_child)
