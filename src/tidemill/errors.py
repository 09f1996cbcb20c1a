"""Every error tidemill raises, in one tree.

    TidemillError
    ├── InvalidOption   (also ValueError)   an option, name or value that cannot be used
    │   ├── ScheduleOver                    a schedule whose times are past
    │   └── TaskNotFound (also LookupError) a call by name of a task that nobody has declared
    ├── FeatureMissing                      the broker cannot do what was asked for
    ├── StoreError                          the store cannot do it now, or here
    │   ├── BrokerUnavailable               the store cannot be opened or reached
    │   │   ├── StoreBusy                   other writers held the store for too long
    │   │   ├── StoreGone                   the store was deleted or replaced while it was open
    │   │   └── NotReplicated               stored, but too few replicas had it in time
    │   ├── StoreMoved                      the store moves, or has moved, to another url
    │   └── StoreFull                       disk or map nearly full: puts are refused, work goes on
    ├── Unroutable      (also LookupError)  no queue is bound to the topic of a mandatory publish
    ├── QueueFull       (also queue.Full)   the queue holds max_size jobs
    ├── DuplicateJob                        the id, or the key under on_conflict="reject", is taken
    ├── LeaseLost                           the lease ended before the message was settled
    ├── LimitTimeout    (also TimeoutError) no place of a limit was free in the time given
    ├── ResultTimeout   (also TimeoutError) the job has not finished in the time given
    ├── JobNotFound     (also LookupError)  no job has this id
    │   └── JobPruned                       the job finished and is no longer kept
    ├── RetryRefused                        another job is in the way of a retry
    ├── ScheduleExists                      there is a schedule of this name already
    ├── ScheduleNotFound (also LookupError) no schedule has this name
    ├── JobUnsuccessful                     the job ended, but did not succeed
    │   ├── JobFailed                       it ended ``failed``; carries the remote traceback
    │   ├── JobCancelled                    it ended ``cancelled``
    │   └── JobExpired                      it ended ``expired``: it was not started in time
    └── CodecError                          data that cannot be encoded or decoded
        ├── BadSignature                    the signature is missing or wrong
        └── ResultNotKept                   the job succeeded; the store had no room for its result

:mod:`tidemill` itself exports the errors that programs catch most.

:mod:`tidemill.core.retry` has two further kinds of exceptions, outside this tree. A task raises
``Retry``, ``Fail``, ``Snooze`` or ``Skip`` to decide the end of its own job. A worker raises
``JobTimeout``, ``JobTerminated`` or ``WorkerStopping`` inside a task to stop the task.
"""

from __future__ import annotations

import queue

__all__ = [
    "BadSignature",
    "BrokerUnavailable",
    "CodecError",
    "DuplicateJob",
    "FeatureMissing",
    "InvalidOption",
    "JobCancelled",
    "JobExpired",
    "JobFailed",
    "JobNotFound",
    "JobPruned",
    "JobUnsuccessful",
    "LeaseLost",
    "LimitTimeout",
    "NotReplicated",
    "QueueFull",
    "ResultNotKept",
    "ResultTimeout",
    "RetryRefused",
    "ScheduleExists",
    "ScheduleNotFound",
    "ScheduleOver",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "StoreGone",
    "StoreMoved",
    "TaskNotFound",
    "TidemillError",
    "Unroutable",
]


class TidemillError(Exception):
    """The root: ``except TidemillError`` catches all errors of this tree."""


class InvalidOption(TidemillError, ValueError):
    """An option, a name or a value cannot be used; the message names the mistake and the remedy."""


class ScheduleOver(InvalidOption):
    """A schedule would never fire: its times are past."""


class TaskNotFound(InvalidOption, LookupError):
    """A call names a task that neither this app nor a worker on its store has declared."""


class FeatureMissing(TidemillError):
    """The broker lacks the feature that an option needs; the message names both."""


class StoreError(TidemillError):
    """The store cannot do what was asked for: it is away, moved or full."""


class BrokerUnavailable(StoreError):
    """The store cannot be opened or reached; ``__cause__`` is the error of the driver."""


class StoreBusy(BrokerUnavailable):
    """Another process wrote to the store for longer than the call could wait; nothing was done."""


class StoreGone(BrokerUnavailable):
    """The store was deleted or replaced while it was open: open it again."""


class NotReplicated(BrokerUnavailable):
    """The server stored the change, but fewer replicas than ``replicas=`` had it in time."""


class StoreMoved(StoreError):
    """The store is moved to the URL that the message names, and takes and leases no job."""


class StoreFull(StoreError):
    """The disk or the map is nearly full: puts are refused so that running work can finish."""


class Unroutable(TidemillError, LookupError):
    """No queue is bound to the topic of a message that was published with ``mandatory=True``."""


class QueueFull(TidemillError, queue.Full):
    """The queue already holds ``max_size`` unfinished jobs."""


class DuplicateJob(TidemillError):
    """Another job has this id, or this key.

    Attributes:
        job_id: the id of the other job.
    """

    def __init__(self, message: str, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id

    @classmethod
    def of_key(cls, key: str, job_id: str) -> DuplicateJob:
        """Another job has the key."""
        return cls(
            f"a job has the key {key!r} already: it is unfinished, or was put with hold= and "
            "that time is not over",
            job_id,
        )


class LeaseLost(TidemillError):
    """The lease ended before the message was settled; another consumer may have the message."""


class LimitTimeout(TidemillError, TimeoutError):
    """No place of a limit was free within the given time."""


class ResultTimeout(TidemillError, TimeoutError):
    """The job has not finished within the given time. The job itself goes on."""


class JobNotFound(TidemillError, LookupError):
    """No job has this id: it was never accepted here, or it was deleted."""


class JobPruned(JobNotFound):
    """The job was accepted here, finished, and is no longer kept."""


class RetryRefused(TidemillError):
    """A job cannot run again because of another job, which the text names."""


class ScheduleExists(TidemillError):
    """A schedule of this name exists already."""


class ScheduleNotFound(TidemillError, LookupError):
    """No schedule has this name."""


class JobUnsuccessful(TidemillError):
    """The job ended, but did not succeed."""


class JobFailed(JobUnsuccessful):
    """The job ended ``failed``.

    Attributes:
        job_id: id of the job.
        error: the last attempt's exception as one line, ``shop.errors.RateLimited: message``.
        traceback: the remote traceback as text, empty when there is none.
    """

    def __init__(self, job_id: str, error: str, traceback: str = "") -> None:
        text = f"job {job_id} failed: {error}"
        super().__init__(f"{text}\n\nremote traceback:\n{traceback}" if traceback else text)
        self.job_id = job_id
        self.error = error
        self.traceback = traceback


class JobCancelled(JobUnsuccessful):
    """The job ended ``cancelled``. A task that should stop may raise ``JobCancelled``."""


class JobExpired(JobUnsuccessful):
    """The job was not started before its ``expires`` time."""


class CodecError(TidemillError):
    """A value cannot be encoded, or bytes cannot be decoded."""


class BadSignature(CodecError):
    """The signature of a job is missing or wrong."""


class ResultNotKept(CodecError):
    """The job succeeded, and its result is lost: the store was nearly full."""
