"""Puts of jobs, packed as ids, envelopes, and the number of the shape of each job.

The shape has all other facts that the server needs. Most jobs of a call have the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec.msgpack import encode

from tidemill.brokers.contract.dependencies import check_links
from tidemill.brokers.contract.exchange import check_nonce
from tidemill.brokers.postgres.caller_transaction import open_transaction, run_inside
from tidemill.brokers.postgres.connections import ServerConnection
from tidemill.brokers.postgres.encoding import blobs, clean, floats, ints, json, texts
from tidemill.brokers.postgres.errors import conflict, is_unsure, translated
from tidemill.brokers.postgres.limits import lane_of, numbers
from tidemill.brokers.postgres.timed_connection import Connection
from tidemill.core.envelope import Envelope, Links, encode_envelope
from tidemill.core.job import Placed, Put
from tidemill.core.retry import MESSAGE, RetryPolicy
from tidemill.errors import BrokerUnavailable, DuplicateJob

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_FIELDS = (
    *("line", "rank", "delay", "at", "expires", "timeout", "ttr", "result_ttl", "tries", "key"),
    *("conflict", "verdict", "linked", "next", "waits", "inputs", "period", "max_wait"),
    *("lane", "cost", "terms", "if_new", "backoff", "body"),
)
_LARGE = 4096  # the bytes of a body above which lists of jobs leave it out


def _numbers(policy: RetryPolicy) -> tuple[float, ...]:
    delay = policy.delay if policy.limit >= 0 else 0.0
    return delay, policy.factor, policy.cap, float(policy.jitter), float(policy.immediate)


_OF_TASKS, _OF_MESSAGES = _numbers(RetryPolicy()), _numbers(MESSAGE)


def pack_jobs(
    session: Session, jobs: Sequence[Envelope], verdicts: Sequence[int] = ()
) -> tuple[Any, Any, Any, str]:
    """Pack jobs: ids, envelopes, numbers of shapes, and the shapes."""
    queues = session.known({job.queue for job in jobs})
    known: dict[tuple[Any, ...], int] = {}
    shape = []
    envelopes = [encode_envelope(job) for job in jobs]
    for place, job in enumerate(jobs):
        row = (
            queues[job.queue] * 4 + (not job.task),
            *(job.rank, job.delay, job.at, job.expires, job.timeout, job.ttr, job.result_ttl),
            *(job.retries.max_attempts, job.key or None, job.on_conflict),
            verdicts[place] if verdicts else 0,
            *_links(job.links),
            *((job.unique.period, job.unique.max_wait) if job.unique else (None, None)),
            *_limit(job),
            *(backoff_of(job), body_of(job, envelopes[place])),
        )
        shape.append(known.setdefault(row, len(known)))
    shapes = [
        {"n": n, **{k: v for k, v in zip(_FIELDS, row, strict=True) if v is not None}}
        for row, n in known.items()
    ]
    return (texts([job.id for job in jobs]), blobs(envelopes), ints(shape), json(shapes))


def backoff_of(job: Envelope) -> tuple[float, ...] | None:
    """The numbers of a job's backoff; None for the default, which ``29_backoff.sql`` knows."""
    numbers = _numbers(job.retries)
    return None if numbers == (_OF_MESSAGES if job.is_message else _OF_TASKS) else numbers


def body_of(job: Envelope, envelope: bytes) -> tuple[int, int] | None:
    """The bytes of a large body in its envelope, and the bytes behind it; None if it is small."""
    size = len(job.body)
    if size <= _LARGE:
        return None
    size += 3 if size < 1 << 16 else 5
    fields_before = encode((job.id, job.queue, job.task))  # its head has two bytes less
    return size, len(envelope) - size - len(fields_before) - 2


def _links(links: Links | None) -> tuple[Any, ...]:
    if links is None:
        return None, None, None, None
    return True, links.next or None, links.waits or None, links.inputs or None


def _limit(job: Envelope) -> tuple[Any, ...]:
    claim = job.limit
    if claim is None:
        return None, None, None, None
    terms = tuple(numbers(claim.terms))
    return lane_of(claim), claim.cost, terms, job.planned is not None


def put(
    session: Session,
    jobs: Sequence[Envelope],
    hold: Collection[str],
    let_go: Collection[str],
    nonce: str = "",
) -> list[Put]:
    """Accept jobs, all or none, in a separate transaction."""
    check_nonce(nonce)
    if not jobs and not let_go:
        return []
    statements = session.statements
    if len(jobs) == 1 and not (hold or let_go) and _is_plain(job := jobs[0]):
        answer = _call(
            session, statements.put_single, jobs, lambda: _pack_plain(session, job), nonce
        )
    else:
        held = texts(list(hold)), texts(list(let_go))
        answer = _call(session, statements.put, jobs, lambda: (*_pack(session, jobs), *held), nonce)
    return puts_of(jobs, answer)


def _is_plain(job: Envelope) -> bool:
    """Whether ``put_single`` can put the job."""
    return not (job.delay or job.at or job.expires or job.key or job.links or job.limit)


def _pack_plain(session: Session, job: Envelope) -> tuple[Any, ...]:
    """Pack a plain job: its id, its envelope, and the fields of its shape."""
    envelope = encode_envelope(job)
    line = session.known((job.queue,))[job.queue] * 4 + (not job.task)
    backoff, body = backoff_of(job), body_of(job, envelope)
    return (
        *(job.id, envelope, line, job.rank, job.timeout, job.ttr, job.result_ttl),
        job.retries.max_attempts,
        backoff and floats(backoff),
        body and ints(body),
    )


def _call(
    session: Session,
    statement: bytes,
    jobs: Sequence[Envelope],
    pack: Callable[[], tuple[Any, ...]],
    nonce: str,
) -> Any:
    """Call a procedure that accepts jobs, and return its answer. A retry has no second effect."""
    queues = session.queues
    packed = pack()
    chores = session.chores(0)
    small = len(jobs) == 1 and len(jobs[0].body) <= _LARGE
    serials: dict[str, int] = {}
    unsure = False

    def work(connection: ServerConnection, conn: Connection) -> Any:
        nonlocal packed, queues, unsure
        if queues is not session.queues:  # the server lost queues, so they have new numbers
            queues = session.queues
            packed = pack()
        # If the serial exists, the reply was lost: repeat the call.
        if connection.id not in serials:
            connection.serial += 1
            serials[connection.id] = connection.serial
        key = (f"once {clean(nonce)}", 1) if nonce else (connection.id, connection.serial)
        arguments = [*key, *packed, session.prefs(), chores]
        try:
            cursor = conn.kept if small else conn.cursor(binary=True)
            row = cursor.execute(statement, arguments).fetchone()
        except psycopg.Error as error:
            unsure = unsure or is_unsure(error, conn)
            raise
        assert row is not None
        return row[0]

    try:
        return session.connections.run(work, patience=session.address.patience)
    except DuplicateJob:
        _await_disk(session)
        raise
    except BrokerUnavailable as error:
        if not unsure or not jobs:
            raise
        raise BrokerUnavailable(f"{error}; {_perhaps(jobs)}") from error.__cause__


def _perhaps(jobs: Sequence[Envelope]) -> str:
    """Return the advice to the user after a put that may have been committed."""
    if len(jobs) == 1:
        return f"job {jobs[0].id!r} may have been accepted: put it again with the same id"
    return (
        f"{len(jobs):,} jobs from {jobs[0].id!r} on may have been accepted, all or none: "
        "put them again with the same ids"
    )


def _await_disk(session: Session) -> None:
    """Wait until the existing job is on disk: it may be new, and the caller relies on the job."""
    session.call("flush", [], "", plain=True)


def _pack(session: Session, jobs: Sequence[Envelope]) -> tuple[Any, ...]:
    for job in jobs:
        check_links(job)
    return pack_jobs(session, jobs)


def put_inside(
    session: Session,
    jobs: Sequence[Envelope],
    txn: Any,
    hold: Collection[str],
    let_go: Collection[str],
) -> list[Put]:
    """Accept jobs in the caller's transaction. After a refusal, the transaction goes on.

    Raises:
        InvalidOption: ``txn`` has no transaction that could commit the jobs later.
        SerializationConflict: the transaction has a stricter isolation and must be repeated.
    """
    held = texts(list(hold)), texts(list(let_go))
    return puts_of(jobs, call_inside(session, session.statements.put_inside, jobs, held, txn))


def call_inside(
    session: Session, statement: bytes, jobs: Sequence[Envelope], more: tuple[Any, ...], txn: Any
) -> Any:
    """Call a function that accepts jobs in the caller's transaction, and return its answer."""
    conn = open_transaction(session, txn)
    session.meet(conn)
    packed = *_pack(session, jobs), *more
    return run_with_prefs(session, conn, statement, packed)


def run_with_prefs(session: Session, conn: Any, statement: bytes, packed: Sequence[Any]) -> Any:
    """Call a function in the open transaction of a caller's connection; translate its errors."""
    try:
        return run_inside(conn, statement, [*packed, session.prefs()])
    except psycopg.Error as error:
        failure = conflict(error) or translated(error, session.address.where)
        if isinstance(failure, DuplicateJob):
            _await_disk(session)
        raise failure from error


def puts_of(jobs: Sequence[Envelope], answer: Any) -> list[Put]:
    """The outcomes in the answer of a procedure that accepts jobs."""
    if answer is None:
        return [Put(job.id, Placed.CREATED) for job in jobs]
    return [Put(job_id, Placed(how)) for how, job_id in answer]
