"""The app: where tasks are declared, calls become jobs, and the broker is opened when first needed."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import fnmatch
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import msgspec

from tidemill.brokers.base import Broker, Feature, Filter, Page, QueueStats, need, open_broker
from tidemill.clock import new_id, wall_time
from tidemill.codec import pack, pack_pickle, sign
from tidemill.config import check_body, check_name, default_url
from tidemill.errors import InvalidOption, TidemillError
from tidemill.handle import Job
from tidemill.inline import run_inline
from tidemill.job import Envelope, Put
from tidemill.middleware import Middleware
from tidemill.queue import Consumers, Message, Queue
from tidemill.task import TASK_OPTIONS, Call, Options, Task, task_name

__all__ = ["Tidemill"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger("tidemill")

TEXT_MOST = 120


class Tidemill:
    """One app on one broker.

    Args:
        url: where the jobs live; ``$TIDEMILL_URL`` when not given, else LMDB in ``.tidemill`` beside
            the nearest ``pyproject.toml`` or ``.git`` upward, else here.
        env: the caller's own ``lmdb.Environment`` to live in, instead of a URL; ``prefix`` leads the
            names of our databases in it. It needs ``max_dbs`` of at least 16 more than it uses.
        secret_keys: keys to sign jobs with; the first signs, all verify. Without keys nothing is signed.
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
        if serializer not in ("msgpack", "pickle"):
            raise InvalidOption(f"serializer must be msgpack or pickle, not {serializer!r}")
        if isinstance(secret_keys, (str, bytes)):
            raise InvalidOption("secret_keys must be a list of keys, newest first")
        if serializer == "pickle" and not secret_keys:
            raise InvalidOption("serializer='pickle' runs what is in the data; it needs secret_keys")
        if isinstance(allow_imports, str):
            raise InvalidOption("allow_imports must be a list of patterns, as ['math.*']")
        if url is not None and env is not None:
            raise InvalidOption("give either url or env, not both")
        self.tasks: dict[str, Task[..., Any]] = {}
        self.keys = [k.encode() if isinstance(k, str) else bytes(k) for k in secret_keys]
        self.pickles = serializer == "pickle"
        self.allow_imports = tuple(allow_imports)
        self.middleware = tuple(middleware)
        self.sync = sync
        self._defaults = Options().changed("Tidemill", defaults, TASK_OPTIONS)
        self._url = url
        self._env = env, prefix
        self._broker: Broker | None = None
        self._lock = threading.Lock()
        self._consumers = Consumers(self)
        self._async_puts = _AsyncPuts(self)
        self._batch: contextvars.ContextVar[list[Envelope] | None] = contextvars.ContextVar(
            "tidemill_batch", default=None
        )
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        if env is not None:
            # At once, not at first use: that may be inside the caller's own transaction, and opening
            # takes one of ours.
            self._broker = self._open()

    # -- the broker -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the jobs live."""
        if self._broker is not None:
            return self._broker.url
        if self._url is None and self._env[0] is None:
            self._url = default_url()
        return self._url or f"lmdb://{self._env[0].path()}"

    @property
    def broker(self) -> Broker:
        """The broker, opened at first use."""
        if self._broker is None:
            with self._lock:
                if self._broker is None:
                    self._broker = self._open()
        return self._broker

    def _open(self) -> Broker:
        env, prefix = self._env
        if env is not None:
            from tidemill.brokers.lmdb import LmdbBroker

            return LmdbBroker.around(env, prefix)
        asked = self._url
        broker = open_broker(self.url)
        if asked is None:
            log.info("jobs live in %s", self.url)
        return broker

    def close(self) -> None:
        """Give up the broker; it is opened again when next needed."""
        self._consumers.close()
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    def __enter__(self) -> Tidemill:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- declaring ------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self, *, name: str | None = None, **options: Any
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(
        self, function: Callable[P, R] | None = None, /, *, name: str | None = None, **options: Any
    ) -> Task[P, R] | Callable[[Callable[P, R]], Task[P, R]]:
        """Declare a function, sync or async, as a task: ``@mill.task`` or ``@mill.task(queue=…)``.

        Options: ``name queue priority retries timeout expires key on_conflict result_ttl tags``.

        Raises:
            InvalidOption: an option is wrong, the name is taken, or the function is a lambda.
        """
        checked = self._defaults.changed("a task", options, TASK_OPTIONS)

        def declare(function: Callable[P, R]) -> Task[P, R]:
            return self._declare(function, name, checked)

        return declare(function) if function is not None else declare

    def _declare(self, function: Callable[P, R], name: str | None, options: Options) -> Task[P, R]:
        own = task_name(function)
        name = check_name("task name", name) if name is not None else own
        before = self.tasks.get(name)
        if before is not None and (
            before.function.__module__ != function.__module__
            or before.function.__qualname__ != function.__qualname__
        ):
            raise InvalidOption(
                f"task {name!r} is declared twice: by {before.function.__module__}."
                f"{before.function.__qualname__} and by {own}; give one another name="
            )
        task = Task(self, function, name, options)
        self.tasks[name] = task
        return task

    def may_import(self, path: str) -> bool:
        """True when jobs may name this dotted path without a declared task."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.allow_imports)

    # -- enqueueing -----------------------------------------------------------------------------

    @overload
    def enqueue(self, call: Call[R], /) -> Job[R]: ...
    @overload
    def enqueue(self, call: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    def enqueue(self, call: Call[Any] | str, /, *args: Any, **kwargs: Any) -> Job[Any]:
        """Enqueue a call, or a dotted path (or the name of a task) with its arguments.

        Raises:
            DuplicateJob, QueueFull, StoreFull, InvalidOption: nothing was stored.
            CodecError: an argument has no encoding.
        """
        call = self._call_of(call, args, kwargs)
        if self.sync:
            return run_inline(self, call)
        envelope = self.envelope(call)
        batch = self._batch.get()
        if batch is not None:
            batch.append(envelope)
            return Job(self, envelope.id)
        (put,) = self.broker.put([envelope], txn=self._txn(call.options))
        return Job(self, put.id, put.placed)

    async def aenqueue(self, call: Call[R] | str, /, *args: Any, **kwargs: Any) -> Job[R]:
        """As ``enqueue``, without blocking the event loop; concurrent calls share commits."""
        call = self._call_of(call, args, kwargs)
        if self.sync or self._batch.get() is not None or call.options.txn is not None:
            return self.enqueue(call)
        put = await self._async_puts.put(self.envelope(call))
        return Job(self, put.id, put.placed)

    def enqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Enqueue many calls in one durable commit, all or none, in order."""
        calls = list(calls)
        if self.sync:
            return [run_inline(self, call) for call in calls]
        envelopes = [self.envelope(call) for call in calls]
        batch = self._batch.get()
        if batch is not None:
            batch.extend(envelopes)
            return [Job(self, envelope.id) for envelope in envelopes]
        txn = self._txn(calls[0].options) if calls else None
        return [Job(self, put.id, put.placed) for put in self.broker.put(envelopes, txn=txn)]

    async def aenqueue_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """As ``enqueue_many``, without blocking the event loop."""
        jobs: list[Job[R]] = await self.threaded(self.enqueue_many, list(calls))
        return jobs

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Everything enqueued inside, by this thread or task, becomes one commit at the end.

        Handles are given at once; an exception inside stores nothing; waiting inside is an error.
        """
        if self._batch.get() is not None:
            raise TidemillError("a batch inside a batch: the outer one commits both, leave the inner out")
        collected: list[Envelope] = []
        token = self._batch.set(collected)
        try:
            yield
        finally:
            self._batch.reset(token)
        if collected:
            self.broker.put(collected)

    def in_batch(self) -> bool:
        """True inside ``with mill.batch()``."""
        return self._batch.get() is not None

    def _call_of(self, call: Call[Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call[Any]:
        if isinstance(call, Call):
            if args or kwargs:
                raise InvalidOption("a call has its arguments already; make it with task.call(…)")
            return call
        if not isinstance(call, str):
            raise InvalidOption(f"enqueue takes task.call(…) or a dotted path, not {call!r}")
        task = self.tasks.get(call)
        if task is not None:
            task.check_arguments(args, kwargs)
            return Call(call, args, kwargs, task.options)
        check_name("task", call)
        if not self.may_import(call):
            raise InvalidOption(
                f"{call!r} is no task of this app and matches none of allow_imports; declare it with "
                "@mill.task, or pass allow_imports=[…] to Tidemill"
            )
        return Call(call, args, kwargs, self._defaults)

    def _txn(self, options: Options) -> Any:
        if options.txn is not None:
            need(self.broker, Feature.TRANSACTIONS, "txn=")
        return options.txn

    def envelope(self, call: Call[Any]) -> Envelope:
        """The job that stands for a call: encoded, checked, signed."""
        o = call.options
        arguments = [list(call.args), dict(call.kwargs)]
        body = check_body(pack_pickle(arguments) if self.pickles else pack(arguments))
        key = o.key
        if callable(key):
            key = check_name("key", key(*call.args, **call.kwargs))
        envelope = Envelope(
            id=o.id or new_id(),
            queue=o.queue,
            task=call.task,
            body=body,
            created=wall_time(),
            rank=o.rank,
            delay=o.delay,
            at=o.at,
            expires=o.expires,
            timeout=o.timeout,
            retries=o.retries,
            key=key,
            on_conflict=o.on_conflict,
            result_ttl=o.result_ttl,
            tags=o.tags,
            headers=dict(o.headers),
            text=_summary(call) if len(body) < 2000 else "",
            pickled=self.pickles,
        )
        if self.keys:
            envelope.signature = sign(envelope, self.keys[0])
        return envelope

    # -- looking --------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job[Any]:
        """A handle on the job with this id; nothing is read yet."""
        return Job(self, check_name("id", job_id))

    def find(self, what: Filter | None = None, *, limit: int = 100, cursor: str = "") -> Page:
        """Records of jobs, newest first."""
        return self.broker.find(what or Filter(), limit, cursor)

    def queues(self) -> list[QueueStats]:
        """Every queue in numbers."""
        return self.broker.stats()

    # -- messages -------------------------------------------------------------------------------

    def queue(self, name: str, *, max_size: int | None = None) -> Queue:
        """A queue of raw messages. ``max_size`` bounds its unfinished jobs from now on; 0 is no bound."""
        return Queue(self, name, max_size=max_size)

    def get(
        self, queues: Sequence[str], timeout: float | None = None
    ) -> Message | None:
        """The next message of several queues: all of the first before any of the second.

        Returns None when nothing came within ``timeout`` seconds; without one, waits for ever.
        """
        return self._consumers.get(queues, timeout)

    async def aget(self, queues: Sequence[str], timeout: float | None = None) -> Message | None:
        """As ``get``, without blocking the event loop."""
        message: Message | None = await self.threaded(self.get, queues, timeout)
        return message

    @property
    def consumers(self) -> Consumers:
        """The owners this process consumes messages by."""
        return self._consumers

    # -- asyncio --------------------------------------------------------------------------------

    async def threaded(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call in a thread of this app's own: never in the loop's small pool."""
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(256, "tidemill-wait")
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        return await loop.run_in_executor(self._threads, context.run, function, *args)


def _summary(call: Call[Any]) -> str:
    """The arguments as a short text to search and show."""
    parts = [repr(arg) for arg in call.args]
    parts += [f"{name}={value!r}" for name, value in call.kwargs.items()]
    text = ", ".join(parts)
    return text if len(text) <= TEXT_MOST else text[: TEXT_MOST - 1] + "…"


class _AsyncPuts:
    """Puts from event loops, gathered: while one commit is under way the next fills up."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._waiting: collections.deque[
            tuple[Envelope, asyncio.AbstractEventLoop, asyncio.Future[Put]]
        ] = collections.deque()
        self._busy = threading.Lock()

    async def put(self, envelope: Envelope) -> Put:
        """Store one job."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Put] = loop.create_future()
        self._waiting.append((envelope, loop, future))
        if self._busy.acquire(blocking=False):
            loop.run_in_executor(None, self._work)
        return await future

    def _work(self) -> None:
        while True:
            try:
                while self._waiting:
                    self._put_all([self._waiting.popleft() for _ in range(len(self._waiting))])
            finally:
                self._busy.release()
            # Who appended before the release and found it busy relies on this second look.
            if not self._waiting or not self._busy.acquire(blocking=False):
                return

    def _put_all(
        self, batch: list[tuple[Envelope, asyncio.AbstractEventLoop, asyncio.Future[Put]]]
    ) -> None:
        try:
            answers: list[Any] = list(self._mill.broker.put([envelope for envelope, _, _ in batch]))
        except Exception:
            answers = [self._put_one(envelope) for envelope, _, _ in batch]
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Put], Any]]] = {}
        for (_, loop, future), answer in zip(batch, answers, strict=True):
            by_loop.setdefault(loop, []).append((future, answer))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_answer, pairs)

    def _put_one(self, envelope: Envelope) -> Put | Exception:
        try:
            return self._mill.broker.put([envelope])[0]
        except Exception as error:
            return error


def _answer(pairs: list[tuple[asyncio.Future[Put], Any]]) -> None:
    for future, answer in pairs:
        if future.cancelled():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


_ = msgspec
