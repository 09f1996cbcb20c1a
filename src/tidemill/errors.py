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
    ├── LeaseLost                           the job was handed to somebody else meanwhile
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
and live in :mod:`tidemill.retry`.
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
    """An option, a name or a value cannot be used; the sentence names it and says what to do."""


class ScheduleOver(InvalidOption):
    """A schedule would never fire: its times are past."""


class FeatureMissing(TidemillError):
    """The broker does not have the feature an option needs; the sentence names both."""


class BrokerUnavailable(TidemillError):
    """The store cannot be opened or reached; the driver's own error is the ``__cause__``."""


class StoreGone(BrokerUnavailable):
    """The store was deleted, or replaced by another, while it was open: open it again."""


class NotReplicated(BrokerUnavailable):
    """The server did what was asked, but fewer replicas than ``replicas=`` had it in time."""


class StoreMoved(TidemillError):
    """The store takes and gives nothing more: all of it goes to another; the sentence names it."""


class StoreFull(TidemillError):
    """The disk or the map is nearly full: puts are refused while there is room to finish work."""


class QueueFull(TidemillError, queue.Full):
    """The queue holds ``max_size`` unfinished jobs already."""


class DuplicateJob(TidemillError):
    """A job with this id is kept already, or another one has this key."""

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
    """The job has not finished within the time given to wait; it goes on regardless."""


class JobNotFound(TidemillError, LookupError):
    """No job has this id: it was never accepted here, or it was deleted."""


class JobPruned(JobNotFound):
    """The job was accepted here, finished, and is no longer kept."""


class ScheduleExists(TidemillError):
    """There is a schedule of this name already."""


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
    """The job ended ``cancelled``; raised by a task that was asked to stop, it ends it so."""


class JobExpired(TidemillError):
    """The job was not started before its ``expires`` time."""


class CodecError(TidemillError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


class BadSignature(CodecError):
    """The signature of a job is missing or wrong."""


class ResultNotKept(CodecError):
    """The job succeeded, and its result is lost: the store was nearly full."""
