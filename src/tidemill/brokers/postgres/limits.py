"""The calls for limits; ``sql/26_limiter.sql`` and ``sql/27_limits.sql`` have the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.brokers.postgres.statements import Session
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.limits.arithmetic import Held, LimitStats

_CUT = "\x1f"  # separates the name and the key of a partition: neither has control characters


def lane_of(claim: JobLimit) -> str:
    """Return the name of a job's partition: one key of one limit."""
    return f"n{claim.name}{_CUT}{claim.key}"


def numbers(terms: LimitSettings) -> list[float | None]:
    """Return limit settings in the server's form."""
    none = (None, None)
    rate, window, breaker = terms.rate or none, terms.window or none, terms.breaker or none
    given = (*rate, terms.burst, *window, terms.concurrency, *breaker)
    return [None if number is None else float(number) for number in given]


def set_limit(
    session: Session,
    name: str,
    terms: LimitSettings | None,
    *,
    queue: bool = False,
    declared: bool = False,
) -> None:
    """Set the settings of a limit, and pass them on to its partitions."""
    queues = session.known([name]) if queue else session.queues
    which = f"q{queues[name]}" if queue else f"n{name}"
    given = None if terms is None else numbers(terms)
    arguments = [which, given, declared]
    session.once("set_limit", arguments, "text, float8[], bool", queues=queues)
    _empty_inbox(session)


def all_limits(session: Session) -> list[LimitStats]:
    """Return the figures of every limit: first the queues, then the other limits, by name."""
    _empty_inbox(session)
    rows = [
        LimitStats(
            name=name,
            queue=queue,
            terms=_terms(terms),
            declared=None if declared is None else _terms(declared),
            by_hand=by_hand,
            running=running,
            failures=failures,
            until=until,
            keys=keys,
        )
        for name, queue, terms, declared, by_hand, running, failures, until, keys in session.rows(
            "limits_shown", []
        )
    ]
    return sorted(rows, key=lambda row: (not row.queue, row.name))


def held(session: Session, job_id: str) -> Held | None:
    _empty_inbox(session)
    shown = session.rows("held", [job_id.replace("\0", "")], "text")
    for name, key, queue, until, running, terms, broken in shown:
        return Held(name, key, queue, until, running, _terms(terms), broken)
    return None


def _empty_inbox(session: Session) -> None:
    """Have limiters empty their inbox."""
    schema = session.address.schema
    text = f'CALL "{schema}".empty_inbox(%s::"{schema}".prefs)'.encode()
    prefs = session.prefs()
    session.connections.run(
        lambda _, conn: conn.execute(text, [prefs]), patience=session.address.patience
    )


def _terms(found: Sequence[Any]) -> LimitSettings:
    rate, seconds, burst, most, length, concurrency, failures, pause = found
    return LimitSettings(
        rate=None if rate is None else (rate, seconds),
        burst=burst,
        window=None if most is None else (most, length),
        concurrency=None if concurrency is None else int(concurrency),
        breaker=None if failures is None else (int(failures), pause),
    )
