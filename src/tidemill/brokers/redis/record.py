"""Packing of jobs: the client writes new records, and reads records and leases.

``lua/layout.lua`` and ``lua/put_accept.lua`` have the other side.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tidemill.brokers.contract.dependencies import check_links, was_dropped
from tidemill.core.envelope import (
    Envelope,
    JobLimit,
    LimitSettings,
    Unique,
    decode_envelope,
    encode_envelope,
)
from tidemill.core.job import (
    Attempt,
    Conflict,
    Input,
    Lease,
    Record,
    RunOn,
    State,
    Verdict,
    whole_progress,
)
from tidemill.errors import InvalidOption

MICRO = 1_000_000

STATES = tuple(State)
_READY, _RUNNING, _SUCCEEDED = 2, 3, 4
_CANCELLING, _MESSAGE, _NOTED, _TIMED, _TAIL, _LINKED, _LIMITED = 1, 2, 4, 8, 16, 64, 128

_HEAD = struct.Struct(">BBIIIII")  # state, flags, attempt, losses, limit, policy, rank
_SEQ = struct.Struct(">Q")
_TIMES = struct.Struct(">QQddd")  # due, expires, ttr, timeout, result_ttl
_WISH = struct.Struct(">Bddd")  # conflict, delay, at, expires
_LINKS = struct.Struct(">BII")  # wait condition, number of inputs, number of dependents
_COUNTS = struct.Struct(">IIBB")  # pending, failures, wait condition, whether the job was dropped
TERMS = struct.Struct(">Bdddddddd")
"""Bits of the settings that exist, rate, burst, window, concurrency, breaker."""
_LEASED = struct.Struct(">QQQH")  # token, leased, deadline, size of owner
_FINISHED = struct.Struct(">QQ")  # finished, prune
_SIZE = struct.Struct(">I")
_ATTEMPT = struct.Struct(">IdddBH")  # number, leased, started, ended, outcome, size of worker
# The number of the run comes after error and traceback, except for the first run.
_VERDICT = struct.Struct(">QBdddBIIIq")
_LEASE = struct.Struct(">QIIIQdQd")
_SHORT = struct.Struct(">H")
_PAIR = struct.Struct(">dd")
_DOUBLE = struct.Struct(">d")
_WAITS = {"": 0, RunOn.SUCCESS: 1, RunOn.ANY: 2, RunOn.FAILURE: 3, RunOn.BARRIER: 4}
_CONFLICTS = {Conflict.KEEP: 0, Conflict.REJECT: 1, Conflict.REPLACE: 2, Conflict.MERGE: 3}


PUT_MOST = 50_000  # the most jobs of one put: the server does nothing else meanwhile


def pack_put(jobs: Sequence[Envelope]) -> list[bytes]:
    """Four arguments for each job: its id, record without the sequence, envelope and wish."""
    # The wish has the job's conflict rule, times, links and limit.
    if len(jobs) > PUT_MOST:
        raise InvalidOption(
            f"redis:// stores at most {PUT_MOST} jobs in one put, not {len(jobs)}; "
            "put them in smaller batches"
        )
    args: list[bytes] = []
    for job in jobs:
        plain = pack_plain(job)
        args += (*plain[:3], b"") if plain is not None else _pack_job(job)
    return args


def pack_plain(job: Envelope) -> tuple[bytes, bytes, bytes, bytes, bytes] | None:
    """The id, the record, the envelope, the line and the rank of a plain job; None for others."""
    # A plain job needs only its place in a queue.
    if job.key or job.delay or job.at or job.expires or job.links or job.limit:
        return None
    times = job.ttr, job.timeout, job.result_ttl
    record, line, rank = _fixed(job.queue, job.rank, not job.task, job.retries.limit, *times)
    return job.id.encode(), record, encode_envelope(job), line, rank


@functools.lru_cache(1000)
def _fixed(
    queue: str, rank: int, message: bool, limit: int, ttr: float, timeout: float, result_ttl: float
) -> tuple[bytes, bytes, bytes]:
    """The parts that many plain jobs have in common: the record, the line and the rank."""
    name = queue.encode()
    flags, times = _MESSAGE if message else 0, b""
    if timeout or ttr >= 0 or result_ttl >= 0:
        flags, times = flags | _TIMED, _TIMES.pack(0, 0, ttr, timeout, result_ttl)
    record = _HEAD.pack(_READY, flags, 0, 0, limit + 1, limit + 1, rank)
    record += b"%c%b\0%b" % (len(name), name, times)
    return record, b"%c%b" % (77 if message else 84, name), b"%d" % rank


def _pack_job(job: Envelope) -> tuple[bytes, bytes, bytes, bytes]:
    queue, key = job.queue.encode(), job.key.encode()
    limit = job.retries.limit + 1
    flags = 0 if job.task else _MESSAGE
    if job.links is not None:
        flags |= _LINKED
    if job.limit is not None:
        flags |= _LIMITED
    timed = job.timeout or job.ttr >= 0 or job.result_ttl >= 0
    if timed:
        flags |= _TIMED
    record = _HEAD.pack(_READY, flags, 0, 0, limit, limit, job.rank)
    record += b"%c%b%c%b" % (len(queue), queue, len(key), key)
    if job.limit is not None:
        record += _pack_lane(job.limit)
    if timed:
        record += _TIMES.pack(0, 0, job.ttr, job.timeout, job.result_ttl)
    return job.id.encode(), record, encode_envelope(job), _pack_wish(job)


def pack_holds(
    jobs: Sequence[Envelope], hold: Collection[str], let_go: Collection[str]
) -> list[bytes]:
    """The arguments about jobs that wait for other jobs; empty without such jobs."""
    held: list[bytes] = []
    if hold or let_go or any(job.links for job in jobs):
        for job in jobs:
            check_links(job)
        for names in (hold, let_go):
            held += (b"%d" % len(names), *(name.encode() for name in names))
    return held


def _pack_lane(claim: JobLimit) -> bytes:
    """The partition of a job under a limit, and the job's cost there."""
    lane = f"{claim.name}\0{claim.key}".encode()
    return _SHORT.pack(len(lane)) + lane + _DOUBLE.pack(claim.cost)


def pack_terms(t: LimitSettings, *, if_new: bool = False) -> bytes:
    """Pack the settings of a limit. With ``if_new`` the settings do not change a known limit."""
    which = (t.rate is not None) | (t.window is not None) << 1 | if_new << 4
    which |= (t.concurrency is not None) << 2 | (t.breaker is not None) << 3
    none = (0.0, 0.0)
    concurrency = t.concurrency or 0
    return TERMS.pack(
        which, *(t.rate or none), t.burst, *(t.window or none), concurrency, *(t.breaker or none)
    )


def _pack_unique(job: Envelope, until: float) -> bytes:
    """Pack the period (or its end) in which a key holds even after success, and ``max_wait``."""
    unique = job.unique or Unique()
    return _PAIR.pack(until if until else unique.period, unique.max_wait)


def _pack_wish(job: Envelope, until: float = 0.0) -> bytes:
    """Pack the rule for a conflict of keys, the times, the links, and the limit's settings."""
    limit = b""
    if job.limit is not None:
        limit = pack_terms(job.limit.terms, if_new=job.planned is not None)
    wish = _WISH.pack(_CONFLICTS[Conflict(job.on_conflict)], job.delay, job.at, job.expires)
    links = job.links
    if links is None:
        return wish + (_pack_unique(job, until) if job.key else b"") + limit
    wish += _LINKS.pack(_WAITS[links.waits], len(links.inputs), len(links.next))
    names = [name.encode() for name in (*links.next, *links.inputs)]
    return wish + b"".join([_SHORT.pack(len(name)) + name for name in names]) + limit


def pack_record(r: Record) -> list[bytes]:
    """The arguments for a job of another store; ``transfer_in.lua`` lists these seven."""
    e, state = r.envelope, STATES.index(r.state)
    queue, key = e.queue.encode(), e.key.encode()
    progress_and_log = b""
    flags = _TIMED | _TAIL | (0 if e.task else _MESSAGE) | (_CANCELLING if r.cancelling else 0)
    if r.progress or r.log:
        flags |= _NOTED
        progress = _PAIR.pack(*r.progress) + r.progress_text.encode() if r.progress else b""
        lines = [_sized(_DOUBLE.pack(when) + line.encode()) for when, line in r.log]
        progress_and_log = _sized(progress) + b"".join(lines)
    wish = wait = b""
    if e.links is not None or e.limit is not None or (e.key and e.unique is not None):
        period = e.unique.period if e.unique is not None else 0.0
        wish = _pack_wish(e, e.created + period)
    if e.limit is not None:
        flags |= _LIMITED
    if e.links is not None:
        flags |= _LINKED
        if e.links.waits:
            waits = _WAITS[e.links.waits]
            wait = _COUNTS.pack(r.pending, r.failures, waits, was_dropped(r))
    record = _SEQ.pack(r.seq)
    policy = e.retries.max_attempts
    record += _HEAD.pack(state, flags, r.attempt, r.losses, r.max_attempts, policy, r.rank)
    record += b"%c%b%c%b" % (len(queue), queue, len(key), key)
    if e.limit is not None:
        record += _pack_lane(e.limit)
    due, expires = int(r.due * MICRO), int(r.expires * MICRO)
    record += _TIMES.pack(due, expires, e.ttr, e.timeout, e.result_ttl)
    if state >= _SUCCEEDED:
        record += _FINISHED.pack(int(r.finished * MICRO), 0)
    attempts = b"".join(_pack_attempt(attempt) for attempt in r.attempts)
    record += _sized(r.error.encode()) + b"%c" % len(r.attempts) + _sized(attempts)
    return [e.id.encode(), record, encode_envelope(e), r.raw_result, progress_and_log, wish, wait]


def _pack_attempt(a: Attempt) -> bytes:
    worker = a.worker.encode()
    fixed = _ATTEMPT.pack(a.number, a.leased, a.started, a.ended, a.outcome, len(worker))
    run = _SIZE.pack(a.run) if a.run > 1 else b""
    return _sized(fixed + worker + _sized(a.error.encode()) + _sized(a.traceback.encode()) + run)


def _sized(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def pack_verdict(v: Verdict) -> list[bytes]:
    """The arguments of a verdict and of its followers."""
    error, traceback = v.error.encode(), v.traceback.encode()
    fixed = _VERDICT.pack(
        v.token, v.outcome, v.delay, v.started, v.ended, v.hold,
        len(error), len(traceback), len(v.followers), v.rank,
    )  # fmt: skip
    return [fixed + error + traceback + v.result, *pack_put(v.followers)]


def read_leases(shown: Sequence[bytes], inputs: Sequence[Any]) -> list[Lease]:
    """Read leases, with encoded envelopes."""
    # ``inputs`` has, in turn, the place of a lease in the list and the inputs of this lease.
    leases = []
    for i in range(0, len(shown), 2):
        token, attempt, losses, rank, seq, timeout, leased, ttr = _LEASE.unpack(shown[i])
        times = timeout, leased / MICRO, ttr
        leases.append(Lease(token, attempt, losses, rank, seq, *times, shown[i + 1]))
    for place, ends in zip(inputs[0::2], inputs[1::2], strict=True):
        leases[place].inputs = tuple(_read_input(*ends[i : i + 4]) for i in range(0, len(ends), 4))
    return leases


def _read_input(job_id: bytes, state: int | bytes, result: bytes, error: bytes) -> Input:
    shown = STATES[state].value if isinstance(state, int) else ""
    return Input(job_id.decode(), shown, result, error.decode())


def read_record(shown: Sequence[bytes | list[bytes]], *, listed: bool = False) -> Record:
    """Read the record that ``inspect.lua`` returns for one job."""
    _, data, envelope, worker, progress, lines, result, wait = shown
    assert isinstance(data, bytes)
    assert isinstance(envelope, bytes)
    assert isinstance(worker, bytes)
    assert isinstance(progress, bytes)
    assert isinstance(result, bytes)
    assert isinstance(wait, bytes)
    state, flags, attempt, losses, limit, _, rank = _HEAD.unpack_from(data, _SEQ.size)
    record = Record(
        envelope=decode_envelope(envelope),
        state=STATES[state],
        seq=_SEQ.unpack_from(data)[0],
        rank=rank,
        max_attempts=limit,
        attempt=attempt,
        losses=losses,
        raw_result=result,
        listed=listed,
        worker=worker.decode(),
        cancelling=bool(flags & _CANCELLING),
        progress=whole_progress(*_PAIR.unpack_from(progress)) if progress else None,
        progress_text=progress[_PAIR.size :].decode(),
        # ``lines`` is a list of bytes; the common type of all columns does not show that.
        log=[(_DOUBLE.unpack_from(line)[0], bytes(line[8:]).decode()) for line in lines],  # type: ignore[arg-type, index]
    )
    if wait:
        record.pending, record.failures, _, _ = _COUNTS.unpack(wait)
    at = _past_limit(data, flags)
    if flags & _TIMED:
        due, expires, _, _, _ = _TIMES.unpack_from(data, at)
        record.due, record.expires = due / MICRO, expires / MICRO
        at += _TIMES.size
    _read_end(record, data, at, state, flags)
    return record


def _past_limit(data: bytes, flags: int) -> int:
    """The offset after the queue, the key and the limit of a record."""
    at = _SEQ.size + _HEAD.size
    at += 1 + data[at]  # queue
    at += 1 + data[at]  # key
    if flags & _LIMITED:
        at += _SHORT.size + int(_SHORT.unpack_from(data, at)[0]) + _DOUBLE.size  # partition, cost
    return at


def _read_end(record: Record, data: bytes, at: int, state: int, flags: int) -> None:
    """Read the last part of a record: its lease or its end, the error, and the attempts."""
    if state == _RUNNING:
        record.token, leased, deadline, size = _LEASED.unpack_from(data, at)
        record.leased, record.lease_ends = leased / MICRO, deadline / MICRO
        at += _LEASED.size + size
    elif state >= _SUCCEEDED:
        record.finished = _FINISHED.unpack_from(data, at)[0] / MICRO
        at += _FINISHED.size
    if flags & _TAIL:
        record.error, at = _text(data, at)
        record.attempts = list(_attempts(data, at + 1 + _SIZE.size))


def _text(data: bytes, at: int) -> tuple[str, int]:
    """Read a text: (text, offset after the text)."""
    end = at + _SIZE.size + int(_SIZE.unpack_from(data, at)[0])
    return data[at + _SIZE.size : end].decode(), end


def _attempts(data: bytes, at: int) -> Iterator[Attempt]:
    while at < len(data):
        end = at + _SIZE.size + int(_SIZE.unpack_from(data, at)[0])
        at += _SIZE.size
        number, leased, started, ended, outcome, size = _ATTEMPT.unpack_from(data, at)
        at += _ATTEMPT.size
        worker = data[at : at + size].decode()
        error, at = _text(data, at + size)
        traceback, at = _text(data, at)
        run = _SIZE.unpack_from(data, at)[0] if at < end else 1
        at = end
        yield Attempt(number, worker, leased, started, ended, outcome, error, traceback, run)
