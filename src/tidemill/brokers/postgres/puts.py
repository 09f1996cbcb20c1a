"""Jobs packed for a put: ids, envelopes, and for each the number of its shape.

The shape is all else that the server wants to know of a job, which is mostly the same for all jobs
of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from tidemill.brokers.links import check_links
from tidemill.brokers.postgres.limits import lane_of, numbers
from tidemill.brokers.postgres.lines import Connection, Line
from tidemill.brokers.postgres.trouble import translated
from tidemill.brokers.postgres.wire import blobs, clean, ints, json, prepare, texts
from tidemill.brokers.steps import check_nonce
from tidemill.errors import DuplicateJob, InvalidOption
from tidemill.job import Envelope, Links, Placed, Put, encode_envelope

if TYPE_CHECKING:
    from tidemill.brokers.postgres.session import Session

__all__ = ["pack_jobs", "put", "put_inside"]

_FIELDS = (
    *("line", "rank", "delay", "at", "expires", "timeout", "ttr", "result_ttl", "tries", "key"),
    *("conflict", "verdict", "linked", "next", "waits", "inputs", "period", "max_wait"),
    *("lane", "cost", "terms", "if_new"),
)


def pack_jobs(
    session: Session, jobs: Sequence[Envelope], verdicts: Sequence[int] = ()
) -> tuple[Any, Any, Any, str]:
    """Ids, envelopes, numbers of shapes, and the shapes."""
    session.known({job.queue for job in jobs})
    queues = session.queues
    known: dict[tuple[Any, ...], int] = {}
    shape = []
    for place, job in enumerate(jobs):
        row = (
            queues[job.queue] * 4 + (not job.task),
            *(job.rank, job.delay, job.at, job.expires, job.timeout, job.ttr, job.result_ttl),
            *(job.retries.max_attempts, job.key or None, job.on_conflict),
            verdicts[place] if verdicts else 0,
            *_links(job.links),
            *((job.unique.period, job.unique.max_wait) if job.unique else (None, None)),
            *_limit(job),
        )
        shape.append(known.setdefault(row, len(known)))
    shapes = [
        {"n": n, **{k: v for k, v in zip(_FIELDS, row, strict=True) if v is not None}}
        for row, n in known.items()
    ]
    return (
        texts([job.id for job in jobs]),
        blobs([encode_envelope(job) for job in jobs]),
        ints(shape),
        json(shapes),
    )


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
    """Accept jobs, all or none, in a transaction of our own."""
    check_nonce(nonce)
    if not jobs and not let_go:
        return []
    packed = _pack(session, jobs, hold, let_go)
    chores = session.chores(0)
    serials: dict[str, int] = {}

    def work(line: Line, conn: Connection) -> Any:
        if line.id not in serials:  # else it is done again, its reply was lost
            line.serial += 1
            serials[line.id] = line.serial
        call = (f"once {clean(nonce)}", 1) if nonce else (line.id, line.serial)
        arguments = [*call, *packed, session.prefs(), chores]
        row = conn.execute(session.statements.put, arguments, binary=True).fetchone()
        assert row is not None
        return row[0]

    try:
        answer = session.lines.run(work, patience=session.address.patience)
    except DuplicateJob:
        _await_disk(session)
        raise
    return _puts(jobs, answer)


def _await_disk(session: Session) -> None:
    """What is there already may be seen before it is on disk: its caller relies on it."""
    session.call("flush", [], "", plain=True)


def _pack(
    session: Session, jobs: Sequence[Envelope], hold: Collection[str], let_go: Collection[str]
) -> tuple[Any, ...]:
    for job in jobs:
        check_links(job)
    return *pack_jobs(session, jobs), texts(list(hold)), texts(list(let_go))


def put_inside(
    session: Session,
    jobs: Sequence[Envelope],
    txn: Any,
    hold: Collection[str],
    let_go: Collection[str],
) -> list[Put]:
    """Accept jobs in the caller's transaction. When they are refused it goes on without them.

    Raises:
        InvalidOption: there is no transaction that could commit them later.
    """
    if not isinstance(txn, psycopg.Connection):
        raise InvalidOption(
            f"txn must be a psycopg.Connection for {session.address.shown}, "
            f"not {type(txn).__name__}"
        )
    if txn.info.transaction_status == pq.TransactionStatus.IDLE:
        if txn.autocommit:
            raise InvalidOption(
                "txn is a connection in autocommit mode with no transaction begun; "
                "put inside: with conn.transaction():"
            )
        txn.execute("SELECT")  # begins one, that the savepoint is not taken for it
    packed = _pack(session, jobs, hold, let_go)
    try:
        with txn.transaction(), txn.cursor(row_factory=tuple_row) as cursor:
            prepare(cursor)
            cursor.execute(session.statements.put_inside, [*packed, session.prefs()])
            row = cursor.fetchone()
    except psycopg.Error as error:
        failure = translated(error, session.address.where)
        if isinstance(failure, DuplicateJob):
            _await_disk(session)
        raise failure from error
    assert row is not None
    return _puts(jobs, row[0])


def _puts(jobs: Sequence[Envelope], answer: Any) -> list[Put]:
    if answer is None:
        return [Put(job.id, Placed.CREATED) for job in jobs]
    return [Put(job_id, Placed(how)) for how, job_id in answer]
