"""The data of the broker contract: plain structs without behaviour.

An :class:`Envelope` is a job as its producer wrote it, and never changes. State, attempts and due
time belong to the broker, which shows them in a :class:`Record`. A :class:`Lease` hands an envelope
to an owner. A :class:`Verdict` is the result of the lease.

    put ──► waiting ──► scheduled ──► ready ──► running ──► succeeded
               │            ▲           ▲          │   └──► failed ──(kick)──► ready
               │            └── retry, snooze ─────┤
               │                        └─ release ┘
               └──────── cancel, expiry, from every unfinished state ──► cancelled, expired
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from tidemill.core.attempts import Attempt, latest_error, run_of, was_held
from tidemill.core.limit_settings import JobLimit
from tidemill.core.owner import RELAY, Command, Owner
from tidemill.core.priority import MIDDLE_RANK, priority_of, rank_of
from tidemill.core.retry import Retries, backoff

__all__ = [
    "CONSUMER_DIED",
    "DEFAULT_TTR",
    "GROUP",
    "RELAY",
    "Attempt",
    "Command",
    "Conflict",
    "Envelope",
    "Input",
    "Lease",
    "Links",
    "Note",
    "Outcome",
    "Owner",
    "Placed",
    "Planned",
    "Put",
    "Record",
    "Ref",
    "RunOn",
    "State",
    "Unique",
    "Verdict",
    "delay_of",
    "priority_of",
    "rank_of",
    "run_of",
    "was_held",
]


class State(enum.StrEnum):
    """The state of a job: exactly one at every instant."""

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
        """True when the job changes no more by itself."""
        return self in FINISHED


FINISHED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED})


DEFAULT_TTR = 60.0
"""The seconds that a consumer has for a message put without ``ttr``."""


CONSUMER_DIED = "its consumer died"
NOT_STARTED = "cancelled before it started"
WHILE_RUNNING = "cancelled while it was running"
CANCEL_ASKED = {False: "cancel was asked for", True: "cancel was asked for, at once"}
"""Lines in the history of a cancelled job, by ``terminate``."""


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
    """The end of a lease. ``RELEASE``, ``SNOOZE`` and ``UNKNOWN`` count no attempt.

    ``UNKNOWN`` sets a job aside, since the owner does not know its task. The job is scheduled,
    without a time, until an owner comes that knows the task (``Want.knows``). With
    ``Verdict.delay`` a job that is still set aside fails after so many seconds, with the verdict's
    error.

    ``CARRY`` gives the lease to the carrier (:mod:`tidemill.brokers.contract.carrier`).
    """

    SUCCESS = 0
    RETRY = 1
    FAIL = 2
    RELEASE = 3
    SNOOZE = 4
    CANCELLED = 5
    EXPIRED = 6
    CARRY = 7
    UNKNOWN = 8


class RunOn(enum.StrEnum):
    """The ends of earlier jobs that start a job behind them."""

    SUCCESS = "success"  # all succeed; the job is cancelled as soon as one does not
    ANY = "any"  # all end, however
    FAILURE = "failure"  # all end, and at least one does not succeed; else the job is deleted
    BARRIER = "barrier"  # all end; then the job ends like them, and never runs


class Links(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The links of a job to other jobs.

    Attributes:
        next: ids of the jobs that wait for this job. They were put before it, in an earlier or the
            same call.
        waits: the condition of this job (:class:`RunOn`); empty for a first job.
        inputs: ids of earlier jobs whose ends are part of the lease, in order. Jobs that name this
            job as ``next`` are kept until then; another job may be gone, and its input is empty.
    """

    next: tuple[str, ...] = ()
    waits: str = ""
    inputs: tuple[str, ...] = ()


GROUP = "tidemill.group"
"""The task of a job that stands for a group: it waits for all members and never runs. Its header
``members`` is the number of members; where that was unknown, the job ``<id>.members`` has it."""


class Ref(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A placeholder in a body for the result of another job, until the body's job runs.

    Attributes:
        ids: the job, or the steps that lead to it in order.
        group: True for the list of the results of a group; the last id is the group.
        ended: True for the end of the job, whatever it was, instead of its result.
    """

    ids: tuple[str, ...]
    group: bool = False
    ended: bool = False

    def __repr__(self) -> str:
        what = "end" if self.ended else "results" if self.group else "result"
        return f"<{what} of {self.ids[-1]}>"


class Planned(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The schedule that put a job, and the time of the schedule (wall time)."""

    schedule: str
    time: float = 0.0


class Unique(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The effect of a key beyond its job's end. Seconds, 0 for none.

    Attributes:
        period: seconds from acceptance in which a job keeps its key after success.
        max_wait: seconds from the first of the jobs that replaced each other; then the last job is
            due whatever its own delay.
    """

    period: float = 0.0
    max_wait: float = 0.0


class Envelope(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A job as its producer wrote it. Brokers read the named fields and never open ``body``.

    Times are seconds; ``delay`` and ``expires`` run from acceptance on the store's own clock,
    ``at`` and ``created`` are wall time (epoch). 0 means none, except ``ttr``, where 0 means at
    most once and a negative value means none was given, and ``result_ttl``, likewise.
    """

    id: str
    queue: str = "default"
    task: str = ""
    body: bytes = b""
    created: float = 0.0
    rank: int = MIDDLE_RANK
    delay: float = 0.0
    at: float = 0.0
    expires: float = 0.0
    timeout: float = 0.0
    ttr: float = -1.0
    retries: Retries = Retries()
    key: str = ""
    on_conflict: str = "keep"
    result_ttl: float = -1.0
    tags: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    text: str = ""
    pickled: bool = False
    signature: bytes = b""
    links: Links | None = None
    planned: Planned | None = None
    limit: JobLimit | None = None
    unique: Unique | None = None

    @property
    def is_message(self) -> bool:
        """True for a raw message: a job with no task."""
        return not self.task

    @property
    def at_most_once(self) -> bool:
        """True for a message that is acknowledged before its consumer receives it."""
        return self.ttr == 0 and not self.task


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)
encode_envelope = _ENCODER.encode
decode_envelope = _DECODER.decode


class Put(msgspec.Struct, frozen=True, gc=False):
    """The effect of one put: the id of the job that now stands for it, and the way."""

    id: str
    placed: Placed


class Input(msgspec.Struct, array_like=True, gc=False):
    """The end of a job that another job waited for; an empty state when the job is gone."""

    id: str
    state: str = ""
    result: bytes = b""
    error: str = ""


class Lease(msgspec.Struct, array_like=True, gc=False):
    """A job handed to an owner.

    Attributes:
        token: a fresh number for every lease; it fences off earlier leases of the job.
        attempt: the number of this attempt in its run, from 1.
        losses: the number of workers that died with the task; above 0 it must run alone.
        rank, seq: the order of the job among the ready ones; prefetched jobs run in this order.
        timeout: seconds, 0 for none.
        deadline: the ttr of a message in seconds, 0 for none.
        envelope: encoded, since an owner that only passes it on need not decode it.
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
        """The decoded envelope."""
        return decode_envelope(self.envelope)


class Verdict(msgspec.Struct, array_like=True, gc=False):
    """The result of a lease, with data to store in the same step.

    Attributes:
        result: encoded; empty stands for None.
        delay: seconds until the job is ready again. For ``RETRY`` of a message, 0 means the delay
            of the message's own retry policy.
        started, ended: wall time.
        rank: the new rank of the job; below 0 for no change.
        hold: True for a job that still runs: a retry counts at once, and the lease stays until a
            second verdict gives the job back. A job without another attempt ends at once.
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


RESULT_NOT_KEPT = msgspec.msgpack.encode(msgspec.msgpack.Ext(13, b""))
"""The result of a succeeded job when the store had no room for its own result."""


def delay_of(verdict: Verdict, envelope: Envelope, attempt: int) -> float:
    """Seconds until a job runs again after attempt ``attempt`` ended with this verdict."""
    by_policy = verdict.delay < 0 or (envelope.is_message and not verdict.delay)
    delays = verdict.outcome == Outcome.RETRY and by_policy
    return backoff(envelope.retries, attempt) if delays else verdict.delay


class Note(msgspec.Struct, array_like=True, gc=False):
    """A report of a running job: progress, or a line of log."""

    token: int
    done: float = -1.0
    total: float = 0.0
    line: str = ""
    time: float = 0.0


class Record(msgspec.Struct, kw_only=True):
    """A job as it is in the store: the envelope, and its state and history. Times are wall time.

    Attributes:
        attempt: the number of ended attempts of the current run.
        max_attempts: the most attempts of a run; 0 for no limit.
        pending: the number of earlier jobs that have not ended.
        failures: the number of earlier jobs that did not succeed.
        unknown: True for a job set aside: it is scheduled until a worker comes that knows its task,
            and fails at ``due``.
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
    result: bytes = b""
    error: str = ""
    worker: str = ""
    leased: float = 0.0
    cancelling: bool = False
    attempts: list[Attempt] = []
    progress: tuple[float, float] | None = None
    log: list[tuple[float, str]] = []
    unknown: bool = False

    @property
    def run(self) -> int:
        """The number of the current run: 1, plus one for each kick after an attempt."""
        if not self.attempts:
            return 1
        last = self.attempts[-1]
        return last.run if self.attempt >= last.number else last.run + 1

    @property
    def due_by_wall(self) -> bool:
        """True when the job is due at the producer's ``at``; stores keep microseconds."""
        return bool(self.due) and abs(self.due - self.envelope.at) < 2e-6

    def public(self) -> dict[str, Any]:
        """The record as plain data for programs: no body, times as epoch seconds."""
        e = self.envelope
        return {
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
            "unknown": self.unknown,
            "progress": list(self.progress) if self.progress else None,
            "attempts": [
                {
                    "run": a.run,
                    "number": a.number,
                    "worker": a.worker,
                    "leased": a.leased or None,
                    "started": a.started or None,
                    "ended": a.ended or None,
                    "outcome": Outcome(a.outcome).name.lower(),
                    "error": a.error or None,
                    "traceback": a.traceback or None,
                }
                for a in self.attempts
            ],
            "log": [{"time": when, "line": line} for when, line in self.log],
        }
