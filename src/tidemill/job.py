"""The nouns that cross the broker seam: plain data, no behaviour.

An :class:`Envelope` is what a producer wrote and nobody changes. What changes (state, attempts, due
time) is the broker's own and is shown as a :class:`Record`. A :class:`Lease` hands an envelope to
an owner, a :class:`Verdict` says what became of it.

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

from tidemill.attempt import Attempt, latest_error, run_of, was_held
from tidemill.gate import Claim
from tidemill.owner import RELAY, Command, Owner
from tidemill.retry import Retries, backoff

__all__ = [
    "CONSUMER_DIED",
    "DEFAULT_TTR",
    "GROUP",
    "GUARD",
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
    "State",
    "Unique",
    "Verdict",
    "Waits",
    "delay_of",
    "priority_of",
    "rank_of",
    "run_of",
    "was_held",
]


class State(enum.StrEnum):
    """Where a job is. Exactly one of these at every instant."""

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
        """True when nothing more will happen to the job by itself."""
        return self in FINISHED


FINISHED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED, State.EXPIRED})


DEFAULT_TTR = 60.0
"""Seconds a consumer has for a message that was put without ``ttr``."""


CONSUMER_DIED = "its consumer died"
NOT_STARTED = "cancelled before it started"
WHILE_RUNNING = "cancelled while it was running"
CANCEL_ASKED = {False: "cancel was asked for", True: "cancel was asked for, at once"}
"""What the trail says of a cancelled job, and of the request, by ``terminate``."""


class Conflict(enum.StrEnum):
    """What a put does when an unfinished job has the same key."""

    KEEP = "keep"
    REJECT = "reject"
    REPLACE = "replace"
    MERGE = "merge"


class Placed(enum.StrEnum):
    """What a put did."""

    CREATED = "created"
    KEPT = "kept"
    REPLACED = "replaced"
    MERGED = "merged"
    SUCCESSOR = "successor"


class Outcome(enum.IntEnum):
    """How one lease ended. ``RELEASE``, ``SNOOZE`` and ``UNKNOWN`` count no attempt.

    ``UNKNOWN`` sets a task aside: the owner does not know it. The job is scheduled, without a time,
    until an owner comes that knows the task (``Want.knows``). With ``Verdict.delay`` the job fails
    after so many seconds, with the verdict's error, if it is still set aside.

    ``CARRY`` does not end it: it goes to the carrier (:mod:`tidemill.brokers.base`).
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


# Priorities are 0 to 4,294,967,295 in the store, lower first, as beanstalkd has them; its usual
# 1024 is our 0, so that jobs of both kinds can share a queue.
_MIDDLE = 1024
_STEP = 10


def rank_of(priority: float) -> int:
    """The stored rank (unsigned 32-bit, lower first) of a priority of -100 to 100, higher first."""
    return round(_MIDDLE - priority * _STEP)


def priority_of(rank: int) -> float:
    """The priority a rank stands for; whole wherever it came from one."""
    value = (_MIDDLE - rank) / _STEP
    return int(value) if value == int(value) else value


class Waits(enum.StrEnum):
    """What a job waits for that comes after others."""

    SUCCESS = "success"  # all succeed; it is cancelled as soon as one ends otherwise
    ANY = "any"  # all end, however
    FAILURE = "failure"  # all end, and one at least not well; else it is forgotten
    BARRIER = "barrier"  # all end; then it ends itself, as they did, and is never run


class Links(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a job hangs together with others.

    Attributes:
        next: ids of the jobs that wait for this one. They are in the store before it, or come in
            the same put before it.
        waits: what this one waits for; empty for a job that is first.
        inputs: ids of the jobs before it whose ends are handed out with its lease, in order. Those
            that name this one as ``next`` are kept until then; another may be gone, and is empty.
    """

    next: tuple[str, ...] = ()
    waits: str = ""
    inputs: tuple[str, ...] = ()


GROUP = "tidemill.group"
"""The task of a job that stands for a group: it waits for all of them and is never run. Its header
``members`` says how many they are; where that was not known yet, that of ``<id>.members`` does."""


GUARD = "tidemill.guard"
"""The task of a job that looks after a group which is put in pieces; every worker has it."""


class Ref(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Stands in a body for how other jobs end, until the one it belongs to is run.

    Attributes:
        ids: the job, or the steps that lead to it in order.
        group: the (last) one stands for a group: the list of their results is meant.
        ended: not the result is meant but how it ended, whatever that was.
    """

    ids: tuple[str, ...]
    group: bool = False
    ended: bool = False

    def __repr__(self) -> str:
        what = "end" if self.ended else "results" if self.group else "result"
        return f"<{what} of {self.ids[-1]}>"


class Planned(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Which schedule put a job, and for which of its times (wall time)."""

    schedule: str
    time: float = 0.0


class Unique(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a key means beyond the time that its job is unfinished. Seconds, 0 for none.

    Attributes:
        period: from acceptance, for which it has the key also when it has succeeded.
        max_wait: from the first of the jobs that one replaced after the other, after which the last
            is due whatever its own delay.
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
    rank: int = _MIDDLE
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
    limit: Claim | None = None
    unique: Unique | None = None

    @property
    def is_message(self) -> bool:
        """True for a raw message: a job with no task."""
        return not self.task

    @property
    def at_most_once(self) -> bool:
        """True for a message that its consumer acknowledges before the message is handed on."""
        return self.ttr == 0 and not self.task


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)
encode_envelope = _ENCODER.encode
decode_envelope = _DECODER.decode


class Put(msgspec.Struct, frozen=True, gc=False):
    """What one put did: the id of the job that now stands for it, and how it came to be."""

    id: str
    placed: Placed


class Input(msgspec.Struct, array_like=True, gc=False):
    """How a job ended that another waited for; an empty state when it is no longer kept."""

    id: str
    state: str = ""
    result: bytes = b""
    error: str = ""


class Lease(msgspec.Struct, array_like=True, gc=False):
    """A job handed to an owner. ``token`` is fresh on every reserve: it is the fence.

    ``attempt`` counts this run, from 1. ``rank`` and ``seq`` say where it stood among the ready:
    what is held in advance is run in that order. A task with ``losses`` is to run alone.
    ``timeout`` is seconds, 0 for none; ``deadline`` is the ttr of a message in seconds, 0 for none.
    ``envelope`` stays encoded: who only carries it on need not open it.
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
    """What became of a lease, and what to store in the same step.

    ``result`` is encoded; empty stands for None. ``delay`` is seconds until the job is ready again.
    For ``RETRY`` of a message, no delay means the delay of the message's own retry policy.
    ``started`` and ``ended`` are wall time. A ``rank`` from 0 on is the job's from then on.

    ``hold`` is for a job whose run cannot be ended yet: a retry is counted at once, and the lease
    stays until a second verdict gives the job back. A job without another attempt ends at once.
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
"""In place of the result of a job that succeeded when the store had no room for it."""


def delay_of(verdict: Verdict, envelope: Envelope, attempt: int) -> float:
    """Seconds until a job runs again whose attempt number ``attempt`` ended with this verdict."""
    by_policy = verdict.delay < 0 or (envelope.is_message and not verdict.delay)
    delays = verdict.outcome == Outcome.RETRY and by_policy
    return backoff(envelope.retries, attempt) if delays else verdict.delay


class Note(msgspec.Struct, array_like=True, gc=False):
    """Something a running job said: progress, or a line of log."""

    token: int
    done: float = -1.0
    total: float = 0.0
    line: str = ""
    time: float = 0.0


class Record(msgspec.Struct, kw_only=True):
    """A job as it stands in the store: the envelope, and all that has happened to it.

    ``attempt`` counts the failed or finished attempts of the current run, ``max_attempts`` bounds
    them, and is 0 where there is no limit. ``pending`` jobs before it have not ended, and
    ``failures`` did not succeed. Times are wall time. A job that is
    ``unknown`` is set aside: it is scheduled until a worker comes that knows its task, and ``due``
    is when it fails.
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
        """The run the job is in: 1, and one more for each kick after an attempt."""
        if not self.attempts:
            return 1
        last = self.attempts[-1]
        return last.run if self.attempt >= last.number else last.run + 1

    @property
    def due_by_wall(self) -> bool:
        """True when it is due at the producer's ``at``, which stores keep to the microsecond."""
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
