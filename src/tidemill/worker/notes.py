"""Notes of running jobs on their way to the store: only the notes that the store will keep.

A task may log faster than a worker can send. The store keeps the last 100 lines of a job and its
last report of progress. So earlier notes are dropped before they are sent, and take up no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidemill.core.clock import clock
from tidemill.core.job import Note

_LINES_MOST = 100
"""Log lines of a job that the store keeps."""

_LOOK_AT = 1000
"""If more notes than this wait, the notes that the store would not keep are dropped."""


def interrupted_run(token: int, started: float, why: str) -> Note:
    """The note of a run that ends now and counts no attempt; :mod:`tidemill.client.trail` reads it.

    ``started`` is wall time.
    """
    now = clock.wall()
    return Note(token, line=f"interrupted after {now - started:.3f} s: {why}", time=now)


def latest_notes(notes: Sequence[Note]) -> list[Note]:
    """The last 100 log lines and the last report of progress of each job, in their order."""
    lines, reported, kept = Counter[int](), set[int](), list[Note]()
    for note in reversed(notes):
        if note.done >= 0:
            keep = note.token not in reported
            reported.add(note.token)
        else:
            lines[note.token] += 1
            keep = lines[note.token] <= _LINES_MOST
        if keep:
            kept.append(note)
    kept.reverse()
    return kept


def add_notes(waiting: list[Note], notes: Sequence[Note]) -> None:
    """Add notes to the notes that wait for the store; if too many wait, drop earlier notes."""
    waiting += notes
    if len(waiting) > _LOOK_AT:
        waiting[:] = latest_notes(waiting)
