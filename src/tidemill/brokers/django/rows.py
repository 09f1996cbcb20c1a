"""Rows of jobs: the columns that queries use, and all other facts of an item in one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.brokers.memory.transitions import LOST, MESSAGES, TASKS, Item
from tidemill.core.job import Attempt, Envelope, State, decode_envelope
from tidemill.core.purge_mark import is_purged

__all__ = [
    "COLUMNS",
    "CHANGING",
    "IN_FLOW",
    "LIMITED",
    "PLAIN",
    "SELECT",
    "STATES",
    "Stored",
    "item_of",
    "kind_of",
    "share_of",
    "values_of",
]

STATES = tuple(State)
"""The states by their number in the table."""

LIMITED = 4
"""Added to the kind of a job under a limit, so that the queries for other jobs skip this job."""

IN_FLOW, PLAIN, PURGED = 1, 2, 3
"""Values of ``linked``: a finished job of a flow, a success without a result, a purged job."""

_NUMBERS = {state: number for number, state in enumerate(STATES)}

CHANGING = (
    *("kind", "state", "rank", "due", "expires", "alarm", "prune", "token", "holder"),
    *("unknown", "linked", "fresh", "finished", "facts"),
)
"""The columns that change, in the order of :func:`values_of`."""

FIXED = ("seq", "id", "queue", "task", "key", "share", "envelope")
COLUMNS = (*CHANGING, *FIXED)
"""All columns of a job."""

SELECT = (
    "SELECT "
    + ", ".join(f'"{name}"' for name in (*CHANGING, "seq", "envelope"))
    + " FROM tidemill_job WHERE "
)


class Facts(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """All facts of an item without a column of their own."""

    limit: int = 0
    attempt: int = 0
    losses: int = 0
    pending: int = 0
    failures: int = 0
    result: bytes = b""
    error: str = ""
    worker: str = ""
    leased: float = 0.0
    cancelling: bool = False
    attempts: list[Attempt] = []
    progress: tuple[int, int] | None = None
    log: list[tuple[float, str]] = []
    charged: float = 0.0
    deadline: float = 0.0
    until: float = 0.0
    since: float = 0.0
    dropped: bool = False
    progress_text: str = ""  # a new field comes last, since rows store the fields as an array


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Facts).decode


class Stored:
    """An item, the values of its row, and the facts that the memory broker keeps in its lists."""

    __slots__ = ("before", "envelope", "fresh", "item", "linked", "prune")

    def __init__(self, item: Item, envelope: bytes, before: tuple[Any, ...] | None) -> None:
        self.item = item
        self.envelope = envelope  # encoded
        self.before = before  # the values in the table; None for a new job
        self.prune: float | None = None
        self.linked = False
        self.fresh = 0


def item_of(row: Sequence[Any]) -> Stored:
    """The item of a row."""
    (_, state, rank, due, expires, _, prune, token, holder) = row[:9]
    (unknown, linked, fresh, finished, facts, seq, encoded) = row[9:]
    encoded = bytes(encoded)
    envelope = decode_envelope(encoded)
    item = Item(envelope, seq)
    record = item.record
    record.state, record.rank, record.due, record.expires = STATES[state], rank, due, expires
    record.unknown = bool(unknown)
    record.finished = item.finished_machine = finished
    item.due_machine, item.expires_machine = due, expires
    item.token, item.holder = token, holder
    raw = bytes(facts)
    if raw:
        _apply(item, _decode(raw))
    stored = Stored(item, encoded, (*row[:13], raw))
    stored.prune, stored.linked, stored.fresh = prune, linked == IN_FLOW, fresh
    return stored


def _apply(item: Item, facts: Facts) -> None:
    record = item.record
    item.limit = facts.limit
    record.attempt, record.losses = facts.attempt, facts.losses
    record.pending, record.failures = facts.pending, facts.failures
    record.raw_result, record.error = facts.result, facts.error
    record.worker, record.leased = facts.worker, facts.leased
    record.cancelling, record.attempts = facts.cancelling, facts.attempts
    record.progress, record.log = facts.progress, facts.log
    record.progress_text = facts.progress_text
    item.charged, item.deadline = facts.charged, facts.deadline
    item.until, item.since, item.dropped = facts.until, facts.since, facts.dropped


def values_of(stored: Stored) -> tuple[Any, ...]:
    """The values of the columns that change."""
    item = stored.item
    record = item.record
    state = record.state
    facts = Facts(
        limit=item.limit,
        attempt=record.attempt,
        losses=record.losses,
        pending=record.pending,
        failures=record.failures,
        result=record.raw_result,
        error=record.error,
        worker=record.worker,
        leased=record.leased,
        cancelling=record.cancelling,
        attempts=record.attempts,
        progress=record.progress,
        progress_text=record.progress_text,
        log=record.log,
        charged=item.charged,
        deadline=item.deadline,
        until=item.until,
        since=item.since,
        dropped=item.dropped,
    )
    return (
        kind_of(record.envelope, record.losses),
        _NUMBERS[state],
        record.rank,
        record.due,
        record.expires if state.finished else item.expires_machine,
        _alarm(item),
        stored.prune if state.finished else None,
        item.token,
        item.holder,
        int(record.unknown),
        _linked(stored) if state.finished else 0,
        stored.fresh,
        record.finished,
        _encode(facts),
    )


def _linked(stored: Stored) -> int:
    """The kind of a finished job for pruning: see ``IN_FLOW``, ``PLAIN`` and ``PURGED``."""
    if stored.linked:
        return IN_FLOW
    record = stored.item.record
    if is_purged(record.error):
        return PURGED
    return PLAIN if record.state is State.SUCCEEDED and not record.raw_result else 0


def _alarm(item: Item) -> float | None:
    """The next time at which an unfinished job must be looked at."""
    state, expires = item.record.state, item.expires_machine
    if state is State.RUNNING:
        return item.deadline or None
    if state.finished:
        return None
    if state is State.SCHEDULED and item.record.due:
        return min(item.record.due, expires) if expires else item.record.due
    return expires or None


def kind_of(envelope: Envelope, losses: int = 0) -> int:
    """The number of a ready job's list; jobs under limits have separate lists."""
    kind = LOST if losses else TASKS
    if not envelope.task:
        kind = MESSAGES
    return kind + LIMITED if envelope.limit is not None else kind


def share_of(envelope: Envelope) -> str:
    """The partition of a job under a limit."""
    claim = envelope.limit
    return f"{claim.name}\x1f{claim.key}" if claim is not None else ""
