"""The data of the broker contract: plain structs without behaviour.

An :class:`Envelope` is a job as its producer wrote it; only its queue may change. State, attempts
and due time belong to the broker, which shows them in a :class:`Record`. A :class:`Lease` hands an
envelope to an owner. A :class:`Verdict` is the result of the lease.

    put ──► waiting ──► scheduled ──► ready ──► running ──► succeeded
               │            ▲           ▲          │   └──► failed ─(retry)──► ready
               │            └── retry, snooze ─────┤
               │                        └─ release ┘
               └──────── cancel, expiry, from every unfinished state ──► cancelled, expired
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import isfinite
from typing import Any

import msgspec

from tidemill.core.codec import unpack
from tidemill.core.envelope import Envelope, decode_envelope, priority_of
from tidemill.core.retry import backoff
from tidemill.errors import InvalidOption


class State(enum.StrEnum):
    """The state of a job: exactly one at every instant. A state is also a text: ``"ready"``.

    Attributes:
        WAITING: the job waits for other jobs, or for the running job with the same key.
        SCHEDULED: the job starts later: after a delay, a backoff or a snooze.
        READY: a worker may take the job.
        RUNNING: a worker has the job.
        SUCCEEDED: the task returned, or the message was acknowledged.
        FAILED: the job used up its attempts, or will not be retried.
        CANCELLED: somebody cancelled the job, or a job before it did not succeed.
        EXPIRED: the job did not start within its ``expires`` time.
    """

    WAITING = "waiting"
    SCHEDULED = "scheduled"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def finished(self) -> bool:
        """True when the job has ended; only a retry by a person starts it again."""
        return self in FINISHED


FINISHED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED})
WAITING_STATES = frozenset({State.WAITING, State.SCHEDULED, State.READY})
"""The states of a job that has not started, or waits for its next attempt."""


DEFAULT_TTR = 60.0  # seconds to acknowledge a message that was put without ``ttr``


HIDDEN = "hidden"  # the text in the place of a value that a person or program may not see
CONSUMER_DIED = "its consumer died"
NOT_STARTED = "cancelled before it started"
WHILE_RUNNING = "cancelled while it was running"
CANCEL_ASKED = {False: "cancel was asked for", True: "cancel was asked for, at once"}
RETRY_ASKED = "retry was asked for"
"""The line in the history of a cancelled job, with the value of ``terminate`` as the key."""

_PURGED = "purged, in purge "
"""The beginning of the error with which a purge cancels the jobs that it keeps.

A restore brings back the jobs whose error names the purge. Lua and SQL files contain the text, too.
"""


def purged(purge_id: str) -> str:
    return f"{_PURGED}{purge_id}"


def is_purged(error: str) -> bool:
    return error.startswith(_PURGED)


def is_of_purge(error: str, purge_id: str) -> bool:
    return error == purged(purge_id)


def altered_text(rank: int | None, queue: str | None) -> str:
    """The line in the history of a job that got another rank or queue; None for no change."""
    parts = [] if queue is None else [f"queue {queue}"]
    parts += [] if rank is None else [f"priority {priority_of(rank):g}"]
    return f"altered: {', '.join(parts)}"


class Conflict(enum.StrEnum):
    """The effect of a put when an unfinished job has the same key."""

    KEEP = "keep"
    REJECT = "reject"
    REPLACE = "replace"
    MERGE = "merge"


class Placed(enum.StrEnum):
    """The effect of a put."""

    CREATED = "created"
    KEPT = "kept"
    REPLACED = "replaced"
    MERGED = "merged"
    SUCCESSOR = "successor"


class Outcome(enum.IntEnum):
    """The end of a lease. ``RELEASE`` and ``SNOOZE`` count no attempt.

    ``SNOOZE`` gives the job back for ``Verdict.delay`` seconds, with ``Verdict.error`` as the
    reason. If the job has not started, a ``RELEASE`` or ``SNOOZE`` also gives back the tokens of
    limits. So a worker gives back a job of an unknown task (:mod:`tidemill.core.verdicts`).
    """

    SUCCESS = 0
    RETRY = 1
    FAIL = 2
    RELEASE = 3
    SNOOZE = 4
    CANCELLED = 5
    EXPIRED = 6


class RunOn(enum.StrEnum):
    """The condition on the ends of earlier jobs under which a later job starts."""

    SUCCESS = "success"  # all succeed; the first end without success cancels the job
    ANY = "any"  # all end, with or without success
    FAILURE = "failure"  # all end, at least one without success; the job is deleted if all succeed
    BARRIER = "barrier"  # all end; the job never runs: it succeeds if all succeeded, else fails


GROUP = "tidemill.group"
"""The task of a job that stands for a group: the job waits for all members and never runs. Its
header ``members`` is the number of members. If the number was unknown when the job was put, the job
``<id>.members`` has the header."""


class Put(msgspec.Struct, frozen=True, gc=False):
    """The effect of one put: its kind, and the id of the put job or of the job that it kept."""

    id: str
    placed: Placed


class Input(msgspec.Struct, array_like=True, gc=False):
    """The end of a job that another job waited for. The state of a deleted job is empty."""

    id: str
    state: str = ""
    result: bytes = b""
    error: str = ""


class Lease(msgspec.Struct, array_like=True, gc=False):
    """A job handed to an owner.

    Attributes:
        token: a fresh number for every lease; it fences off earlier leases of the job.
        attempt: the number of this attempt in its run, from 1.
        losses: the number of worker processes that died with the job. A job with losses must run
            alone in its process.
        rank, seq: the order of the job among ready jobs; prefetched jobs run in this order.
        timeout: seconds, 0 for none.
        deadline: the ttr of a message in seconds, 0 for none.
        envelope: the encoded envelope. An owner that only passes the job on need not decode it.
    """

    token: int
    attempt: int
    losses: int
    rank: int
    seq: int
    timeout: float
    leased: float
    deadline: float
    envelope: bytes
    inputs: tuple[Input, ...] = ()

    def open(self) -> Envelope:
        return decode_envelope(self.envelope)


class Verdict(msgspec.Struct, array_like=True, gc=False):
    """The result of a lease, with data to store in the same step.

    Attributes:
        result: encoded; empty stands for None.
        delay: seconds until the job is ready again. For ``RETRY`` of a message, 0 means the delay
            of the message's own retry policy.
        started, ended: wall time.
        rank: the new rank of the job; below 0 for no change.
        hold: True for a job that still runs. The store counts the retry at once, and keeps the
            lease until a second verdict gives the job back. If this was the last attempt, the job
            ends at once.
    """

    token: int
    outcome: int
    result: bytes = b""
    delay: float = 0.0
    error: str = ""
    traceback: str = ""
    started: float = 0.0
    ended: float = 0.0
    followers: tuple[Envelope, ...] = ()
    hold: bool = False
    rank: int = -1


def delay_of(verdict: Verdict, envelope: Envelope, attempt: int) -> float:
    """Seconds until a job runs again after attempt ``attempt`` ended with this verdict."""
    by_policy = verdict.delay < 0 or (envelope.is_message and not verdict.delay)
    delays = verdict.outcome == Outcome.RETRY and by_policy
    return backoff(envelope.retries, attempt) if delays else verdict.delay


class Note(msgspec.Struct, array_like=True, gc=False):
    """A report of a running job: progress with its text, or a line of log."""

    token: int
    done: float = -1.0
    total: float = 0.0
    line: str = ""
    time: float = 0.0
    text: str = ""


def whole_progress(done: float, total: float) -> tuple[int, int]:
    """(done, total) of a report. Fractions are cut off; NaN and infinity become 0."""
    return (int(done) if isfinite(done) else 0, int(total) if isfinite(total) else 0)


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One attempt at a job, as the history shows it. Times are epoch seconds, 0 where unknown.

    Attributes:
        number: the number of the attempt within its run, from 1.
        run: the number of the run, from 1. A retry by a person begins the next run.
        worker: the name of the worker.
        leased: when the worker got the job.
        started: when the task began.
        ended: when the task ended.
        outcome: the outcome in the worker's verdict, as a number. For ``Record.outcome_of``, a
            retry after the last attempt is a failure.
        error: the exception as one line, such as ``shop.errors.RateLimited: message``.
        traceback: the traceback as text.
    """

    number: int
    worker: str
    leased: float
    started: float
    ended: float
    outcome: int
    error: str = ""
    traceback: str = ""
    run: int = 1


def run_of(attempts: Sequence[Attempt], number: int) -> int:
    """The run of the next attempt, with this ``number``, after the given attempts."""
    if not attempts:
        return 1
    last = attempts[-1]
    return last.run if number > last.number else last.run + 1


def latest_error(attempts: Sequence[Attempt]) -> str:
    return attempts[-1].error if attempts else ""


def was_held(attempts: Sequence[Attempt], leased: float) -> bool:
    """True when the latest attempt belongs to the lease made at ``leased`` (``Verdict.hold``)."""
    return bool(attempts) and attempts[-1].leased == leased


class Record(msgspec.Struct, kw_only=True):
    """A job as it is in the store: the envelope, and its state and history. Times are wall time.

    Attributes:
        attempt: the number of ended attempts of the current run.
        max_attempts: the most attempts of a run; 0 for no limit.
        pending: the number of earlier jobs that have not ended.
        failures: the number of earlier jobs that did not succeed.
        raw_result: the result as the store has it, encoded; empty stands for None.
        error: the error of a job that ended without success. ``latest_error`` also has the errors
            of attempts.
        progress: (done, total) of the task's last report; None before its first report.
        progress_text: the text of that report; empty without a text.
        attempts: the ended attempts of all runs, oldest first.
        token: the number of the lease of a running job.
        lease_ends: when the lease of a message ends, unless its consumer renews the lease; 0 for
            none.
        listed: True for a record of a list. Lists leave out the result, the log and the body of
            the envelope, because these may be large.
        log: the lines that the task has logged, each as (time, text).
    """

    envelope: Envelope
    state: State
    seq: int
    rank: int
    max_attempts: int = 0
    attempt: int = 0
    losses: int = 0
    pending: int = 0
    failures: int = 0
    due: float = 0.0
    expires: float = 0.0
    finished: float = 0.0
    raw_result: bytes = msgspec.field(default=b"", name="result")
    error: str = ""
    worker: str = ""
    leased: float = 0.0
    cancelling: bool = False
    attempts: list[Attempt] = []
    progress: tuple[int, int] | None = None
    progress_text: str = ""
    log: list[tuple[float, str]] = []
    token: int = 0
    lease_ends: float = 0.0
    listed: bool = False

    def for_list(self) -> Record:
        """A copy as a list shows it: see ``listed``."""
        envelope = msgspec.structs.replace(self.envelope, body=b"")
        return msgspec.structs.replace(self, envelope=envelope, raw_result=b"", log=[], listed=True)

    @property
    def result(self) -> Any:
        """The value that the task returned, as plain data; None unless the job succeeded.

        ``Job.result`` also restores dataclasses, by the annotation of the task.

        Raises:
            InvalidOption: the record is from a list.
            ResultNotKept: the job succeeded, and the store had no room for its result.
            CodecError: another version wrote the result.
        """
        if self.listed and self.state is State.SUCCEEDED:
            job_id = self.envelope.id
            raise InvalidOption(f"a list has no results; read it by job({job_id!r}).result()")
        return unpack(self.raw_result) if self.raw_result else None

    @property
    def latest_error(self) -> str:
        """The error of the job or of its latest attempt; empty without an error."""
        return self.error or latest_error(self.attempts)

    @property
    def latest_traceback(self) -> str:
        return self.attempts[-1].traceback if self.attempts else ""

    @property
    def current_attempt(self) -> int:
        """The number of the attempt that runs now, or of the latest attempt; 0 before the first."""
        is_new = self.state is State.RUNNING and not was_held(self.attempts, self.leased)
        return self.attempt + 1 if is_new else self.attempt

    @property
    def run(self) -> int:
        """The number of the current run: 1, plus one for each retry by hand after an attempt."""
        if not self.attempts:
            return 1
        last = self.attempts[-1]
        return last.run if self.attempt >= last.number else last.run + 1

    @property
    def has_timer(self) -> bool:
        """True when time alone may change the state of the job. Only the store's clock counts."""
        if self.state is State.RUNNING:
            return bool(self.lease_ends)
        return not self.state.finished and bool(self.expires or self.state is State.SCHEDULED)

    @property
    def due_by_wall(self) -> bool:
        """True when the job is due at the producer's ``at``, rounded to microseconds."""
        return bool(self.due) and abs(self.due - self.envelope.at) < 2e-6

    def without_values(self) -> Record:
        """The record without all that may show arguments and results, for whom may not see them.

        Errors and tracebacks stay, although the message of an exception may have an argument.
        """
        e, limit = self.envelope, self.envelope.limit
        if limit is not None and limit.key:
            limit = msgspec.structs.replace(limit, key=HIDDEN)
        key = HIDDEN if e.key else ""
        e = msgspec.structs.replace(e, body=b"", text="", headers={}, key=key, limit=limit)
        return msgspec.structs.replace(self, envelope=e, raw_result=b"", log=[], progress_text="")

    def outcome_of(self, attempt: Attempt) -> Outcome:
        """The outcome of an attempt of this job: a retry of the last attempt is a failure."""
        ended = self.state is State.FAILED and attempt is self.attempts[-1]
        is_last = ended or 0 < self.max_attempts <= attempt.number
        is_failure = attempt.outcome == Outcome.RETRY and is_last
        return Outcome.FAIL if is_failure else Outcome(attempt.outcome)

    def public(self) -> dict[str, Any]:
        """The record as plain data for programs: no body, times as epoch seconds.

        The record of a list has no ``log``.
        """
        e = self.envelope
        shown = {
            "id": e.id,
            "queue": e.queue,
            "task": e.task or None,
            "state": str(self.state),
            "priority": priority_of(self.rank),
            "sequence": self.seq,
            "created": e.created,
            "due": self.due or None,
            "expires": self.expires or None,
            "finished": self.finished or None,
            "key": e.key or None,
            "limit": {"name": e.limit.name, "key": e.limit.key} if e.limit else None,
            "tags": list(e.tags),
            "headers": e.headers,
            "summary": e.text,
            "schedule": e.planned.schedule if e.planned else None,
            "planned": e.planned.time if e.planned else None,
            "run": self.run,
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "losses": self.losses,
            "pending": self.pending,
            "failures": self.failures,
            "timeout": e.timeout or None,
            "ttr": (e.ttr if e.ttr >= 0 else DEFAULT_TTR) if e.is_message else None,
            "worker": self.worker or None,
            "error": self.error or latest_error([] if self.finished else self.attempts) or None,
            "cancelling": self.cancelling,
            "progress": list(self.progress) if self.progress else None,
            "progress_text": self.progress_text or None,
            "attempts": [self._public_attempt(attempt) for attempt in self.attempts],
        }
        log = [{"time": when, "line": line} for when, line in self.log]
        return shown if self.listed else {**shown, "log": log}

    def _public_attempt(self, attempt: Attempt) -> dict[str, Any]:
        return {
            "run": attempt.run,
            "number": attempt.number,
            "worker": attempt.worker,
            "leased": attempt.leased or None,
            "started": attempt.started or None,
            "ended": attempt.ended or None,
            "outcome": self.outcome_of(attempt).name.lower(),
            "error": attempt.error or None,
            "traceback": attempt.traceback or None,
        }


class Command(msgspec.Struct, array_like=True, gc=False):
    """A command to an owner: ``cancel`` or ``terminate`` a lease, ``quiet``, ``stop``.

    ``outgrown WHY`` beside ``quiet`` tells a worker that the store or its job server has another
    version, and no longer serves this one.

    ``dump ID`` and ``profile ID SECONDS HERTZ`` ask a worker for a report. The worker stores the
    report as a note (:mod:`tidemill.client.worker_reports`).

    ``lost`` tells the owner that the broker counts it as dead. Other owners may have its leases
    now. The owner gets no new lease before it attaches again.
    """

    verb: str
    token: int = 0


class Owner(msgspec.Struct, kw_only=True):
    """A worker or a consumer of messages, as the broker knows it.

    A remote owner (:class:`tidemill.brokers.contract.broker.RemoteOwners`) has a ``lease``. After
    this many seconds without a call, the broker counts the owner as dead. An owner without a
    ``lease`` lives as long as its process. ``serial`` is the number of the owner's last step before
    it attached again; the broker refuses older steps. ``version`` is the version of tidemill that a
    worker runs; it is empty for consumers. ``ahead`` is the seconds by which the clock of a
    worker's machine was ahead of the store's clock when the worker began.
    """

    id: str
    kind: str = "worker"
    name: str = ""
    host: str = ""
    pid: int = 0
    started: float = 0.0
    queues: tuple[str, ...] = ()
    concurrency: int = 0
    board: str = ""
    lease: float = 0.0
    serial: int = 0
    version: str = ""
    ahead: float = 0.0
