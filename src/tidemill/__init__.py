"""tidemill: a task queue that starts as one directory on disk and never has to be left."""

from tidemill.app import Tidemill
from tidemill.brokers.base import Filter, QueueStats
from tidemill.completed import Completed
from tidemill.compose import Chain, Flow, Group, chain, group, map_many
from tidemill.context import JobContext, current_job
from tidemill.errors import (
    BadSignature,
    BrokerUnavailable,
    CodecError,
    DuplicateJob,
    FeatureMissing,
    InvalidOption,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobPruned,
    LeaseLost,
    NotReplicated,
    QueueFull,
    ResultNotKept,
    ResultTimeout,
    ScheduleExists,
    ScheduleNotFound,
    ScheduleOver,
    StoreFull,
    StoreGone,
    StoreMoved,
    TidemillError,
)
from tidemill.finding import Found
from tidemill.groups import JobChain, JobGroup, as_completed
from tidemill.handle import Job
from tidemill.hooks import Ended
from tidemill.job import State
from tidemill.limits import Breaker, Limit
from tidemill.middleware import Middleware
from tidemill.queue import Message, Queue
from tidemill.retry import (
    Fail,
    JobTerminated,
    JobTimeout,
    Retries,
    Retry,
    Snooze,
    WorkerStopping,
)
from tidemill.schedules.book import Schedule
from tidemill.schedules.reading import When
from tidemill.task import Call, Task

__version__ = "0.1.0"

__all__ = [
    "BadSignature",
    "Breaker",
    "BrokerUnavailable",
    "Call",
    "Chain",
    "CodecError",
    "Completed",
    "DuplicateJob",
    "Ended",
    "Fail",
    "FeatureMissing",
    "Filter",
    "Flow",
    "Found",
    "Group",
    "InvalidOption",
    "Job",
    "JobCancelled",
    "JobChain",
    "JobContext",
    "JobExpired",
    "JobFailed",
    "JobGroup",
    "JobNotFound",
    "JobPruned",
    "JobTerminated",
    "JobTimeout",
    "LeaseLost",
    "Limit",
    "Message",
    "Middleware",
    "NotReplicated",
    "Queue",
    "QueueFull",
    "QueueStats",
    "ResultNotKept",
    "ResultTimeout",
    "Retries",
    "Retry",
    "Schedule",
    "ScheduleExists",
    "ScheduleNotFound",
    "ScheduleOver",
    "Snooze",
    "State",
    "StoreFull",
    "StoreGone",
    "StoreMoved",
    "Task",
    "Tidemill",
    "TidemillError",
    "When",
    "WorkerStopping",
    "as_completed",
    "chain",
    "current_job",
    "group",
    "map_many",
]
