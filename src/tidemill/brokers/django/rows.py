"""Rows of jobs: the columns that queries use, and all other facts of an item in one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.rules.transitions import LOST, MESSAGES, TASKS, Item
from tidemill.core.envelope import Envelope, decode_envelope
from tidemill.core.job import Attempt, State, is_purged

STATES = tuple(State)  # the states by their number in the table
LIMITED = 4  # added to the kind of a job under a limit, so that other queries skip this job
IN_FLOW, PLAIN, PURGED = 1, 2, 3  # ``linked``: of a flow; a success without a result; purged

_NUMBERS = {state: number for number, state in enumerate(STATES)}

CHANGING = (
    *("kind", "state", "rank", "due", "expires", "alarm", "prune", "token", "holder"),
    *("linked", "fresh", "finished", "facts", "large"),
)
"""The columns that change, in the order of :func:`values_of`."""

FIXED = ("seq", "id", "queue", "task", "key", "share", "envelope")
COLUMNS = (*CHANGING, *FIXED)  # all columns of a job

_READ = ", ".join(f'"{name}"' for name in (*CHANGING, "seq", "envelope"))
SELECT = f"SELECT {_READ} FROM tidemill_job WHERE "

_LARGE, _NAMES_MOST = 4096, 1000
"""Of an envelope of more than ``_LARGE`` bytes, a list reads the part before the body, which has
id, queue and task, and then the part behind the body."""

_SIZE = f"CASE WHEN length(envelope) > {_LARGE} THEN {_NAMES_MOST} ELSE {_LARGE} END"
_CUT = f"substr(envelope, 1, {_SIZE}), length(envelope)"
_LISTED = _READ.replace('"large"', "NULL").replace('"envelope"', _CUT)
SELECT_LISTED = f"SELECT {_LISTED} FROM tidemill_job WHERE "
"""Selects the rows of a list: see :func:`listed_row`."""


class Facts(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """All facts of an item without a column of their own, except those that may be large."""

    limit: int = 0
    attempt: int = 0
    losses: int = 0
    pending: int = 0
    failures: int = 0
    error: str = ""
    worker: str = ""
    leased: float = 0.0
    cancelling: bool = False
    attempts: list[Attempt] = []
    progress: tuple[int, int] | None = None
    deadline: float = 0.0
    until: float = 0.0
    since: float = 0.0
    dropped: bool = False
    progress_text: str = ""  # a new field comes last, since rows store the fields as an array


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Facts).decode
_decode_large = msgspec.msgpack.Decoder(tuple[bytes, list[tuple[float, str]]]).decode


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
    (_, state, rank, due, expires, _, prune, token, holder) = row[:9]
    (linked, fresh, finished, facts, large, seq, encoded) = row[9:]
    encoded = bytes(encoded)
    item = Item(decode_envelope(encoded), seq)
    record = item.record
    record.state, record.rank, record.due, record.expires = STATES[state], rank, due, expires
    record.finished = item.finished_machine = finished
    item.due_machine, item.expires_machine = due, expires
    item.token, item.holder = token, holder
    raw, raw_large = bytes(facts), bytes(large or b"")
    if raw:
        _apply(item, _decode(raw))
    if raw_large:
        record.raw_result, record.log = _decode_large(raw_large)
    stored = Stored(item, encoded, (*row[:12], raw, raw_large))
    stored.prune, stored.linked, stored.fresh = prune, linked == IN_FLOW, fresh
    return stored


def listed_row(row: Sequence[Any], read: Callable[[int, bytes, int], bytes]) -> Sequence[Any]:
    """A row of :data:`SELECT_LISTED` as a row of :data:`SELECT`, without the body of the job.

    ``read`` reads the envelope of a job, by its number, from an offset on, if the envelope still
    begins with the given bytes.

    Raises:
        LookupError: the envelope must be read whole.
    """
    *others, seq, encoded, size = row
    encoded = bytes(encoded)
    if size > _LARGE:
        at = 3 if encoded[0] == _ARRAY_16 else 1
        for _ in range(3):
            at = _behind_text(encoded, at)
        behind = at + 1 + _SIZES[encoded[at]]
        behind += int.from_bytes(encoded[at + 1 : behind], "big")
        encoded = encoded[:at] + _NO_BODY + read(seq, encoded[:at], behind)
    return *others, seq, encoded


_ARRAY_16, _TEXT_8 = 0xDC, 0xD9
_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_NO_BODY = msgspec.msgpack.encode(b"")
"""The codes of msgpack for an array, for a text, for bytes with the number of bytes of their size,
and for no bytes."""


def _behind_text(data: bytes, at: int) -> int:
    """The offset behind a short text in msgpack."""
    code = data[at]
    if code == _TEXT_8:
        return at + 2 + data[at + 1]
    if code >> 5 != 0b101:
        raise LookupError("a long text")
    return at + 1 + (code & 0x1F)


def _apply(item: Item, facts: Facts) -> None:
    record = item.record
    item.limit = facts.limit
    record.attempt, record.losses = facts.attempt, facts.losses
    record.pending, record.failures = facts.pending, facts.failures
    record.error = facts.error
    record.worker, record.leased = facts.worker, facts.leased
    record.cancelling, record.attempts = facts.cancelling, facts.attempts
    record.progress, record.progress_text = facts.progress, facts.progress_text
    item.deadline = facts.deadline
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
        error=record.error,
        worker=record.worker,
        leased=record.leased,
        cancelling=record.cancelling,
        attempts=record.attempts,
        progress=record.progress,
        progress_text=record.progress_text,
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
        _linked(stored) if state.finished else 0,
        stored.fresh,
        record.finished,
        _encode(facts),
        _encode((record.raw_result, record.log)) if record.raw_result or record.log else b"",
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
