"""Protocols of the app: what tasks, handles, batches, workflows and workers need of their app.

The app (:class:`tidemill.Tidemill`) imports those modules, so they cannot import the app. They use
:class:`Runtime` instead. This module does not import the classes of tasks, job handles or batches
either: their modules import this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store
from tidemill.client.arguments import Arguments
from tidemill.client.call import Call
from tidemill.client.message import Message
from tidemill.client.middleware import Middleware
from tidemill.client.options import Options
from tidemill.client.threads import Threads
from tidemill.core.config import Seconds
from tidemill.core.job import Envelope, Links
from tidemill.core.limit_settings import JobLimit
from tidemill.limits.declare import Limit

__all__ = [
    "DeclaredLimits",
    "DeclaredSchedules",
    "DeclaredTask",
    "FeatureChecks",
    "MessageSource",
    "OpenBatch",
    "Runtime",
]

T = TypeVar("T")


class DeclaredTask(Protocol):
    """A declared task: see :class:`tidemill.client.task.Task`."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def options(self) -> Options: ...
    @property
    def arguments(self) -> Arguments: ...
    @property
    def is_async(self) -> bool: ...
    def call(self, *args: Any, **kwargs: Any) -> Call[Any]: ...
    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]: ...


class FeatureChecks(Protocol):
    """Checks the features of the app's broker: see :class:`tidemill.client.features.Features`."""

    def need(self, feature: Feature, option: str) -> None: ...
    def need_if_known(self, feature: Feature, option: str) -> None: ...
    def declare(self, options: Options) -> Options: ...
    def use(self, options: Options) -> None: ...


class OpenBatch(Protocol):
    """An open batch: see :class:`tidemill.client.batch.Batch`."""

    def holds(self, job_id: str) -> bool: ...


class DeclaredLimits(Protocol):
    """The limits of the app: see :class:`tidemill.client.limits.Limits`."""

    def set_queue(self, name: str, **changes: Any) -> None: ...
    def declare_queue(self, name: str, settings: Mapping[str, Any]) -> None: ...
    def claim(
        self, limit: Limit, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> JobLimit: ...


class DeclaredSchedules(Protocol):
    """The schedules of the app: see :class:`tidemill.schedules.declare.Schedules`."""

    def declared(self) -> list[tuple[str, bytes]]: ...


class MessageSession(Protocol):
    """The time from the first ``get`` of an app to its ``close``."""

    @property
    def over(self) -> bool: ...


class MessageSource(Protocol):
    """Takes messages for the app: see :class:`tidemill.client.consumers.Consumers`."""

    @property
    def session(self) -> Any: ...
    def get(
        self, queues: Sequence[str], timeout: Seconds | None, *, session: Any = None
    ) -> Message | None: ...
    async def aget(
        self, queues: Sequence[str], timeout: Seconds | None, session: Any = None
    ) -> Message | None: ...


class Runtime(Protocol):
    """An app: its settings, its declarations, and the ways to put a job."""

    # -- settings -------------------------------------------------------------------------------

    @property
    def url(self) -> str: ...
    @property
    def broker(self) -> Store: ...
    @property
    def defaults(self) -> Options: ...
    @property
    def keys(self) -> Sequence[bytes]: ...
    @property
    def pickles(self) -> bool: ...
    @property
    def sync(self) -> bool: ...
    @property
    def allow_imports(self) -> tuple[str, ...]: ...
    @property
    def middleware(self) -> tuple[Middleware, ...]: ...
    @property
    def before_close(self) -> list[Callable[[], None]]: ...

    # -- declarations ---------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, DeclaredTask]: ...
    @property
    def local_tasks(self) -> set[str]: ...
    @property
    def features(self) -> FeatureChecks: ...
    @property
    def limits(self) -> DeclaredLimits: ...
    @property
    def schedules(self) -> DeclaredSchedules: ...
    def may_import(self, path: str) -> bool: ...

    # -- enqueueing -----------------------------------------------------------------------------

    @property
    def current_batch(self) -> OpenBatch | None: ...
    def in_batch(self) -> bool: ...
    def call(self, task: str, /, *args: Any, **kwargs: Any) -> Call[Any]: ...
    def envelope(
        self, call: Call[Any], job_id: str = "", links: Links | None = None
    ) -> Envelope: ...
    def seal(self, envelope: Envelope) -> Envelope: ...
    def put(self, envelopes: Sequence[Envelope], txn: Any = None) -> list[Any]: ...
    def enqueue(self, call: Any, /) -> Any: ...
    async def aenqueue(self, call: Any, /) -> Any: ...

    # -- messages and threads -------------------------------------------------------------------

    @property
    def consumers(self) -> MessageSource: ...
    @property
    def threads(self) -> Threads: ...
    @property
    def waiters(self) -> Threads: ...
    async def threaded(self, function: Callable[..., T], *args: Any) -> T: ...
    async def patiently(self, function: Callable[..., T], *args: Any) -> T: ...
