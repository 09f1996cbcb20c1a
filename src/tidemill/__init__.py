"""tidemill: a task queue that starts as one directory on disk and grows to many machines."""

import importlib
from typing import TYPE_CHECKING, Any

from tidemill.core import __version__ as __version__

if TYPE_CHECKING:
    from tidemill.app import Tidemill
    from tidemill.brokers.contract.inspection import Filter
    from tidemill.client.context import JobContext, this_job
    from tidemill.client.job_handle import Job
    from tidemill.client.messages import Message
    from tidemill.client.middleware import Middleware
    from tidemill.client.options import Key
    from tidemill.client.queues import Queue
    from tidemill.client.task import Call, Ended, Task
    from tidemill.core.converters import register_converter
    from tidemill.core.job import State
    from tidemill.core.retry import (
        Fail,
        JobTerminated,
        JobTimeout,
        Retries,
        Retry,
        Skip,
        Snooze,
        WorkerStopping,
    )
    from tidemill.errors import (
        DuplicateJob,
        InvalidOption,
        JobCancelled,
        JobFailed,
        JobNotFound,
        JobUnsuccessful,
        QueueFull,
        ResultTimeout,
        StoreError,
        TidemillError,
    )
    from tidemill.limits.declare import Breaker, Limit
    from tidemill.schedules.declare import Schedule
    from tidemill.schedules.parse import When
    from tidemill.workflows.compose import Chain, Flow, Group, chain, group, map_many
    from tidemill.workflows.handles import JobChain, JobGroup, as_completed
else:
    # A name is imported when it is first used, so that the command line starts quickly.
    _MODULES = {
        "app": "Tidemill",
        "brokers.contract.inspection": "Filter",
        "client.context": "JobContext this_job",
        "client.job_handle": "Job",
        "client.messages": "Message",
        "client.middleware": "Middleware",
        "client.options": "Key",
        "client.queues": "Queue",
        "client.task": "Call Ended Task",
        "core.converters": "register_converter",
        "core.job": "State",
        "core.retry": "Fail JobTerminated JobTimeout Retries Retry Skip Snooze WorkerStopping",
        "errors": "DuplicateJob InvalidOption JobCancelled JobFailed JobNotFound "
        "JobUnsuccessful QueueFull ResultTimeout StoreError TidemillError",
        "limits.declare": "Breaker Limit",
        "schedules.declare": "Schedule",
        "schedules.parse": "When",
        "workflows.compose": "Chain Flow Group chain group map_many",
        "workflows.handles": "JobChain JobGroup as_completed",
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
        module = importlib.import_module(f"tidemill.{_MODULE_OF[name]}")
        return globals().setdefault(name, getattr(module, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "Breaker",
    "Call",
    "Chain",
    "DuplicateJob",
    "Ended",
    "Fail",
    "Filter",
    "Flow",
    "Group",
    "InvalidOption",
    "Job",
    "JobCancelled",
    "JobChain",
    "JobContext",
    "JobFailed",
    "JobGroup",
    "JobNotFound",
    "JobTerminated",
    "JobTimeout",
    "JobUnsuccessful",
    "Key",
    "Limit",
    "Message",
    "Middleware",
    "Queue",
    "QueueFull",
    "ResultTimeout",
    "Retries",
    "Retry",
    "Schedule",
    "Skip",
    "Snooze",
    "State",
    "StoreError",
    "Task",
    "Tidemill",
    "TidemillError",
    "When",
    "WorkerStopping",
    "as_completed",
    "chain",
    "group",
    "map_many",
    "register_converter",
    "this_job",
]
