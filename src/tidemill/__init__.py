"""tidemill: a task queue that starts as one directory on disk and never has to be left."""

from tidemill.app import Tidemill
from tidemill.brokers.contract.inspection import Filter, QueueStats
from tidemill.client.as_completed import Completed
from tidemill.client.call import Call
from tidemill.client.callbacks import Ended
from tidemill.client.context import JobContext, current_job
from tidemill.client.job_handle import Job
from tidemill.client.message import Message
from tidemill.client.messages import Queue
from tidemill.client.middleware import Middleware
from tidemill.client.search import Found
from tidemill.client.task import Task
from tidemill.core.errors import (
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
from tidemill.core.job import State
from tidemill.core.retry import (
    Fail,
    JobTerminated,
    JobTimeout,
    Retries,
    Retry,
    Snooze,
    WorkerStopping,
)
from tidemill.limits.declare import Breaker, Limit
from tidemill.schedules.declare import Schedule
from tidemill.schedules.parse import When
from tidemill.workflows.compose import Chain, Flow, Group, chain, group, map_many
from tidemill.workflows.handles import JobChain, JobGroup, as_completed

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
