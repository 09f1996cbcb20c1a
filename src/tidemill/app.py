"""The app: declare tasks, enqueue calls, read jobs, exchange messages.

``Tidemill`` is the public face of a :class:`tidemill.runtime.Runtime`, which holds the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.brokers.contract.store import Store
from tidemill.client.events import EnqueueHandler, Event, ProcessHandler, handler_of
from tidemill.client.history import History
from tidemill.client.inline_jobs import move_due
from tidemill.client.job_handle import Job
from tidemill.client.messages import Message, first
from tidemill.client.middleware import Middleware, check_middleware
from tidemill.client.options import TASK_OPTIONS, PublishOptions, TaskOptions
from tidemill.client.puts import Batch
from tidemill.client.queues import Queue
from tidemill.client.search import Found, SearchOptions, users_queues
from tidemill.client.task import AsyncTask, Call, Declare, Task, call_by_name
from tidemill.core.config import Seconds, check_known, check_name
from tidemill.core.words import counted
from tidemill.limits.declare import QueueSettings
from tidemill.runtime import Runtime
from tidemill.workflows.compose import Composition
from tidemill.workflows.enqueue import call_or_composition
from tidemill.workflows.handles import JobGroup

if TYPE_CHECKING:
    from tidemill.schedules.declare import Schedules
    from tidemill.schedules.parse import ScheduleOptions, Timing

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H")
Order = Literal["strict", "fair", "merged"]
Around = TypeVar("Around", bound=Middleware)
OnProcess = TypeVar("OnProcess", bound=ProcessHandler)
OnEnqueue = TypeVar("OnEnqueue", bound=EnqueueHandler)

_SHOWN = 10
"""The most tasks that the text of an app names."""


class Tidemill:
    """One app: its tasks, and the broker that stores its jobs.

    Args:
        url: the URL of the store. The default is ``$TIDEMILL_URL``. Without this variable the store
            is LMDB in a folder ``.tidemill``. This folder is beside the nearest ``pyproject.toml``
            or ``.git``, in the current folder or a folder above. Without such a file it is in the
            current folder.
        env: an ``lmdb.Environment`` of the caller to store the jobs in, instead of a URL. The
            ``max_dbs`` of the environment must leave room for 16 databases, whose names begin with
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
        self.runtime = self._make_runtime(
            url=url,
            env=env,
            prefix=prefix,
            secret_keys=secret_keys,
            serializer=serializer,
            allow_imports=allow_imports,
            middleware=middleware,
            sync=sync,
            defaults=defaults,
        )
        self.limits = self.runtime.limits
        self.sync, self.middleware = sync, middleware

    def _make_runtime(self, **settings: Any) -> Runtime:
        """The parts of the app; the app of a Django project makes others."""
        return Runtime(**settings)

    def __repr__(self) -> str:
        names = sorted(self.tasks)
        shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
        tasks = counted(len(names), "task") + (f": {shown}" if names else "")
        return f"<Tidemill {self.runtime.shown_url}, {tasks}>"

    # -- settings -------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL of the store, with the password; ``broker.url`` has no password."""
        return self.runtime.url

    @property
    def broker(self) -> Store:
        """The broker, opened at first use."""
        return self.runtime.broker

    @property
    def tasks(self) -> Mapping[str, Task[..., Any]]:
        """The declared tasks, by name."""
        return self.runtime.tasks

    @property
    def sync(self) -> bool:
        """True runs every call at once in the caller, and stores nothing; may be set."""
        return self.runtime.sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        # ``mock.patch.object`` restores only what stands in the dict of the instance.
        vars(self)["sync"] = self.runtime.sync = sync

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """The functions around every job, outermost first."""
        layers = self.runtime.layers
        return tuple(layer.middleware for layer in layers if layer.middleware is not None)

    @middleware.setter
    def middleware(self, middleware: Sequence[Middleware]) -> None:
        self.runtime.layers = check_middleware(middleware)
        vars(self)["middleware"] = self.middleware

    def configure(
        self, url: str | None = None, *, secret_keys: Sequence[str | bytes] | None = None
    ) -> None:
        """Set the store, or the keys, after the tasks are declared: for app factories.

        None changes nothing. The other arguments are those of the class. ``sync`` and
        ``middleware`` may be set at any time.

        Raises:
            InvalidOption: a value is wrong, or the app already uses another store.
            FeatureMissing: a declared task needs a feature that the broker of the URL lacks.
        """
        self.runtime.configure(url, secret_keys)

    def close(self) -> None:
        """Close the broker. The next use opens it again; a second close does nothing."""
        self.runtime.close()

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

        Options: ``name queue priority retries timeout expires key result_ttl limit tags
        expects``, and ``schedule``: a cron text, seconds or a ``When``. A
        schedule runs the task without arguments.

        Raises:
            InvalidOption: an option is wrong, the name is taken, or the function is a lambda.
        """
        check_known("a task", options, (*TASK_OPTIONS, "name", "schedule"))
        name, schedule = options.pop("name", None), options.pop("schedule", None)
        runtime = self.runtime
        changed = runtime.defaults.changed("a task", options, TASK_OPTIONS)
        checked = runtime.features.declare(changed)
        if name is not None:
            check_name("task name", name)

        def declare(function: Callable[..., Any]) -> Task[..., Any]:
            task = runtime.declare(function, name, checked)
            if schedule is not None:
                runtime.code_schedules.declare_own(task.name, task.call(), schedule)
            return task

        return declare(function) if function is not None else declare

    def schedule(
        self,
        name: str,
        call: Call[Any],
        when: Timing | None = None,
        /,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Declare a call to be made repeatedly; a starting worker stores the schedule.

        A worker that starts later with the same rule keeps the next time. With a new rule the
        schedule begins anew. The schedule fires while a worker that declares it is alive. A
        schedule without such a worker is deleted after 30 days.

        Args:
            name: the name of the schedule.
            call: ``task.call(…)``, with options by ``using``.
            when: a cron text, seconds, a timedelta or a :class:`When`.
            options: the options of ``When``, in place of ``when``.

        Raises:
            InvalidOption: a value is wrong, or the name is already declared differently.
        """
        self.runtime.code_schedules.declare(name, call, when, **options)

    @overload
    def on(
        self, event: Literal["process_start", "process_stop"], /
    ) -> Callable[[OnProcess], OnProcess]: ...
    @overload
    def on(self, event: Literal["enqueue"], /) -> Callable[[OnEnqueue], OnEnqueue]: ...
    def on(self, event: Event, /) -> Callable[[Any], Any]:
        """Declare a function that the app calls at an event: ``@mill.on("process_start")``.

        - ``process_start``: in each worker process, after the import of the app and before the
          first job. The function takes no argument and may be async. If it raises, the process
          cannot start, as if the import had failed.
        - ``process_stop``: in each worker process that ends properly, after its last job, in the
          opposite order. The function takes no argument and may be async. An exception is logged.
          A process that is killed calls nothing.
        - ``enqueue``: for each job of this app, before it is stored. The function takes a
          :class:`NewJob`, whose ``headers`` it may change, and is not async. If it raises, nothing
          is stored.

        Raises:
            InvalidOption: there is no such event, or the function does not fit the event.
        """
        return handler_of(self.runtime.event_handlers, event)

    def around(self, middleware: Around) -> Around:
        """Declare a middleware, inside the middleware declared so far: ``@mill.around``.

        Raises:
            InvalidOption: the function has none of the four forms of a middleware.
        """
        self.middleware = [*self.middleware, middleware]
        return middleware

    # -- enqueueing -----------------------------------------------------------------------------

    def call(self, task: str, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """A call of a task, by its name or a dotted path, as a value: see ``task.call(…)``.

        This method does not read the store. The options of another app's task are in the store, and
        ``enqueue`` reads these options.

        Raises:
            TypeError: this app has the task, and the task does not take these arguments.
        """
        return call_by_name(self.runtime, task, args, kwargs)

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
        return self.runtime.enqueue(call_or_composition(self.runtime, call, args, kwargs))

    @overload
    async def aenqueue(self, call: Call[R], /) -> Job[R]: ...
    @overload
    async def aenqueue(self, call: Composition[H], /) -> H: ...
    @overload
    async def aenqueue(self, call: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    async def aenqueue(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As ``enqueue``, without blocking the event loop; concurrent calls share commits."""
        return await self.runtime.aenqueue(call_or_composition(self.runtime, call, args, kwargs))

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Enqueue many calls in one durable commit, all or none; return handles in their order.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: no call was stored.
        """
        return self.runtime.enqueue_many(calls)

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """As ``enqueue_many``, without blocking the event loop."""
        return await self.runtime.aenqueue_many(calls)

    def batch(self) -> Batch:
        """A block whose jobs are stored in one commit at its end: ``with mill.batch():``.

        The batch takes the jobs of this thread or asyncio task. Handles exist at once. If the block
        raises, nothing is stored.

        Raises:
            TidemillError: the block is inside another batch, or waits for a job.
            DuplicateJob, QueueFull, StoreFull: raised at the end of the block; nothing was stored.
        """
        return Batch(self.runtime)

    # -- reading --------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job[Any]:
        """A handle on the job with this id. This call reads nothing."""
        return Job(self.runtime, check_name("id", job_id))

    def jobs(self, what: Filter | None = None, /, **options: Unpack[SearchOptions]) -> Found:
        """Handles of all matching jobs, newest first: :class:`Found` has the search options.

        In place of options, a :class:`Filter` says which jobs match.
        """
        return Found(self.runtime, what, **options)

    def queues(self) -> list[QueueStats]:
        """All queues with their numbers, without the queues of groups and :meth:`Limits.hold`."""
        move_due(self.runtime.job_store)
        return users_queues(self.broker.stats())

    @property
    def schedules(self) -> Schedules:
        """The schedules of the store: see :class:`Schedules`. This call reads nothing."""
        return self.runtime.schedules

    @property
    def history(self) -> History:
        """The history of the store: see :class:`History`. This call reads nothing."""
        return History(self.runtime)

    def group(self, group_id: str) -> JobGroup[Any]:
        """A handle on the group, or flow, with this id. This method does not read the store."""
        return JobGroup(self.runtime, check_name("id", group_id))

    # -- messages -------------------------------------------------------------------------------

    def queue(self, name: str, **settings: Unpack[QueueSettings]) -> Queue:
        """A queue of raw messages. The settings, if any, are stored: see :class:`Queue`.

        Raises:
            InvalidOption: the name or a setting is wrong.
            FeatureMissing: the broker lacks a feature that a setting needs.
        """
        return Queue(self.runtime, name, **settings)

    def publish(
        self,
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
        return self.runtime.topics.publish(topic, body, mandatory=mandatory, options=options)

    async def apublish(
        self,
        topic: str,
        body: Any,
        *,
        mandatory: bool = False,
        **options: Unpack[PublishOptions],
    ) -> list[Job[Any]]:
        """As ``publish``, without blocking the event loop."""

        def publish() -> list[Job[Any]]:
            return self.runtime.topics.publish(topic, body, mandatory=mandatory, options=options)

        return await self.runtime.threaded_put(publish, options.get("txn"))

    def get(
        self, queues: Sequence[str], timeout: Seconds | None = None, *, order: Order = "strict"
    ) -> Message | None:
        """The next message of several queues.

        The order ``"strict"`` empties the first queue before the second. With ``"fair"`` every
        queue gets its turn. ``"merged"`` takes all queues together, by priority and then by age.

        Returns None after ``timeout`` seconds without a message; waits for ever without a timeout.

        Raises:
            BrokerUnavailable: the store cannot be reached, or another process has been writing to
                it for 30 s.
            FeatureMissing: the broker has no merged order.
        """
        return first(self.runtime.consumers.get_many(queues, 1, timeout, order=order))

    async def aget(
        self, queues: Sequence[str], timeout: Seconds | None = None, *, order: Order = "strict"
    ) -> Message | None:
        """As ``get``, without blocking the event loop."""
        return first(await self.runtime.consumers.aget_many(queues, 1, timeout, order=order))

    def get_many(
        self,
        queues: Sequence[str],
        n: int,
        timeout: Seconds | None = None,
        *,
        order: Order = "strict",
    ) -> list[Message]:
        """Up to ``n`` messages (at most 1,000) of several queues: see :meth:`Queue.get_many`."""
        return self.runtime.consumers.get_many(queues, n, timeout, order=order)

    async def aget_many(
        self,
        queues: Sequence[str],
        n: int,
        timeout: Seconds | None = None,
        *,
        order: Order = "strict",
    ) -> list[Message]:
        """As ``get_many``, without blocking the event loop."""
        return await self.runtime.consumers.aget_many(queues, n, timeout, order=order)

    # -- working --------------------------------------------------------------------------------

    def worker(
        self, concurrency: int = 4, *, queues: Sequence[str] = ()
    ) -> AbstractContextManager[object]:
        """Run a worker in threads of this process while the block lasts: ``with mill.worker():``.

        At the end of the block, running jobs have 30 s to finish; other jobs stay in the store. Use
        this method in scripts and notebooks. A service runs the command ``tidemill worker``.

        Raises:
            TidemillError: raised at the end: the worker could not serve, or a job did not end.
        """
        from tidemill.worker.settings import Settings
        from tidemill.worker.supervisor import PATIENCE, running_worker

        given = Settings(concurrency=concurrency, queues=tuple(queues), shutdown_timeout=PATIENCE)
        return running_worker(self.runtime, given)
