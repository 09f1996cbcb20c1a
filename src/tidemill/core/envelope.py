"""The envelope of a job, as its producer wrote it. Only a move to another queue changes it.

Priorities are -100 to 100, higher first. An envelope has a rank, lower first.
"""

from __future__ import annotations

import msgspec

from tidemill.core.retry import RetryPolicy

RESULT_NOT_KEPT = msgspec.msgpack.encode(msgspec.msgpack.Ext(13, b""))
"""This replaces the result of a succeeded job when the store has no room for the result."""


# Ranks are 0 to 4,294,967,295, lower first, like the priorities of beanstalkd. Our priority 0 is
# rank 1024, the usual priority in beanstalkd. So tasks and beanstalk jobs can share a queue.
MIDDLE_RANK = 1024
_STEP = 10


def rank_of(priority: float) -> int:
    """The stored rank (unsigned 32-bit, lower first) of a priority of -100 to 100."""
    return round(MIDDLE_RANK - priority * _STEP)


def priority_of(rank: int) -> float:
    """The priority of a rank; an int if it is whole."""
    value = (MIDDLE_RANK - rank) / _STEP
    return int(value) if value == int(value) else value


class Links(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The links of a job to other jobs.

    Attributes:
        next: ids of the jobs that wait for this job. Those jobs were put before this job, in an
            earlier call or in the same call.
        waits: the condition under which this job starts (:class:`RunOn`); empty for a first job.
        inputs: ids of earlier jobs whose ends are part of this job's lease, in order. The store
            keeps each job whose ``next`` has this job's id, until this job is leased. The input of
            a deleted job is empty.
    """

    next: tuple[str, ...] = ()
    waits: str = ""
    inputs: tuple[str, ...] = ()


class Ref(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A placeholder in a body for the result of another job, until the body's job runs.

    Attributes:
        ids: the id of the job, or of the steps that lead to it, in order.
        group: True for the list of a group's results; the last id is the id of the group.
        ended: True for the end of the job, with or without success, instead of its result.
    """

    ids: tuple[str, ...]
    group: bool = False
    ended: bool = False

    def __repr__(self) -> str:
        what = "end" if self.ended else "results" if self.group else "result"
        return f"<{what} of {self.ids[-1]}>"


class Planned(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The schedule that put a job, and the scheduled time (wall time)."""

    schedule: str
    time: float = 0.0


class Unique(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The times of a key, in seconds; 0 for none.

    Attributes:
        period: a succeeded job keeps its key until this many seconds after its acceptance.
        max_wait: jobs with the key replace each other. The last of these jobs is due at most this
            many seconds after the first, whatever its own delay is.
    """

    period: float = 0.0
    max_wait: float = 0.0


MICROSECONDS = 1_000_000


class LimitSettings(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The settings of a limit. None means no limit of that kind.

    Users write rates, windows and breakers as text (:mod:`tidemill.limits.declare`). The numbers
    are explained in :mod:`tidemill.limits.arithmetic`.

    Attributes:
        rate: (jobs, seconds): the bucket gets ``jobs`` tokens in ``seconds``. A job takes as many
            tokens as its cost. With a rate of 0 jobs, no job starts.
        burst: the most tokens in the bucket.
        window: (jobs, seconds): within any span of ``seconds`` at most ``jobs`` jobs start.
        concurrency: the most jobs that run at a time.
        breaker: (failures, seconds): after ``failures`` failed attempts in a row, no job starts for
            ``seconds``. Then jobs run one at a time until a job succeeds. After n failed attempts
            in a row, at most ``failures`` - n jobs run at a time.
    """

    rate: tuple[float, float] | None = None
    burst: float = 1.0
    window: tuple[float, float] | None = None
    concurrency: int | None = None
    breaker: tuple[int, float] | None = None

    @property
    def every(self) -> float:
        """Microseconds from one token to the next; 0 when the bucket gets no tokens."""
        return self.rate[1] * MICROSECONDS / self.rate[0] if self.rate and self.rate[0] else 0.0


class JobLimit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The limit of a job, as its envelope has it.

    Attributes:
        name: the name of the limit.
        key: the partition, such as a customer. Each key has its own count against the limit, and
            keys take turns. Empty for a limit that all jobs share.
        cost: the tokens that the job takes.
        terms: the settings that its producer declares. They apply until a producer declares other
            settings. Settings that a person sets by hand take precedence and stay.
    """

    name: str
    key: str = ""
    cost: float = 1.0
    terms: LimitSettings = LimitSettings()


FUNCTION = "called-function"  # the header of a job whose task calls a function by its path


class Envelope(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A job as its producer wrote it. Brokers read the named fields and never open ``body``.

    Times are seconds. ``delay`` and ``expires`` run from acceptance on the store's own clock.
    ``at`` and ``created`` are wall time (epoch). 0 means that the time is not given, except for
    ``ttr`` and ``result_ttl``. For these two, a negative value means that the time is not given. A
    ``ttr`` of 0 means at most once, and a ``result_ttl`` of 0 keeps no result.
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
    retries: RetryPolicy = RetryPolicy()
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
    def called(self) -> str:
        """The task, or the function that it calls; a name for people."""
        name = self.headers.get(FUNCTION, "")
        return name if name and name.isprintable() else self.task  # any client may set headers

    @property
    def is_message(self) -> bool:
        """True for a raw message: a job with no task."""
        return not self.task

    @property
    def at_most_once(self) -> bool:
        """True for a message that is acknowledged before its consumer receives it."""
        return self.ttr == 0 and not self.task


class _Unread(Envelope, array_like=True, gc=False, kw_only=True):
    """An envelope whose body stays where it is."""

    body: msgspec.Raw = msgspec.Raw()  # pyright: ignore[reportIncompatibleVariableOverride]


_SMALL = 4096  # bytes of an envelope below which it is faster to copy the body than to leave it out
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)
_UNREAD = msgspec.msgpack.Decoder(_Unread)
encode_envelope = _ENCODER.encode
decode_envelope = _DECODER.decode


def decode_listed(data: bytes | memoryview) -> Envelope:
    """An envelope without its body, for lists. A large body is not read."""
    if len(data) < _SMALL:
        envelope = decode_envelope(data)
        envelope.body = b""
        return envelope
    unread = _UNREAD.decode(data)
    return Envelope(**{**msgspec.structs.asdict(unread), "body": b""})
