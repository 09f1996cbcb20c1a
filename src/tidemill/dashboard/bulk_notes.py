"""The notes of bulk operations.

A note has the whole state of an operation. Each writer replaces the note that it has read or
written last (:attr:`Bulk.kept`). If somebody else has replaced the note meanwhile, the store
changes nothing. So of two runners, only the runner that wrote the note last goes on. A user who
wants to stop an operation says so in its note; the runner then finds another note than its own.
"""

from __future__ import annotations

import contextlib

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.schedules import Schedule
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import clock
from tidemill.core.errors import InvalidOption
from tidemill.dashboard.target import Target

SILENT = 10.0
"""Seconds. A running operation counts as interrupted when its note is older than this."""

_KEPT = 50  # operations whose notes are kept

CHANGED = "somebody else has changed the operation just now; look at it again"
"""The refusal when two users act on one operation at the same moment."""


class SupersededError(Exception):
    """Somebody else has replaced the note of the operation since it was read."""


class Bulk(msgspec.Struct, kw_only=True):
    """An operation on all jobs that match.

    Attributes:
        id: the id of the operation.
        action: ``retry``, ``cancel``, ``terminate``, ``alter``, ``delete`` or ``restore``.
        query: the search.
        target: the priority and the queue that ``alter`` gives to the jobs; the queue of
            ``restore``.
        purge: the id of the purge whose jobs ``restore`` brings back.
        who: the user who started the operation.
        started, beat: wall times of the start and of the latest write of the note.
        moment: the store's time at the start. The operation leaves out jobs that entered their
            state later, so it ends although a retried job fails again.
        rate: jobs per second; 0 for no limit.
        first: the number of jobs to retry first; 0 for none. The other jobs follow when these jobs
            succeed.
        expected: the number of jobs that matched when the operation was started.
        state: ``running``, ``done``, ``stopped`` or ``failed``.
        cursor: the place in the list of jobs where the next piece begins.
        done, refused: the numbers of jobs that the store changed and refused to change.
        reasons: the most frequent reasons of refusals, with their counts.
        text: the present step of the operation, or why it ended.
        runner: the id of the thread that works on the operation.
        is_stopping: True when a user has asked the runner to stop.
        probes: ids of the jobs that were retried first, until their outcome is known.
        kept: the note as this process has read or written it last; not a part of the note.
    """

    id: str
    action: str
    query: str
    target: Target = Target()
    purge: str = ""
    who: str = ""
    started: float = 0.0
    beat: float = 0.0
    moment: float = 0.0
    rate: int = 0
    first: int = 0
    expected: int = 0
    state: str = "running"
    cursor: str = ""
    done: int = 0
    refused: int = 0
    reasons: dict[str, int] = {}
    text: str = ""
    runner: str = ""
    is_stopping: bool = False
    probes: list[str] = []
    kept: Schedule | None = None

    @property
    def shown_state(self) -> str:
        """The state, or ``interrupted`` when the process of a running operation has died."""
        silent = self.state == "running" and clock.wall() - self.beat > SILENT
        return "interrupted" if silent else self.state

    @property
    def what(self) -> str:
        """The action in the words of the audit list."""
        return f"bulk {self.action}{self.target.noted}"

    @property
    def part(self) -> float:
        """The part of the jobs that are done, 0 to 1."""
        if self.state == "done":
            return 1.0
        return self.outcomes / self.total if self.total else 0.0

    @property
    def total(self) -> int:
        """Matching jobs at the start, or jobs acted on if these are more; 0 without a count."""
        return max(self.expected, self.outcomes) if self.expected else 0

    @property
    def outcomes(self) -> int:
        """The number of jobs on which the operation has acted, according to its note."""
        return self.done + self.refused


def operations(mill: Tidemill) -> list[Bulk]:
    """All operations, the newest first."""
    found = [_read(note) for note in _notes(mill).list()]
    return sorted(found, key=lambda bulk: -bulk.started)


def get(mill: Tidemill, bulk_id: str) -> Bulk:
    """An operation.

    Raises:
        InvalidOption: there is no such operation.
    """
    note = _notes(mill).get(bulk_id)
    if note is None:
        raise InvalidOption(f"there is no operation {bulk_id[:60]}")
    return _read(note)


def _notes(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "bulk", "bulk operations")


def _read(note: Schedule) -> Bulk:
    bulk = msgspec.json.decode(note.body, type=Bulk)
    bulk.kept = note
    return bulk


def keep(mill: Tidemill, bulk: Bulk) -> None:
    """Write the note of an operation.

    Raises:
        SupersededError: somebody else has replaced the note; nothing is written.
    """
    bulk.beat = clock.wall()
    body = msgspec.json.encode(msgspec.structs.replace(bulk, kept=None))
    if bulk.kept is None:
        bulk.kept = _notes(mill).put(bulk.id, body)
        return
    kept = _notes(mill).replace(bulk.kept, body)
    if kept is None:
        raise SupersededError
    bulk.kept = kept


def take_over(mill: Tidemill, bulk: Bulk, runner: str) -> None:
    """Make ``runner`` the only runner of an operation, and withdraw a request to stop.

    Raises:
        SupersededError: somebody else has replaced the note since the caller read it.
    """
    bulk.state, bulk.text, bulk.runner, bulk.is_stopping = "running", "", runner, False
    keep(mill, bulk)


def hear(mill: Tidemill, bulk: Bulk) -> None:
    """Read whether a user has asked the runner of ``bulk`` to stop.

    Raises:
        SupersededError: the operation has another runner, or its note is deleted.
    """
    note = _notes(mill).get(bulk.id)
    latest = _read(note) if note is not None else None
    if latest is None or latest.runner != bulk.runner:
        raise SupersededError
    bulk.is_stopping, bulk.kept = latest.is_stopping, note


def request_stop(mill: Tidemill, bulk: Bulk) -> None:
    """Ask the runner of an operation to stop. An interrupted operation is stopped at once."""
    while True:
        if bulk.shown_state == "interrupted":
            bulk.state, bulk.text = "stopped", "stopped after its process had ended"
        bulk.is_stopping = True
        try:
            return keep(mill, bulk)
        except SupersededError:  # the runner has written its progress meanwhile
            bulk = get(mill, bulk.id)


def forget(mill: Tidemill, bulk: Bulk) -> None:
    """Delete the note of an operation.

    Raises:
        InvalidOption: the operation runs, or somebody else has changed it just now.
    """
    if bulk.shown_state == "running":
        raise InvalidOption("stop the operation first")
    assert bulk.kept is not None
    if not _notes(mill).delete(bulk.kept):
        raise InvalidOption(CHANGED)


def forget_old(mill: Tidemill) -> None:
    """Delete the notes of old operations."""
    for old in operations(mill)[_KEPT:]:
        with contextlib.suppress(InvalidOption):
            forget(mill, old)
