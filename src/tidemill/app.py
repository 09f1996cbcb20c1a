"""The app: declare tasks, enqueue calls, read jobs, exchange messages.

Each method of ``Tidemill`` hands its work to a module of ``client``, ``workflows``, ``schedules``
or ``worker``. The broker is opened at its first use.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from tidemill.brokers.contract.store import Store
from tidemill.brokers.registry import check_url, instrumented, open_broker
from tidemill.client.batch import Batch
from tidemill.client.call import Call
from tidemill.client.consumers import Consumers
from tidemill.client.context import is_importing
from tidemill.client.declarations import Declarations
from tidemill.client.envelopes import envelope_of, seal
from tidemill.client.events import Events
from tidemill.client.features import Features
from tidemill.client.found_tasks import FoundTasks
from tidemill.client.inline_jobs import InlineJobs, JobStore
from tidemill.client.job_handle import Job
from tidemill.client.limits import Limits
from tidemill.client.messaging import Messaging
from tidemill.client.middleware import Middleware, Wrapping
from tidemill.client.options import TASK_OPTIONS, Options, TaskOptions
from tidemill.client.put_batching import PutBatching
from tidemill.client.putting import Putting
from tidemill.client.reading import Reading
from tidemill.client.task import (
    AsyncTask,
    Declare,
    Task,
    call_by_name,
    make_task,
    refuse_second_declaration,
    task_name,
)
from tidemill.client.threads import ACTING, WAITING, Threads
from tidemill.client.topics import Topics
from tidemill.core.config import (
    check_app,
    check_known,
    check_name,
    default_url,
    url_from_environment,
)
from tidemill.core.envelope import Envelope, Links
from tidemill.core.forks import after_fork, check_fork
from tidemill.core.locks import LongLock
from tidemill.core.signals import restart_on_signal
from tidemill.schedules.declare import Schedules
from tidemill.schedules.parse import ScheduleOptions, Timing
from tidemill.workflows.compose import Composition
from tidemill.workflows.enqueue import (
    call_or_composition,
    enqueue_composed,
    enqueue_many,
    is_composed,
    txn_of,
)
from tidemill.workflows.handles import JobGroup

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H")
log = logging.getLogger("tidemill")

_OWN_OPTIONS = (
    *("url", "env", "prefix", "secret_keys", "serializer", "allow_imports", "middleware", "sync"),
)


class Tidemill(Putting, Messaging, Reading, Events, Wrapping, FoundTasks):
    """One app: its tasks, and the broker that stores its jobs.

    Args:
        url: the URL of the store. The default is ``$TIDEMILL_URL``. Without this variable the store
            is LMDB in a folder ``.tidemill``. This folder is beside the nearest ``pyproject.toml``
            or ``.git``, in the current folder or a folder above. Without such a file it is in the
            current folder.
        env: an ``lmdb.Environment`` of the caller to store the jobs in, instead of a URL. The
            ``max_dbs`` of the environment must leave room for 15 databases, whose names begin with
            ``prefix``.
        secret_keys: keys that sign jobs: the first key signs, all keys verify. Without keys no job
            is signed.
        serializer: ``"msgpack"``, or ``"pickle"``, which needs ``secret_keys``.
        allow_imports: patterns of dotted paths that jobs may name without a declared task.
        prefix: with ``env``, the beginning of the names of tidemill's databases.
        middleware: functions around every job, outermost first.
        sync: True runs every call at once in the caller, and stores nothing. The last 10,000 jobs,
            64 MiB at most, stay in memory, for handles and ``mill.jobs()``.
        defaults: default options of all tasks, such as ``retries=`` or ``timeout=``.

    Raises:
        InvalidOption: an option is wrong; the text names the option.
        FeatureMissing: the broker of the URL lacks a feature that an option needs.
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
        **defaults: Unpack[TaskOptions],
    ) -> None:
        Events.__init__(self)
        check_app(url, env, serializer, secret_keys, allow_imports)
        named = url_from_environment() if url is None and env is None else url
        if named is not None:  # a wrong URL raises an error here, not at the first job
            check_url(named)
        check_known("Tidemill", defaults, (*TASK_OPTIONS, *_OWN_OPTIONS))
        self.features = Features(self, named)
        given = Options().changed("Tidemill", defaults, TASK_OPTIONS)
        self.defaults, self.tasks = self.features.declare(given), dict[str, Task[..., Any]]()
        self.keys = [k.encode() if isinstance(k, str) else bytes(k) for k in secret_keys]
        self.pickles = serializer == "pickle"
        self.allow_imports = tuple(allow_imports)
        self.middleware = tuple(middleware)
        self.sync, self.inline_jobs = sync, InlineJobs()
        self.threads, self.waiters = _pools()
        self.before_close: list[Callable[[], None]] = []  # close() calls these to end workers
        self.run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run  # if sync
        self.worker_command = ""  # the command that starts a worker, if the app knows a better one
        self.local_tasks: set[str] = set()  # tasks declared inside functions, without a name
        self.reading = False  # True opens the broker only to read, and makes no file
        self._url, self._found = url, url is None  # the log names a URL that the user did not give
        self._env = env, prefix
        self._broker: Store | None = None
        self._lock = LongLock()
        self.consumers = Consumers(self)  # take messages for this process
        self.put_batching = PutBatching(self)
        self.topics = Topics(self)
        self.schedules = Schedules(self)
        self.declarations = Declarations(self)
        self.limits = Limits(self)
        self._batch: contextvars.ContextVar[Batch | None] = contextvars.ContextVar(
            "tidemill_batch", default=None
        )
        _apps.add(self)
        if env is not None:  # open the store now: later the caller may be inside a transaction
            self._open()

    def after_fork_child(self) -> None:
        """Reset the locks in a forked child, which has none of the parent's threads."""
        self._lock = LongLock()
        self.put_batching.after_fork()
        self.inline_jobs.after_fork()

    # -- the broker -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL of the store, with the password; ``broker.url`` has no password."""
        if self._url is None and self._env[0] is None:
            self._url = default_url()
        return self._url or self.broker.url

    @property
    def broker(self) -> Store:
        """The broker, opened at first use."""
        check_fork()
        return self._broker or self._open()

    @property
    def job_store(self) -> JobStore:
        """The place where handles and searches read jobs: the broker, or with ``sync=True`` the
        memory of this process."""
        return self.inline_jobs if self.sync else self.broker

    @restart_on_signal
    def _open(self) -> Store:
        env, prefix = self._env
        with self._lock:
            if self._broker is None and env is not None:
                from tidemill.brokers.lmdb import LmdbBroker

                self._broker = instrumented(LmdbBroker.around(env, prefix))
            elif self._broker is None:
                self._broker = open_broker(self.url, reading=self.reading)
                if self._found:
                    log.info("jobs are stored in %s", self._broker.url)
            return self._broker

    def close(self) -> None:
        """Close the broker. The next use opens it again; a second close does nothing."""
        check_fork()
        for end in list(self.before_close):
            end()
        self.consumers.close()
        self.limits.close()
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
    def task(
        self,
        /,
        *,
        name: str | None = None,
        schedule: Timing | None = None,
        **options: Unpack[TaskOptions],
    ) -> Declare: ...
    def task(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Declare a function, sync or async, as a task: ``@mill.task`` or ``@mill.task(queue=…)``.

        Options: ``name queue priority retries timeout expires key on_conflict unique_for max_wait
        result_ttl limit tags expects``, and ``schedule``: a cron text, seconds or a ``When``. A
        schedule runs the task without arguments.

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
        own_name = task_name(function)
        name = name or own_name
        refuse_second_declaration(self.tasks.get(name), name, function)
        self.limits.check_shared(name, options.limit)
        task = self.tasks[name] = make_task(self, function, name, options)
        if name == own_name and "<locals>" in function.__qualname__:
            self.local_tasks.add(name)
        return task

    def schedule(
        self,
        name: str,
        call: Call[Any],
        when: Timing | None = None,
        /,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Schedule a call to run repeatedly: see :meth:`Schedules.declare`."""
        self.schedules.declare(name, call, when, **options)

    # -- enqueueing -----------------------------------------------------------------------------

    def call(self, task: str, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """A call of a task, by its name or a dotted path, as a value: see ``task.call(…)``.

        This method does not read the store. The options of another app's task are in the store, and
        ``enqueue`` reads these options.

        Raises:
            TypeError: this app has the task, and the task does not take these arguments.
        """
        return call_by_name(self, task, args, kwargs)

    @overload
    def enqueue(self, call: Call[R], /) -> Job[R]: ...
    @overload
    def enqueue(self, call: Composition[H], /) -> H: ...
    @overload
    def enqueue(self, call: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    def enqueue(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Enqueue a call, a chain, a group or a flow, and return its handle.

        A call is ``task.call(…)``, or the name or dotted path of a task, followed by the arguments.

        A task of another app has the options that its worker has declared.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
            TaskNotFound: nobody has declared a task of this name; nothing was stored.
            CodecError: an argument has no encoding.
            BrokerUnavailable: the store cannot be reached; the job may be stored.
        """
        node: Any = call_or_composition(self, call, args, kwargs)
        if self.sync:
            from tidemill.worker.inline import run_composed, run_inline

            return run_composed(self, node) if is_composed(node) else run_inline(self, node)
        if is_composed(node):
            return enqueue_composed(self, node)
        return self.put([self.envelope(node)], node.options.txn)[0]

    @overload
    async def aenqueue(self, call: Call[R], /) -> Job[R]: ...
    @overload
    async def aenqueue(self, call: Composition[H], /) -> H: ...
    @overload
    async def aenqueue(self, call: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    async def aenqueue(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As ``enqueue``, without blocking the event loop; concurrent calls share commits."""
        node = call_or_composition(self, call, args, kwargs)
        if isinstance(node, Call) and node.options.given is not None:
            await self.threaded(self.declarations.read, self.declarations.stale([node.task]))
        if self.sync or self.in_batch() or is_importing():
            return self.enqueue(node)
        if (txn := txn_of(node)) is not None or is_composed(node):
            return await self.threaded_put(lambda: self.enqueue(node), txn)
        put = await self.put_batching.put(self.envelope(node))
        return Job(self, put.id, put.placed)

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Enqueue many calls in one durable commit, all or none; return handles in their order.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: no call was stored.
        """
        if self.sync:
            return [self.enqueue(call) for call in calls]
        return enqueue_many(self, calls)

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """As ``enqueue_many``, without blocking the event loop."""
        calls = list(calls)
        if self.sync or self.in_batch():
            return self.enqueue_many(calls)
        txns = [call.options.txn for call in calls if call.options.txn is not None]
        txn = txns[0] if txns else None
        return await self.threaded_put(lambda: self.enqueue_many(calls), txn)

    def batch(self) -> Batch:
        """A block whose jobs are stored in one commit at its end: ``with mill.batch():``.

        The batch takes the jobs of this thread or asyncio task. Handles exist at once. If the block
        raises, nothing is stored.

        Raises:
            TidemillError: the block is inside another batch, or waits for a job.
            DuplicateJob, QueueFull, StoreFull: raised at the end of the block; nothing was stored.
        """
        return Batch(self, self._batch)

    @property
    def current_batch(self) -> Batch | None:
        """The open batch of the calling code, or None."""
        batch = self._batch.get()
        return batch if batch is not None and batch.is_open else None

    def in_batch(self) -> bool:
        """True inside ``with mill.batch()``."""
        return self.current_batch is not None

    def envelope(self, call: Call[Any], job_id: str = "", links: Links | None = None) -> Envelope:
        """The envelope of a call's job: encoded, checked and signed."""
        return envelope_of(self, call, job_id, links)

    def seal(self, envelope: Envelope) -> Envelope:
        """Complete an envelope: check its size, and add its id, its time and its signature."""
        return seal(self, envelope)

    def group(self, group_id: str) -> JobGroup[Any]:
        """A handle on the group, or flow, with this id. This method does not read the store."""
        return JobGroup(self, check_name("id", group_id))

    def worker(
        self, concurrency: int = 4, *, queues: Sequence[str] = ()
    ) -> AbstractContextManager[object]:
        """Run a worker in threads of this process while the block lasts: ``with mill.worker():``.

        At the end of the block, running jobs have 30 s to finish; other jobs stay in the store. Use
        this method in scripts and notebooks. A service runs the command ``tidemill worker``.

        Raises:
            TidemillError: raised at the end: the worker could not serve, or a job did not end.
        """
        from tidemill.worker.in_process import PATIENCE, running_worker
        from tidemill.worker.settings import Settings

        given = Settings(concurrency=concurrency, queues=tuple(queues), shutdown_timeout=PATIENCE)
        return running_worker(self, given)


def _pools() -> tuple[Threads, Threads]:
    return Threads("act", ACTING), Threads("wait", WAITING)


_apps: weakref.WeakSet[Tidemill] = weakref.WeakSet()


def _after_fork_child() -> None:
    for mill in list(_apps):
        mill.after_fork_child()


after_fork(_after_fork_child)
