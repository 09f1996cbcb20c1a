"""A stored job: a header that changes, an envelope that hardly ever changes, and a tail.

The tail holds error, result and attempts of the job; a job without any of these has no tail. The
progress and log of a running job have a separate record (:class:`Notes`), so that reports do not
rewrite the job. The class of a finished job tells how long the job is kept.
"""

from __future__ import annotations

import struct

import lmdb
import msgspec

from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.layout import LOST, READY_KEY
from tidemill.core.envelope import Envelope, JobLimit, decode_envelope
from tidemill.core.job import Attempt, State, is_purged

STATES = tuple(State)
WAITING, SCHEDULED, READY, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED = range(len(STATES))
"""The states as they are stored. ``SUCCEEDED`` and the later states are end states. ``RUNNING`` is
never stored: a running job is a ready job with a lease."""

HEADER = struct.Struct(">BHIIIIIQQQQQddI")
_PLACE = struct.Struct(">B18xI")
_NUMBER = struct.Struct(">Q")
_NUMBER_AT = 23
TOO_LATE = "not started before it expired"


class Flag:
    """Bits of ``Header.flags``."""

    CANCELLING = 1
    MESSAGE = 2
    NOTED = 4
    WALL = 8  # the due time is wall time
    KEYED = 16
    RESULT_TTL = 32
    LINKED = 64  # the job waits for other jobs, or other jobs wait for this job
    DROPPED = 128  # the job ended because of how its parents ended
    LIMITED = 256  # the job is under a limit, and in a partition
    APART = 512  # the job has an entry of its own in the order of acceptance


class Header(msgspec.Struct, gc=False):
    """The part of a stored job that changes, in the order of ``HEADER``."""

    state: int
    flags: int
    attempt: int
    losses: int
    limit: int
    rank: int
    line: int
    seq: int
    due: int
    expires: int
    finished: int
    prune: int
    ttr: float
    timeout: float
    size: int

    @property
    def ready_key(self) -> bytes:
        """The key of the job in the ready table, while the job is ready."""
        lost = LOST if self.losses and not self.flags & Flag.MESSAGE else 0
        return READY_KEY.pack(self.line | lost, self.rank, self.seq)

    def pack(self) -> bytes:
        return HEADER.pack(
            self.state,
            self.flags,
            self.attempt,
            self.losses,
            self.limit,
            self.rank,
            self.line,
            self.seq,
            self.due,
            self.expires,
            self.finished,
            self.prune,
            self.ttr,
            self.timeout,
            self.size,
        )


class Tail(msgspec.Struct, array_like=True, gc=False):
    """The error, result and attempts of a job, stored behind its envelope."""

    error: str = ""
    result: bytes = b""
    attempts: list[Attempt] = []


class _TailUnread(msgspec.Struct, array_like=True, gc=False):
    """A tail whose result stays where it is."""

    error: str = ""
    result: msgspec.Raw = msgspec.Raw()
    attempts: list[Attempt] = []


class Stored:
    """One job: its header, and the bytes of its envelope and tail."""

    # ``data`` are bytes, or a view of the store, which is valid during its transaction.

    __slots__ = ("data", "head", "id")

    def __init__(self, job_id: bytes, data: bytes) -> None:
        self.id = job_id
        self.data = data
        self.head = Header(*HEADER.unpack_from(data))

    @property
    def envelope(self) -> bytes:
        return self.data[_HEAD : _HEAD + self.head.size]

    @property
    def tail(self) -> Tail:
        """The tail, decoded; an empty tail when none is stored."""
        rest = self.data[_HEAD + self.head.size :]
        return _TAIL.decode(rest) if rest else Tail()

    @property
    def tail_without_result(self) -> Tail:
        """The tail with an empty result. A large result is not read."""
        rest = self.data[_HEAD + self.head.size :]
        if not rest:
            return Tail()
        unread = _TAIL_UNREAD.decode(rest)
        return Tail(unread.error, b"", unread.attempts)

    def move_to(self, line: int, queue: str) -> None:
        """Write another queue, with its line, into the header and the envelope."""
        envelope = msgspec.structs.replace(decode_envelope(self.envelope), queue=queue)
        encoded, tail = encode(envelope), self.data[_HEAD + self.head.size :]
        self.head.line, self.head.size = line, len(encoded)
        self.data = self.head.pack() + encoded + tail

    def packed(self, tail: Tail | None = None) -> bytes:
        """The job as stored, with the given tail or, without one, with its present tail."""
        size = _HEAD + self.head.size
        rest = self.data[size:] if tail is None else encode(tail)
        return self.head.pack() + self.data[_HEAD:size] + rest


class Notes(msgspec.Struct, array_like=True):
    """The progress and log that a running job has reported."""

    progress: tuple[float, float] | None = None
    log: list[tuple[float, str]] = []
    text: str = ""


class _NotesUnread(msgspec.Struct, array_like=True):
    """Notes whose log stays where it is."""

    progress: tuple[float, float] | None = None
    log: msgspec.Raw = msgspec.Raw()
    text: str = ""


def notes_of(data: bytes, *, listed: bool = False) -> Notes:
    """Notes, decoded; with ``listed`` without the log, which is not read."""
    if not listed:
        return _NOTES.decode(data)
    unread = _NOTES_UNREAD.decode(data)
    return Notes(unread.progress, [], unread.text)


class _Part(msgspec.Struct, array_like=True, gc=False):
    """An envelope up to the fields that a finishing job needs."""

    id: str
    queue: str
    task: str
    body: msgspec.Raw
    created: float
    rank: int
    delay: float
    at: float
    expires: float
    timeout: float
    ttr: float
    retries: msgspec.Raw
    key: str
    on_conflict: str
    result_ttl: float


class _Limited(_Part, array_like=True, gc=False):
    """An envelope up to its limit."""

    tags: msgspec.Raw
    headers: msgspec.Raw
    text: msgspec.Raw
    pickled: msgspec.Raw
    signature: msgspec.Raw
    links: msgspec.Raw
    planned: msgspec.Raw
    limit: JobLimit


def job_limit_of(envelope: bytes) -> JobLimit:
    return _LIMITED.decode(envelope).limit


def flags_of(data: bytes) -> int:
    """The flags in a stored job's header, without the rest."""
    return data[1] << 8 | data[2]


def state_and_line(data: bytes) -> tuple[int, int]:
    """The state and line in a stored job's header, without the rest."""
    state, line = _PLACE.unpack_from(data)
    return state, line


def number_in(data: bytes | memoryview) -> int:
    """The sequence number in a stored job's header, without the rest."""
    number: int = _NUMBER.unpack_from(data, _NUMBER_AT)[0]
    return number


def envelope_of(stored: Stored) -> Envelope:
    return decode_envelope(stored.envelope)


def key_of(stored: Stored) -> bytes:
    return _PART.decode(stored.envelope).key.encode()


def result_ttl_of(stored: Stored) -> float:
    """Seconds for which the job's own option keeps the job; negative without this option."""
    given = stored.head.flags & Flag.RESULT_TTL
    return _PART.decode(stored.envelope).result_ttl if given else -1.0


_HEAD = HEADER.size
_TAIL = msgspec.msgpack.Decoder(Tail)
_PART = msgspec.msgpack.Decoder(_Part)
_LIMITED = msgspec.msgpack.Decoder(_Limited)
_TAIL_UNREAD = msgspec.msgpack.Decoder(_TailUnread)
_NOTES = msgspec.msgpack.Decoder(Notes)
_NOTES_UNREAD = msgspec.msgpack.Decoder(_NotesUnread)
encode = msgspec.msgpack.Encoder().encode


KEPT_PLAIN, KEPT_RESULT, KEPT_OTHER, KEPT_LINKED = range(4)
"""Classes of finished jobs. In order: succeeded without a result; succeeded with a result,
cancelled or expired; failed or purged; jobs of flows. A job of a flow gets one of the other classes
when no later job needs it any more."""

KEPT = struct.Struct(">QQQ")  # the numbers of jobs in the first three classes, as stored


def kept_counts(store: Store, txn: lmdb.Transaction[bytes]) -> list[int]:
    """The number of finished jobs in each of the first three classes."""
    data = txn.get(store.key("kept"))
    return list(KEPT.unpack(data)) if data else [0, 0, 0]


def class_of(state: int, tail: Tail) -> int:
    """The class of a job."""
    # Failed and purged jobs are kept for people, and jobs with results for their callers.
    if state == FAILED or is_purged(tail.error):
        return KEPT_OTHER
    return KEPT_PLAIN if state == SUCCEEDED and not tail.result else KEPT_RESULT
