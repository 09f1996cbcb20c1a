"""Copy the rows of history of a sealed store into another store, each row once.

The target may have rows already, and its workers may add more meanwhile. So a step adds the counts
of the source to the counts in the rows of the target. The same step stores the last copied row in a
row of the kind ``move``. After a kill, the next call continues after the last copied row. Some
kinds of rows are replaced, not added. Such a row is copied only if the target lacks it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.brokers.contract.exchange import Step, is_lost
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import History, with_history
from tidemill.brokers.contract.history_rows import (
    ADDED,
    ALWAYS,
    HOUR,
    KEEP,
    LATEST,
    MINUTE,
    HistoryRow,
    join_name,
    split_name,
)
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock, new_id
from tidemill.core.crash_points import point
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable

PAGE = 500  # the most rows that one step adds
_NOTE = "move"
_WINDOWS = {MINUTE: HOUR, HOUR: 24 * HOUR}  # seconds that one read covers, by span

_Place = tuple[str, int, int, str]  # the last row that was copied: its kind, span, time and name


def copy_history(source: Store, target: Store, mark: str) -> None:
    """Add all rows of a sealed store, or continue an earlier call. ``mark`` names this move.

    If the source or the target keeps no history, this does nothing.

    Raises:
        BrokerUnavailable: the target counts the owner of the steps as dead; call again.
    """
    if Feature.HISTORY not in source.features & target.features:
        return
    there, reached = with_history(target, "move"), _reached(target, mark)
    owner = Owner(id=new_id(), kind="consumer", name="move")
    target.attach(owner)
    try:
        for rows in _pages(with_history(source, "move"), reached):
            last = rows[-1]
            place = join_name(last.kind, str(last.span), str(last.at), last.name)
            note = HistoryRow(_NOTE, mark, ALWAYS, 0, (len(rows),), place.encode())
            point("move.counting")
            reply = target.exchange(Step(owner.id, history=[*_new(there, rows), note]))
            if is_lost(reply):
                raise BrokerUnavailable(f"{target.url} gave up this move; give the command again")
            point("move.counted")
    finally:
        target.detach(owner.id)


def _reached(target: Store, mark: str) -> _Place | None:
    """The last row that earlier calls have copied; None if they have copied none."""
    notes = with_history(target, "move").history(_NOTE, ALWAYS, name=mark)
    if not notes:
        return None
    kind, span, at, *name = split_name(notes[0].sample.decode())
    return kind, int(span), int(at), join_name(*name)


def _pages(source: History, reached: _Place | None) -> Iterator[list[HistoryRow]]:
    """The rows after ``reached``, in the order of kind, span, time and name."""
    for kind, span in source.history_kinds():
        if kind == _NOTE or (reached is not None and (kind, span) < reached[:2]):
            continue
        for since, until in _windows(span):
            rows = source.history(kind, span, since, until)
            if reached is not None:
                rows = [row for row in rows if (kind, span, row.at, row.name) > reached]
            for start in range(0, len(rows), PAGE):
                yield rows[start : start + PAGE]


def _windows(span: int) -> Iterator[tuple[int, int]]:
    """The time ranges that may have rows of a span; stores delete older rows."""
    if span not in KEEP:
        yield 0, LATEST
        return
    now, window = int(clock.wall()), _WINDOWS[span]
    since = (now - KEEP[span]) // window * window
    while since <= now:
        yield since, since + window
        since += window
    yield since, LATEST  # a machine whose clock is ahead may have written later rows


def _new(there: History, rows: list[HistoryRow]) -> list[HistoryRow]:
    """The rows to copy: rows whose counts are added, and other rows that the target lacks."""
    kind, span = rows[0].kind, rows[0].span
    if kind in ADDED:
        return rows
    if (kind, span) == ("queue", ALWAYS):
        return []  # the target itself counts the totals of its queues
    has = {(row.at, row.name) for row in there.history(kind, span, rows[0].at, rows[-1].at + 1)}
    return [row for row in rows if (row.at, row.name) not in has]
