"""The backend of Django's tasks framework, and its tasks, which have the options of tidemill.

The backend of an alias uses the project's app, or its own app if ``OPTIONS`` has a ``URL``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.core import checks
from django.utils import timezone
from django.utils.module_loading import import_string

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.registry import features_of
from tidemill.client.job_handle import Job
from tidemill.client.options import CALL_OPTIONS, TASK_OPTIONS
from tidemill.client.puts import PendingPuts
from tidemill.client.task import Call
from tidemill.core.clock import new_id
from tidemill.core.config import check_name
from tidemill.core.envelope import Envelope
from tidemill.core.job import Record
from tidemill.core.suggest import hint
from tidemill.django.checks import app_missing, problems
from tidemill.django.commit import CommitRule
from tidemill.django.framework import Framework, default, load, results
from tidemill.django.framework.run import runner
from tidemill.django.project import DjangoMill, on_connections, project_mill
from tidemill.django.settings import read_settings
from tidemill.errors import InvalidOption, TidemillError
from tidemill.worker.inline import run_inline

_NAMED_OTHERWISE = ("queue", "priority", "delay", "at", "txn")

OPTIONS = tuple(
    name for name in dict.fromkeys((*TASK_OPTIONS, *CALL_OPTIONS)) if name not in _NAMED_OTHERWISE
)
"""The options of tidemill that a task of the framework has, besides the framework's options."""

DEFAULTS = {"retries": 0, "result_ttl": 2 * 86400.0}
"""The defaults of the framework's tasks, when neither the alias nor the project sets these options.
The framework has no retries, and its users expect a result to be kept until tomorrow."""

_RULE = {"ENQUEUE_ON_COMMIT", "ROBUST"}  # the options that change the commit rule of an app

_Given = dict[str, Any]


# -- tasks ----------------------------------------------------------------------------------------


def moment(run_after: Any) -> Any:
    return timezone.now() + run_after if isinstance(run_after, dt.timedelta) else run_after


class _Options:
    """Our methods of the framework's ``Task``. :func:`task_class` adds the fields."""

    __slots__ = ()

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: dt.datetime | dt.timedelta | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        """A copy of the task with other options of the framework and of tidemill.

        Raises:
            TypeError: there is no such option.
            InvalidTask: the backend refuses a value.
        """
        given = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": moment(run_after),
            "backend": backend,
        }
        for name in options:
            if name not in OPTIONS:
                near = hint(name, (*given, *OPTIONS))
                raise TypeError(f"using() has no option {name!r}; {near}")
        changes = {name: value for name, value in given.items() if value is not None}
        task: Any = self
        return dataclasses.replace(task, **changes, **options)


@functools.cache
def task_class(framework: Framework) -> Any:
    """The framework's ``Task`` with a field for each option of tidemill."""
    made = dataclasses.make_dataclass(
        "Task",
        [(name, Any, dataclasses.field(default=None)) for name in OPTIONS],
        bases=(_Options, framework.base.Task),
        frozen=True,
        kw_only=True,
        slots=True,
    )
    made.__module__ = "tidemill.django"
    return made


def decorator(framework: Framework) -> Any:
    """The framework's decorator ``@task``, which takes the options of tidemill on each version."""

    def task(
        function: Callable[..., Any] | None = None,
        *,
        priority: int = 0,
        queue_name: str = "default",
        backend: str = "default",
        takes_context: bool = False,
        **options: Any,
    ) -> Any:
        """Declare a task of Django's framework, with the options of tidemill.

        Raises:
            TypeError: there is no such option.
            InvalidTask: the backend refuses the function, or a value.
        """
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"@task has no option {name!r}; {hint(name, OPTIONS)}")
        kind = framework.backends[backend].task_class
        own = {"priority": priority, "queue_name": queue_name, "backend": backend}

        def declare(function: Callable[..., Any]) -> Any:
            plain = not issubclass(kind, _Options)  # another backend, such as the immediate backend
            more = {} if plain else options
            return kind(func=function, takes_context=takes_context, run_after=None, **own, **more)

        return declare(function) if function is not None else declare

    return task


# -- the backend ----------------------------------------------------------------------------------


class _Declared(NamedTuple):
    """A task of the framework: its function, the app's task for it, and the declared options."""

    func: Any
    task: Any  # a tidemill.Task
    given: _Given


class _Backend:
    """Our methods of the framework's ``BaseTaskBackend``: see :func:`backend_class`."""

    framework: Framework
    alias: str
    options: dict[str, Any]
    queues: set[str]
    supports_async_task = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)  # type: ignore[call-arg]
        self._declared: dict[str, _Declared] = {}

    # -- the app ----------------------------------------------------------------------------------

    @functools.cached_property
    def mill(self) -> DjangoMill:
        own = "URL" in self.options
        mill = DjangoMill(read_settings(self.options, self._where)) if own else project_mill()
        mill.runtime.finders.append(self._find)
        return mill

    @property
    def _rule(self) -> CommitRule:
        rule = self.mill.runtime.commit
        if "URL" in self.options or not _RULE & self.options.keys():
            return rule
        read = read_settings(self.options, self._where)
        if "ENQUEUE_ON_COMMIT" in self.options:
            rule = rule._replace(on_commit=read.on_commit, join="")
        if rule.on_commit == rule.own:
            rule = rule._replace(on_commit="")
        return rule._replace(robust=read.robust) if "ROBUST" in self.options else rule

    def _find(self, name: str) -> Any:
        """The task of this framework at a dotted path, declared to the app; else None."""
        try:
            task = import_string(name)
        except ImportError:
            return None
        if not isinstance(task, self.framework.base.Task):
            return None
        return self.declared(task).task

    @property
    def _where(self) -> str:
        return f"TASKS[{self.alias!r}]['OPTIONS']"

    @functools.cached_property
    def _features(self) -> frozenset[Feature]:
        """The features of the store, if its URL tells them; else all features."""
        url = self.mill.runtime.settings.url
        known = features_of(url) if url else None
        return frozenset(Feature) if known is None else known

    @functools.cached_property
    def _defaults(self) -> _Given:
        """The default options of tasks: by this alias, else the project, else :data:`DEFAULTS`."""
        ours = dict(DEFAULTS)
        if Feature.RESULTS not in self._features:
            del ours["result_ttl"]
        own = read_settings(self.options, self._where).tasks if self.options else {}
        return {**ours, **self.mill.runtime.settings.tasks, **own}

    @property
    def supports_defer(self) -> bool:
        return Feature.DELAY in self._features

    @property
    def supports_get_result(self) -> bool:
        return Feature.RESULTS in self._features and Feature.INSPECT in self._features

    @property
    def supports_priority(self) -> bool:
        return Feature.PRIORITY in self._features

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        found = problems(self.options, self._where) if self.options else []
        return [*found, *app_missing(self.alias, self.options.get("URL"))]

    # -- tasks ------------------------------------------------------------------------------------

    def validate_task(self, task: Any) -> None:
        """Check a task, and declare it to the app. Raises InvalidTask."""
        object.__setattr__(task, "run_after", moment(task.run_after))
        super().validate_task(task)  # type: ignore[misc]
        try:
            self._options_of(task)
        except TidemillError as error:
            raise self.framework.InvalidTask(str(error)) from error

    def declared(self, task: Any) -> _Declared:
        name = task.module_path
        known = self._declared.get(name)
        if known is None or known.func is not task.func:
            given = self._given(task)
            options = {key: value for key, value in given.items() if key in TASK_OPTIONS}
            # A repeated import of the module has made another task.
            self.mill.runtime.tasks.pop(name, None)
            declare: Any = self.mill.task(name=name, **options)
            ours = declare(runner(self.framework, task))
            known = self._declared[name] = _Declared(task.func, ours, given)
        return known

    def _given(self, task: Any) -> _Given:
        own = {name: getattr(task, name, None) for name in OPTIONS}
        own |= {"priority": task.priority or None, "queue": task.queue_name}
        if task.run_after is not None:
            own["at"] = task.run_after
        return {**self._defaults, **{k: v for k, v in own.items() if v is not None}}

    def _options_of(self, task: Any) -> Any:
        declared, given = self.declared(task), self._given(task)
        changes = {k: v for k, v in given.items() if v is not declared.given.get(k, _ABSENT)}
        if "priority" in declared.given and "priority" not in given:
            changes["priority"] = 0
        return declared.task.options.changed(f"task {task.module_path}", changes, CALL_OPTIONS)

    # -- enqueueing -------------------------------------------------------------------------------

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue a task; the job is durable when this returns, or waits for the commit.

        Raises:
            InvalidTask: the backend cannot run the task.
            TypeError: an argument is not JSON.
            TidemillError: the store refuses the job, or cannot be reached.
        """
        if self.mill.sync:
            return on_connections(lambda: self._run_here(task, args, kwargs))
        envelope = self._envelope(task, args, kwargs)
        if self.mill.runtime.in_batch():
            (job,) = self.mill.runtime.put([envelope])
            result = self._new_result(task, envelope, job.id)
            self._say_enqueued(result)
            return result
        puts = PendingPuts(self.mill.runtime)
        (job,) = puts.add([envelope])
        result = self._new_result(task, envelope, job.id)
        self._rule.make(puts, functools.partial(self._put_made, result, job))
        return result

    def _put_made(self, result: Any, job: Job[Any], error: Exception | None) -> None:
        """Complete the result of a put: the job was stored, or the store refused the job."""
        object.__setattr__(result, "id", job.id)  # a put with a key may keep an older job
        if error is None:
            self._say_enqueued(result)
        else:
            results.end_failed(self.framework, result, error)

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """As ``enqueue``, without blocking the event loop; concurrent calls share commits."""
        mill = self.mill
        if mill.runtime.in_batch() or await mill.runtime.needs_thread(self._rule):
            return await sync_to_async(self.enqueue)(task, args, kwargs)
        envelope = self._envelope(task, args, kwargs)
        put = await mill.runtime.put_batching.put(envelope)
        result = self._new_result(task, envelope, put.id)
        signal = self.framework.signals.task_enqueued
        await signal.asend_robust(sender=type(self), task_result=result)
        return result

    def _envelope(self, task: Any, args: Any, kwargs: Any) -> Envelope:
        return self.mill.runtime.envelope(self._call(task, args, kwargs))

    def _call(self, task: Any, args: Any, kwargs: Any) -> Call[Any]:
        self.validate_task(task)
        plain = self.framework.normalize_json
        args, kwargs = tuple(plain(list(args))), plain(dict(kwargs))
        options = self._options_of(task)
        call: Call[Any] = Call(task.module_path, args, kwargs, options)
        return call.using(headers={**options.headers, results.ALIAS: self.alias})

    def _run_here(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Run a task in the caller, as the immediate backend does. The result keeps an error."""
        job_id, call = new_id(), self._call(task, args, kwargs)
        self._say_enqueued(self._new_result(task, self.mill.runtime.envelope(call, job_id), job_id))
        try:
            run_inline(self.mill.runtime, call, job_id=job_id)
        except KeyboardInterrupt:
            raise
        except BaseException:
            if self.mill.runtime.inline_jobs.get(job_id) is None:
                raise
        return self.get_result(job_id)

    def _new_result(self, task: Any, envelope: Envelope, job_id: str) -> Any:
        args, kwargs = results.arguments_of(envelope)
        return results.new_result(
            self.framework,
            task,
            id=job_id,
            status=self.framework.base.TaskResultStatus.READY,
            enqueued_at=results.moment_of(envelope.created),
            args=args,
            kwargs=kwargs,
            backend=self.alias,
        )

    def _say_enqueued(self, result: Any) -> None:
        """Send the signal ``task_enqueued``. An error of a receiver does not undo the put."""
        signal = self.framework.signals.task_enqueued
        signal.send_robust(sender=type(self), task_result=result)

    # -- results ----------------------------------------------------------------------------------

    def get_result(self, result_id: str) -> Any:
        """The result of a job of this alias, as it is now.

        Raises:
            TaskResultDoesNotExist: there is no such job, or it is no longer kept.
        """
        return self._result(result_id, self._record(result_id))

    async def aget_result(self, result_id: str) -> Any:
        """As ``get_result``, without blocking the event loop."""
        return self._result(result_id, await self.mill.runtime.ask(self._record, result_id))

    def _record(self, result_id: str) -> Record | None:
        try:
            return self.mill.runtime.job_store.get(check_name("id", result_id))
        except InvalidOption:
            return None

    def _result(self, result_id: str, record: Record | None) -> Any:
        if record is None or record.envelope.headers.get(results.ALIAS) != self.alias:
            raise self.framework.NotFound(result_id)
        task = self._declared.get(record.envelope.task)
        found = results.found_task(self.framework, record, task.func if task else None)
        return results.result_of(self.framework, found, record)


_ABSENT = object()


@functools.cache
def backend_class(framework: Framework) -> Any:
    members = {
        "__module__": "tidemill.django",
        "__doc__": _Backend.__doc__,
        "framework": framework,
        "task_class": task_class(framework),
    }
    return type("TaskBackend", (_Backend, framework.Backend), members)


def public(name: str) -> Any:
    """A public name that belongs to a framework. Raises ImportError if that is not installed."""
    if name == "BackportTaskBackend":
        return backend_class(_backport())
    framework = default()
    makers: dict[str, Any] = {"TaskBackend": backend_class, "Task": task_class, "task": decorator}
    return makers[name](framework)


def _backport() -> Any:
    try:
        return load("django_tasks")
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        raise ImportError(
            "BackportTaskBackend needs the package django-tasks: pip install django-tasks; "
            "or use TaskBackend, since Django 6 has a tasks framework of its own"
        ) from error
