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

from tidemill.retry import Retries

__all__ = [
    "Attempt",
    "Command",
    "Conflict",
    "Envelope",
    "Lease",
    "Note",
    "Outcome",
    "Owner",
    "Placed",
    "Put",
    "Record",
    "State",
    "Verdict",
    "priority_of",
    "rank_of",
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
    """How one lease ended. ``RELEASE`` and ``SNOOZE`` count no attempt."""

    SUCCESS = 0
    RETRY = 1
    FAIL = 2
    RELEASE = 3
    SNOOZE = 4
    CANCELLED = 5
    EXPIRED = 6


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

    @property
    def is_message(self) -> bool:
        """True for a raw message: a job with no task."""
        return not self.task


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)
encode_envelope = _ENCODER.encode
decode_envelope = _DECODER.decode


class Put(msgspec.Struct, frozen=True, gc=False):
    """What one put did: the id of the job that now stands for it, and how it came to be."""

    id: str
    placed: Placed


class Lease(msgspec.Struct, array_like=True, gc=False):
    """A job handed to an owner. ``token`` is fresh on every reserve: it is the fence.

    ``attempt`` counts this run, from 1. ``timeout`` is seconds, 0 for none; ``deadline`` is the ttr
    of a message in seconds, 0 for none. ``envelope`` stays encoded: who only carries it on need not
    open it.
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

    def open(self) -> Envelope:
        """The decoded envelope."""
        return decode_envelope(self.envelope)


class Verdict(msgspec.Struct, array_like=True, gc=False):
    """What became of a lease, and what to store in the same step.

    ``result`` is encoded; empty stands for None. ``delay`` is seconds until the job is ready again.
    ``started`` and ``ended`` are wall time.
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


class Note(msgspec.Struct, array_like=True, gc=False):
    """Something a running job said: progress, or a line of log."""

    token: int
    done: float = -1.0
    total: float = 0.0
    line: str = ""
    time: float = 0.0


class Command(msgspec.Struct, array_like=True, gc=False):
    """What an owner is told: ``cancel`` or ``terminate`` a lease, ``quiet``, ``stop``, ``dump``."""

    verb: str
    token: int = 0


class Owner(msgspec.Struct, kw_only=True):
    """One worker, or one process that consumes messages, as the broker knows it."""

    id: str
    kind: str = "worker"
    name: str = ""
    host: str = ""
    pid: int = 0
    started: float = 0.0
    queues: tuple[str, ...] = ()
    concurrency: int = 0
    board: str = ""


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One run of a job, as the trail shows it. Times are wall time, 0 where unknown."""

    number: int
    worker: str
    leased: float
    started: float
    ended: float
    outcome: int
    error: str = ""
    traceback: str = ""


class Record(msgspec.Struct, kw_only=True):
    """A job as it stands in the store: the envelope, and all that has happened to it."""

    envelope: Envelope
    state: State
    seq: int
    rank: int
    attempt: int = 0
    losses: int = 0
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
            "tags": list(e.tags),
            "headers": e.headers,
            "summary": e.text,
            "attempt": self.attempt,
            "max_attempts": e.retries.max_attempts,
            "losses": self.losses,
            "timeout": e.timeout or None,
            "worker": self.worker or None,
            "error": self.error or None,
            "cancelling": self.cancelling,
            "progress": list(self.progress) if self.progress else None,
            "attempts": [
                {
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
