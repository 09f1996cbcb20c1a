"""The runtime of an app: its settings, tasks, store and threads, and the ways to put a job.

:class:`tidemill.Tidemill` is the public face of a runtime. Tasks, handles, batches, schedules and
workers hold the runtime itself. The app of a Django project overrides some of the methods here, so
that puts obey Django's transactions.
"""

from __future__ import annotations

import contextvars
import fnmatch
import functools
import logging
import re
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.registry import check_url, instrumented, open_broker
from tidemill.client.context import is_importing
from tidemill.client.declarations import Declarations
from tidemill.client.events import no_handlers
from tidemill.client.inline_jobs import InlineJobs, JobStore
from tidemill.client.job_handle import UNCOMMITTED, Job, leave_out
from tidemill.client.limits import Limits
from tidemill.client.messages import Consumers
from tidemill.client.middleware import Layer, check_middleware
from tidemill.client.options import TASK_OPTIONS, Features, Options
from tidemill.client.puts import PutBatching, Topics, envelope_of, seal
from tidemill.client.task import (
    Call,
    Configured,
    NoSuchTask,
    Task,
    import_task,
    make_task,
    refuse_second_declaration,
    task_name,
)
from tidemill.client.threads import ACTING, WAITING, Threads
from tidemill.core.config import check_app, check_known, default_url, url_from_environment
from tidemill.core.forks import after_fork, check_fork, enter_child, mark
from tidemill.core.locks import LongLock
from tidemill.core.signals import restart_on_signal
from tidemill.errors import InvalidOption
from tidemill.workflows.enqueue import enqueue_composed, enqueue_many, is_composed, txn_of

if TYPE_CHECKING:
    from tidemill.brokers.contract.store import Store
    from tidemill.client.puts import Batch, OpenBatch, PendingPuts
    from tidemill.core.envelope import Envelope, Links
    from tidemill.schedules.declare import DeclaredSchedules, Schedules

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger("tidemill")

_OWN_OPTIONS = (
    *("url", "env", "prefix", "secret_keys", "serializer", "allow_imports", "middleware", "sync"),
)


class Runtime:
    """All that one app holds; the arguments are those of :class:`tidemill.Tidemill`.

    Attributes:
        defaults: the default options of all tasks.
        keys: the keys that sign and verify jobs.
        pickles: True if the serializer is pickle.
        sync: True runs each job in its caller, and stores nothing.
        layers: the middleware, outermost first.
        event_handlers: the functions that the app calls at each event.
        local_tasks: the tasks that are declared inside functions, without a name.
        threads, waiters: the pools for calls that act, and for calls that wait.
        before_close: functions that :meth:`close` calls, to end workers.
        run_coroutine: runs the coroutine of an async task in its caller.
        worker_command: the command that starts a worker, if the app knows a better one.
        reading: True opens the broker only to read, and makes no file.
        imports_tasks: False in a job server, whose clients must not choose modules to import.
        current_batch: the open batch of the calling code, or None.
    """

    def __init__(
        self,
        url: str | None,
        *,
        env: Any,
        prefix: str,
        secret_keys: Sequence[str | bytes],
        serializer: str,
        allow_imports: Sequence[str],
        middleware: Sequence[Any],
        sync: bool,
        defaults: Mapping[str, Any],
    ) -> None:
        check_app(url, env, serializer, secret_keys, allow_imports)
        named = url_from_environment() if url is None and env is None else url
        if named is not None:  # a wrong URL raises an error here, not at the first job
            check_url(named)
        check_known("Tidemill", defaults, (*TASK_OPTIONS, *_OWN_OPTIONS))
        self.features = Features(self, named)
        given = Options().changed("Tidemill", defaults, TASK_OPTIONS)
        self.defaults, self.tasks = self.features.declare(given), dict[str, Task[..., Any]]()
        self.keys = _encoded(secret_keys)
        self.pickles = serializer == "pickle"
        self.allow_imports = tuple(allow_imports)
        self.layers: tuple[Layer, ...] = check_middleware(middleware)
        self.event_handlers = no_handlers()
        self.sync, self.inline_jobs = sync, InlineJobs()
        self.threads, self.waiters = _pools()
        self.before_close: list[Callable[[], None]] = []
        self.run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = _run_coroutine
        self.worker_command = ""
        self.local_tasks: set[str] = set()
        self.reading, self.imports_tasks = False, True
        self._url, self._found = url, url is None  # the log names a URL that the user did not give
        self._env = env, prefix
        self._broker: Store | None = None
        self._lock = LongLock()
        self.consumers = Consumers(self)
        self.put_batching = PutBatching(self)
        self.topics = Topics(self)
        self.declarations = Declarations(self)
        self.limits = Limits(self)
        self.batch_variable: contextvars.ContextVar[Batch | None] = contextvars.ContextVar(
            "tidemill_batch", default=None
        )
        _runtimes.add(self)
        if env is not None:  # open the store now: later the caller may be inside a transaction
            self._open()

    def configure(self, url: str | None, secret_keys: Sequence[str | bytes] | None) -> None:
        """Set the store and the keys: see :meth:`tidemill.Tidemill.configure`."""
        keys = self.keys if secret_keys is None else secret_keys
        serializer = "pickle" if self.pickles else "msgpack"
        check_app(url, self._env[0], serializer, keys, self.allow_imports)
        with self._lock:
            if url is not None and self._broker is not None and url != self._url:
                raise InvalidOption(
                    f"url: this app already uses {self._broker.url}; configure the app before its "
                    "first job, or close it first"
                )
            if url is not None:
                check_url(url)
                features = Features(self, url)
                for task in self.tasks.values():
                    features.declare(task.options)
                self.features, self._url, self._found = features, url, False
            self.keys = _encoded(keys)

    @functools.cached_property
    def schedules(self) -> Schedules:
        from tidemill.schedules.declare import Schedules

        return Schedules(self)

    @functools.cached_property
    def code_schedules(self) -> DeclaredSchedules:
        from tidemill.schedules.declare import DeclaredSchedules

        return DeclaredSchedules(self)

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
    def shown_url(self) -> str:
        """The URL without password and options; this opens no store."""
        if self._broker is not None:
            return self._broker.url
        url = self._url or (default_url() if self._env[0] is None else "lmdb")
        return re.sub(r"(://)[^/?#]*@", r"\1***@", url.partition("?")[0])

    @property
    def broker(self) -> Store:
        """The broker, opened at first use."""
        if not mark[0]:
            enter_child()
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
        self.inline_jobs = InlineJobs()
        try:
            if broker is not None:
                broker.close()
        finally:
            for pool in pools:
                pool.close()

    # -- tasks ----------------------------------------------------------------------------------

    def declare(
        self, function: Callable[..., Any], name: str | None, options: Options
    ) -> Task[..., Any]:
        """Declare a function as a task with checked options, under a name or its own name.

        Raises:
            InvalidOption: the name is taken, or the function cannot be a task.
        """
        own_name = task_name(function)
        name = name or own_name
        refuse_second_declaration(self.tasks.get(name), name, function)
        self.limits.check_shared(name, options.limit)
        task = self.tasks[name] = make_task(self, function, name, options)
        if name == own_name and "<locals>" in function.__qualname__:
            self.local_tasks.add(name)
        return task

    def may_import(self, path: str) -> bool:
        """True when ``allow_imports`` allows jobs that name this dotted path."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.allow_imports)

    def may_find(self, name: str) -> bool:
        """True when this app or its workers may find a task that is not declared here."""
        return self.may_import(name)

    def declared(self, name: str) -> Task[..., Any] | None:
        """The task that this app declares under a name, also in a module that it has to import."""
        return self.tasks.get(name)

    def find_task(self, name: str) -> Configured[..., Any, Any] | None:
        """The task that an import finds under a dotted path; None when there is none.

        Raises:
            Exception: the module of the task cannot be imported.
        """
        if not self.may_import(name):
            return None
        try:
            function = import_task(name)
        except NoSuchTask:
            return None
        return make_task(self, function, name, self.defaults)

    # -- enqueueing -----------------------------------------------------------------------------

    def enqueue_call(self, call: Call[Any]) -> Job[Any]:
        """Put the job of a call without hooks, and return its handle."""
        if self.sync:
            job: Job[Any] = self.run_here(call)
            return job
        return self.put([envelope_of(self, call)], call.options.txn)[0]

    def enqueue(self, node: Any) -> Any:
        """Put the jobs of a call or composition, and return the handle."""
        if not is_composed(node):
            return self.enqueue_call(node)
        return self.run_here(node) if self.sync else enqueue_composed(self, node)

    async def aenqueue(self, node: Any) -> Any:
        """As ``enqueue``, without blocking the event loop; concurrent calls share commits."""
        if isinstance(node, Call) and node.options.given is not None:
            await self.threaded(self.declarations.read, self.declarations.stale([node.task]))
        if self.sync or self.in_batch() or is_importing():
            return self.enqueue(node)
        if (txn := txn_of(node)) is not None or is_composed(node):
            return await self.threaded_put(lambda: self.enqueue(node), txn)
        put = await self.put_batching.put(envelope_of(self, node))
        return Job(self, put.id, put.placed)

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Put the jobs of many calls in one commit, and return their handles in order."""
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

    def run_here(self, node: Any) -> Any:
        """Run a call or composition at once, in the caller (``sync=True``)."""
        from tidemill.worker.inline import run_composed, run_inline  # only such an app needs it

        return run_composed(self, node) if is_composed(node) else run_inline(self, node)

    def envelope(self, call: Call[Any], job_id: str = "", links: Links | None = None) -> Envelope:
        """The envelope of a call's job: encoded, checked and signed."""
        return envelope_of(self, call, job_id, links)

    def seal(self, envelope: Envelope) -> Envelope:
        """Complete an envelope: check its size, and add its id, its time and its signature."""
        return seal(self, envelope)

    # -- putting --------------------------------------------------------------------------------

    def put(self, envelopes: Sequence[Envelope], txn: Any = None) -> list[Job[Any]]:
        """Store jobs now, or add them to the batch that :meth:`batch_for` returns."""
        if is_importing():
            why = leave_out(envelopes)
            return [Job(self, envelope.id, pending=why) for envelope in envelopes]
        batch = self.batch_for(txn)
        if batch is not None:
            jobs = batch.add(envelopes)
            if jobs is not None:
                return jobs
        if txn is not None:
            self.features.need(Feature.TRANSACTIONS, "txn=")
        pending = UNCOMMITTED if txn is not None else ""
        puts = self.broker.put(envelopes, txn=txn)
        return [Job(self, put.id, put.placed, pending=pending) for put in puts]

    @property
    def current_batch(self) -> Batch | None:
        """The open batch of the calling code, or None."""
        batch = self.batch_variable.get()
        return batch if batch is not None and batch.is_open else None

    def in_batch(self) -> bool:
        """True inside ``with mill.batch()``."""
        return self.current_batch is not None

    def batch_for(self, txn: Any = None) -> OpenBatch | None:
        """The batch that the caller's put joins; None when the put is made now.

        Raises:
            InvalidOption: ``txn`` is given inside a batch.
        """
        batch = self.current_batch
        if batch is not None and txn is not None:
            raise InvalidOption(
                "txn inside a batch: each of the two has its own commit; leave one of them out"
            )
        return batch

    def commit_batch(self, pending: PendingPuts) -> None:
        """Store the jobs and publications of a batch, at its end."""
        pending.store()

    # -- threads --------------------------------------------------------------------------------

    async def threaded_put(
        self, put: Callable[[], T], txn: Any = None, *, waits: bool = False
    ) -> T:
        """Make a blocking put for an event loop. With ``waits`` the put may wait for room."""
        if txn is not None:
            return await self.threads.in_transaction(txn, put)
        return await (self.patiently(put) if waits else self.threaded(put))

    async def threaded(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a thread of the app, not in the event loop's small pool."""
        return await self.threads.run(function, *args)

    async def patiently(self, function: Callable[..., T], *args: Any) -> T:
        """As ``threaded``, in the pool for calls that wait."""
        return await self.waiters.run(function, *args)


def _encoded(keys: Iterable[str | bytes]) -> list[bytes]:
    return [key.encode() if isinstance(key, str) else bytes(key) for key in keys]


def _run_coroutine(steps: Coroutine[Any, Any, T]) -> T:
    import asyncio

    return asyncio.run(steps)


def _pools() -> tuple[Threads, Threads]:
    return Threads("act", ACTING), Threads("wait", WAITING)


_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork_child() -> None:
    for runtime in list(_runtimes):
        runtime.after_fork_child()


after_fork(_after_fork_child)
