"""Transfer: moving all jobs to another store, and adopting jobs of another store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.dependencies import was_dropped
from tidemill.brokers.contract.schedules import Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.postgres.encoding import blobs, clean, floats, json, texts
from tidemill.brokers.postgres.limits import lane_of, numbers
from tidemill.brokers.postgres.put import backoff_of, body_of
from tidemill.brokers.postgres.statements import Session
from tidemill.core.clock import new_id
from tidemill.core.envelope import JobLimit, Links, encode_envelope
from tidemill.core.job import Record, State

_STATES = list(State)


def depart(session: Session, where: str, *, seal: bool = False) -> Departure:
    """Begin the departure of this store, or continue it."""
    text = f'SELECT * FROM "{session.address.schema}".depart(%s, %s, %s)'
    [(mark, moves_to, last, sealed)] = session.query(text, [new_id(), where, seal])
    return Departure(mark, moves_to, last, sealed)


def stay(session: Session) -> None:
    session.call("stay", [], "", plain=True)


def adopt(
    session: Session,
    departure: Departure,
    records: Sequence[Record],
    cursor: str,
    schedules: Sequence[Schedule] = (),
) -> list[bool]:
    queues = session.known({record.envelope.queue for record in records})
    envelopes = [encode_envelope(record.envelope) for record in records]
    taken: list[bool] = session.once(
        "adopt_all",
        [
            *(departure.mark, departure.last, cursor),
            json(
                [
                    _row(queues, record) | {"body": body_of(record.envelope, envelope)}
                    for record, envelope in zip(records, envelopes, strict=True)
                ]
            ),
            blobs(envelopes),
            blobs([record.raw_result for record in records]),
            texts([schedule.name for schedule in schedules]),
            floats([schedule.due for schedule in schedules]),
            blobs([schedule.body for schedule in schedules]),
        ],
        "text, bigint, text, jsonb, bytea[], bytea[], text[], float8[], bytea[]",
        queues=queues,
    )
    return taken


def adopted(session: Session, mark: str) -> str:
    """Return the cursor of the last adopted jobs of a departed store."""
    cursor: str = session.call("adopted", [mark], "text", plain=True)
    return cursor


def _row(queues: Mapping[str, int], record: Record) -> dict[str, Any]:
    e = record.envelope
    links = e.links
    kind = 1 if e.is_message else 2 if record.losses else 0
    done, total = record.progress or (None, None)
    trail = msgspec.to_builtins(record.attempts)
    for attempt in trail:
        attempt[6:8] = map(clean, attempt[6:8])
    return {
        "id": e.id,
        "seq": record.seq,
        "rank": record.rank,
        "line": queues[e.queue] * 4 + kind,
        "state": _STATES.index(record.state),
        "policy": e.retries.max_attempts,
        "backoff": backoff_of(e),
        "tries": record.max_attempts,
        "attempt": record.attempt,
        "losses": record.losses,
        "due": record.due,
        "expires": record.expires,
        "finished": record.finished,
        "timeout": e.timeout,
        "ttr": e.ttr,
        "result_ttl": e.result_ttl,
        "cancelling": record.cancelling,
        "key": e.key or None,
        "error": clean(record.error),
        "trail": trail or None,
        "done": done,
        "total": total,
        "text": clean(record.progress_text),
        "log": [[when, clean(line)] for when, line in record.log],
        "linked": links is not None,
        "until": e.created + e.unique.period if e.unique and e.unique.period else None,
        **(_row_of_limit(e.limit) if e.limit is not None else {}),
        **(_row_of_links(record, links) if links is not None else {}),
    }


def _row_of_limit(claim: JobLimit) -> dict[str, Any]:
    return {"lane": lane_of(claim), "cost": claim.cost, "terms": numbers(claim.terms)}


def _row_of_links(record: Record, links: Links) -> dict[str, Any]:
    e = record.envelope
    return {
        "inputs": links.inputs or None,
        "next": links.next,
        "waits": links.waits or None,
        "pending": record.pending,
        "failures": record.failures,
        "dropped": was_dropped(record),
        "delay": e.delay,
        "at": e.at,
    }
