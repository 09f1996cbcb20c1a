"""Every error tidemill raises, in one tree.

    TidemillError
    ├── InvalidOption   (also ValueError)   an option, name or value that cannot be used
    │   └── ScheduleOver                    a schedule whose times are past
    ├── FeatureMissing                      the broker cannot do what was asked for
    ├── BrokerUnavailable                   the store cannot be opened or reached
    │   ├── StoreGone                       the store was deleted or replaced while it was open
    │   └── NotReplicated                   stored, but too few replicas had it in time
    ├── StoreMoved                          all of the store goes, or went, to another url
    ├── StoreFull                           disk or map nearly full: puts are refused, work goes on
    ├── QueueFull       (also queue.Full)   the queue holds max_size jobs
    ├── DuplicateJob                        the id, or the key under on_conflict="reject", is taken
    ├── LeaseLost                           the job was leased to another owner meanwhile
    ├── ResultTimeout   (also TimeoutError) the job has not finished in the time given
    ├── JobNotFound     (also LookupError)  no job has this id
    │   └── JobPruned                       the job finished and is no longer kept
    ├── ScheduleExists                      there is a schedule of this name already
    ├── ScheduleNotFound (also LookupError) no schedule has this name
    ├── JobFailed                           the job ended ``failed``; carries the remote traceback
    ├── JobCancelled                        the job ended ``cancelled``
    ├── JobExpired                          the job ended ``expired``: it was not started in time
    └── CodecError                          data that cannot be encoded or decoded
        ├── BadSignature                    the signature is missing or wrong
        └── ResultNotKept                   the job succeeded; the store had no room for its result

What a task raises to steer its own job (``Retry``, ``Fail``, ``Snooze``) and what is raised inside
a task to stop it (``JobTimeout``, ``JobTerminated``, ``WorkerStopping``) are no errors of tidemill
and live in :mod:`tidemill.core.retry`.
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
    "LeaseLost",
    "NotReplicated",
    "QueueFull",
    "ResultNotKept",
    "ResultTimeout",
    "ScheduleExists",
    "ScheduleNotFound",
    "ScheduleOver",
    "StoreFull",
    "StoreGone",
    "StoreMoved",
    "TidemillError",
]


class TidemillError(Exception):
    """The root: ``except TidemillError`` catches everything tidemill raises."""


class InvalidOption(TidemillError, ValueError):
    """An option, a name or a value cannot be used; the message names it and the remedy."""


class ScheduleOver(InvalidOption):
    """A schedule would never fire: its times are past."""


class FeatureMissing(TidemillError):
    """The broker lacks the feature that an option needs; the message names both."""


class BrokerUnavailable(TidemillError):
    """The store cannot be opened or reached; ``__cause__`` is the error of the driver."""


class StoreGone(BrokerUnavailable):
    """The store was deleted or replaced while it was open: open it again."""


class NotReplicated(BrokerUnavailable):
    """The server stored the change, but fewer replicas than ``replicas=`` had it in time."""


class StoreMoved(TidemillError):
    """The store accepts and leases nothing more, since it moves; the message names the target."""


class StoreFull(TidemillError):
    """The disk or the map is nearly full: puts are refused so that running work can finish."""


class QueueFull(TidemillError, queue.Full):
    """The queue already holds ``max_size`` unfinished jobs."""


class DuplicateJob(TidemillError):
    """Another job has this id, or this key."""

    def __init__(self, message: str, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id

    @classmethod
    def of_key(cls, key: str, job_id: str) -> DuplicateJob:
        """Another job has the key."""
        return cls(
            f"a job has the key {key!r} already: it is unfinished, or was put with unique_for= and "
            "that time is not over",
            job_id,
        )


class LeaseLost(TidemillError):
    """The lease ended before the message was settled; another consumer may have it now."""


class ResultTimeout(TidemillError, TimeoutError):
    """The job has not finished within the given time; it goes on."""


class JobNotFound(TidemillError, LookupError):
    """No job has this id: it was never accepted here, or it was deleted."""


class JobPruned(JobNotFound):
    """The job was accepted here, finished, and is no longer kept."""


class ScheduleExists(TidemillError):
    """A schedule of this name exists already."""


class ScheduleNotFound(TidemillError, LookupError):
    """No schedule has this name."""


class JobFailed(TidemillError):
    """The job ended ``failed``.

    Attributes:
        job_id: id of the job.
        error: the last attempt's exception as one line, ``Type: message``.
        traceback: the remote traceback as text, empty when there is none.
    """

    def __init__(self, job_id: str, error: str, traceback: str = "") -> None:
        text = f"job {job_id} failed: {error}"
        super().__init__(f"{text}\n\nremote traceback:\n{traceback}" if traceback else text)
        self.job_id = job_id
        self.error = error
        self.traceback = traceback


class JobCancelled(TidemillError):
    """The job ended ``cancelled``. A task that was asked to stop may raise it to end so."""


class JobExpired(TidemillError):
    """The job was not started before its ``expires`` time."""


class CodecError(TidemillError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


class BadSignature(CodecError):
    """The signature of a job is missing or wrong."""


class ResultNotKept(CodecError):
    """The job succeeded, and its result is lost: the store was nearly full."""
