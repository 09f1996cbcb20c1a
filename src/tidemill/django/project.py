"""The project's :class:`tidemill.Tidemill`, made from the settings."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import AsyncToSync, async_to_sync, sync_to_async
from django.apps import apps
from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import autodiscover_modules

from tidemill.app import Tidemill
from tidemill.client.job_handle import Job
from tidemill.client.puts import PendingPuts
from tidemill.client.task import Call
from tidemill.client.threads import is_in_event_loop
from tidemill.django.commit import CommitRule, TransactionBatch
from tidemill.django.connections import fresh_connections
from tidemill.django.settings import Settings, database_of, read_settings
from tidemill.runtime import Runtime
from tidemill.worker.event_loop import run_awaitable

if TYPE_CHECKING:
    from tidemill.client.puts import OpenBatch
    from tidemill.client.task import Configured, Task

T = TypeVar("T")


class DjangoRuntime(Runtime):
    """The runtime of an app that knows Django: see :class:`DjangoMill`.

    Attributes:
        finders: functions that find a task by its name, after the import of its module.
    """

    def __init__(self, settings: Settings, **given: Any) -> None:
        self.settings = settings
        self.finders: list[Callable[[str], Configured[..., Any, Any] | None]] = []
        super().__init__(**given)
        self._own_imports = self.allow_imports
        self.worker_command = "manage.py tidemill worker"
        self.run_coroutine = _run_with_connections

    @property
    def url(self) -> str:
        return self.settings.test_url if in_tests() else super().url

    @property
    def commit(self) -> CommitRule:
        """The rule for the time of puts: at once, after the commit, or in the transaction."""
        alias, join, own = self.settings.on_commit, self.settings.join, database_of(self.url)
        if join and not self.url.startswith("postgres"):  # in tests the jobs are in another store
            alias, join = join, ""
        return CommitRule("" if alias == own else alias, join, own, self.settings.robust)

    def batch_for(self, txn: Any = None) -> OpenBatch | None:
        batch = super().batch_for(txn)
        if batch is None and txn is None and (rule := self.commit).concerns_here():
            return TransactionBatch(self, rule)
        return batch

    def commit_batch(self, pending: PendingPuts) -> None:
        self.commit.make(pending)

    def run_here(self, node: Any) -> Any:
        return on_connections(lambda: super(DjangoRuntime, self).run_here(node))

    async def aenqueue(self, node: Any) -> Any:
        if await self.needs_thread():
            return await sync_to_async(self.enqueue)(node)
        return await super().aenqueue(node)

    async def aenqueue_many(self, calls: Iterable[Call[Any]]) -> list[Job[Any]]:
        if self.sync:
            return await sync_to_async(self.enqueue_many)(calls)
        return await super().aenqueue_many(calls)

    async def threaded_put(
        self, put: Callable[[], T], txn: Any = None, *, waits: bool = False
    ) -> T:
        """Make a blocking put for an event loop, in the thread that the commit rule needs."""
        if txn is None and await self.needs_thread():
            return await sync_to_async(put)()
        return await super().threaded_put(put, txn, waits=waits)

    async def needs_thread(self, rule: CommitRule | None = None) -> bool:
        """True when a put must be made in the thread that holds the database connection."""
        if self.sync or database_of(self.url):
            return True
        rule = rule or self.commit
        return bool(rule.on_commit or rule.join) and await sync_to_async(rule.concerns_here)()

    async def ask(self, function: Any, *args: Any) -> Any:
        if self.sync or database_of(self.url):
            return await sync_to_async(function)(*args)
        return await self.threaded(function, *args)

    def may_import(self, path: str) -> bool:
        """True when the setting ``ALLOW_IMPORTS`` allows jobs that name this dotted path."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self._own_imports)

    def may_find(self, name: str) -> bool:
        """As the base; also for a module of the project that only other processes have imported."""
        return super().may_find(name) or (_module_of(name) or "sys") not in sys.modules

    def declared(self, name: str) -> Task[..., Any] | None:
        """The task of a name; a module of the project is imported to find the task."""
        # An event loop imports nothing: an import would block the loop. A module may need what only
        # the workers have.
        may_import = self.imports_tasks and apps.ready and not is_in_event_loop()
        if name not in self.tasks and may_import:
            with contextlib.suppress(ImportError):
                self._import_module_of(name)
        return self.tasks.get(name)

    def find_task(self, name: str) -> Configured[..., Any, Any] | None:
        """The task of a name, in a module of the project or as ``ALLOW_IMPORTS`` allows."""
        module = self._import_module_of(name)
        if name in self.tasks:
            return self.tasks[name]
        for find in self.finders if module else ():
            if (task := find(name)) is not None:
                return task
        return super().find_task(name)

    @staticmethod
    def _import_module_of(name: str) -> str:
        if module := _module_of(name):
            importlib.import_module(module)
        return module

    def find_in_apps(self) -> None:
        """Let a worker say at its start that this app finds any task in an installed app."""
        places = f"tasks in the modules of {len(_packages())} packages"
        self.allow_imports = (*self._own_imports, places)


class DjangoMill(Tidemill):
    """A :class:`tidemill.Tidemill` that knows Django.

    - While Django's test environment is set up, its store is ``TEST_URL``.
    - Its puts inside ``atomic`` wait for the commit, or join the transaction.
    - Its workers check and close the database connections around each job.
    - Its workers find tasks in every module of an installed app, not only in modules ``tasks``.
    """

    runtime: DjangoRuntime

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        super().__init__(
            settings.url,
            middleware=[fresh_connections, *settings.layers()],
            **{**settings.app, **settings.tasks},
        )

    def _make_runtime(self, **given: Any) -> DjangoRuntime:
        return DjangoRuntime(self._settings, **given)


def _module_of(name: str) -> str:
    """The module in which a job's task is declared; empty for a module outside of the project."""
    module = name.rpartition(".")[0]
    if not any(f"{module}.".startswith(f"{package}.") for package in _packages()):
        return ""
    try:
        return module if importlib.util.find_spec(module) else ""
    except ModuleNotFoundError:
        return ""


def _packages() -> list[str]:
    root = (getattr(django_settings, "SETTINGS_MODULE", "") or "").partition(".")[0]
    names = [*(config.name for config in apps.get_app_configs()), *([root] if root else [])]
    return [*dict.fromkeys(name for name in names if not name.startswith("django.contrib."))]


def _run_with_connections(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine whose database calls use the connections of this thread, in a new context."""

    async def run() -> Any:
        return await coroutine

    return copy_context().run(async_to_sync(run))


def on_connections(function: Callable[[], T]) -> T:
    """Call a function in the thread whose database connections the caller uses.

    Called from an event loop, this is the thread of ``sync_to_async``, and the loop waits. In a
    test it is the thread of the test, which asgiref knows by the loop.
    """
    if not is_in_event_loop():
        return function()
    executors, known = AsyncToSync.executors, getattr(AsyncToSync, "loop_thread_executors", {})
    executor = getattr(executors, "current", None) or known.get(asyncio.get_running_loop())

    async def call() -> T:
        if executor is not None:
            executors.current = executor
        return await sync_to_async(function)()

    result: T = run_awaitable(call())
    return result


def load_tasks() -> None:
    """Import the modules ``tasks`` of the installed apps, and those beside or above the settings.

    ``project/tasks.py`` beside ``project/settings.py`` is in no installed app.
    """
    autodiscover_modules("tasks")
    package = getattr(django_settings, "SETTINGS_MODULE", "") or ""
    while package := package.rpartition(".")[0]:
        if importlib.util.find_spec(f"{package}.tasks"):
            importlib.import_module(f"{package}.tasks")


def in_tests() -> bool:
    """True while Django's test environment is set up, by ``manage.py test`` or pytest-django."""
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


@functools.cache
def project_mill() -> DjangoMill:
    """The app of the setting ``TIDEMILL``, which opens its store at its first use."""
    return DjangoMill(read_settings())


def _follow_sync(*, setting: str, value: Any, **_: Any) -> None:
    """Run jobs at once while a test overrides ``TIDEMILL`` with ``SYNC``."""
    if setting == "TIDEMILL" and project_mill.cache_info().currsize:
        project_mill().sync = isinstance(value, Mapping) and value.get("SYNC") is True


setting_changed.connect(_follow_sync)
