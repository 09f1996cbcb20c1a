"""The notes of bulk operations: rows of kind ``bulk`` in the history of the store.

A note has the whole state of an operation. Each writer replaces the note that it has read or
written last (:attr:`Bulk.kept`). If somebody else has replaced the note meanwhile, the store
changes nothing. So of two runners, only the runner that wrote the note last goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.history import NotedAct, with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HistoryRow, join_name
from tidemill.core.clock import clock
from tidemill.core.errors import InvalidOption
from tidemill.dashboard.target import Target

SILENT = 10.0
"""Seconds. A running operation counts as interrupted when its note is older than this."""

_KEPT = 50  # operations whose notes are kept
_STOP = b"stop"

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
        rate: jobs per second; 0 for no limit.
        first: the number of jobs to retry first; 0 for none. The other jobs follow when these jobs
            succeed.
        expected: the number of jobs that matched when the operation was started.
        state: ``running``, ``done``, ``stopped`` or ``failed``.
        cursor: the place in the list of jobs where the next piece begins.
        done, refused: the numbers of jobs that the store changed and refused to change.
        uncounted: the number of jobs on which a runner acted and then died, before it noted the
            store's answers.
        acting: the number of jobs on which the runner has just acted. The numbers above do not
            count these jobs yet.
        reasons: the most frequent reasons of refusals, with their counts.
        text: the present step of the operation, or why it ended.
        runner: the id of the thread that works on the operation.
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
    rate: int = 0
    first: int = 0
    expected: int = 0
    state: str = "running"
    cursor: str = ""
    done: int = 0
    refused: int = 0
    uncounted: int = 0
    acting: int = 0
    reasons: dict[str, int] = {}
    text: str = ""
    runner: str = ""
    probes: list[str] = []
    kept: HistoryRow | None = None

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
        return self.done + self.refused + self.uncounted + self.acting


def operations(mill: Tidemill) -> list[Bulk]:
    """All operations, the newest first."""
    rows = with_history(mill.broker, "bulk operations").history("bulk", ALWAYS)
    found = [_read(row) for row in rows if row.sample != _STOP]
    return sorted(found, key=lambda bulk: -bulk.started)


def get(mill: Tidemill, bulk_id: str) -> Bulk:
    """An operation.

    Raises:
        InvalidOption: there is no such operation.
    """
    rows = with_history(mill.broker, "bulk operations").history("bulk", ALWAYS, name=bulk_id)
    if not rows:
        raise InvalidOption(f"there is no operation {bulk_id[:60]}")
    return _read(rows[-1])


def _read(row: HistoryRow) -> Bulk:
    bulk = msgspec.json.decode(row.sample, type=Bulk)
    bulk.kept = row
    return bulk


def _row(bulk: Bulk) -> HistoryRow:
    """The row that notes the present state of an operation."""
    bulk.beat = clock.wall()
    sample = msgspec.json.encode(msgspec.structs.replace(bulk, kept=None))
    return HistoryRow("bulk", bulk.id, ALWAYS, int(bulk.started), (), sample)


def keep(mill: Tidemill, bulk: Bulk, more: Sequence[HistoryRow] = ()) -> None:
    """Write the note of an operation, and ``more`` rows in the same commit.

    Raises:
        SupersededError: somebody else has replaced the note; nothing is written.
    """
    history, row = with_history(mill.broker, "bulk operations"), _row(bulk)
    if bulk.kept is None:
        history.keep_history([row, *more])
    elif not history.replace_note(bulk.kept, [row, *more]):
        raise SupersededError
    bulk.kept = row


def act_and_keep(mill: Tidemill, bulk: Bulk, act: NotedAct) -> list[bool]:
    """Act on jobs and write the note, in one commit.

    Raises:
        SupersededError: somebody else has replaced the note; nothing is done or written.
    """
    assert bulk.kept is not None
    row = _row(bulk)
    done = with_history(mill.broker, "bulk operations").act_noted(act, bulk.kept, row)
    if done is None:
        raise SupersededError
    bulk.kept = row
    return done


def take_over(mill: Tidemill, bulk: Bulk, runner: str) -> None:
    """Make ``runner`` the only runner of an operation, and withdraw a request to stop.

    Raises:
        SupersededError: somebody else has replaced the note since the caller read it.
    """
    bulk.state, bulk.text, bulk.runner = "running", "", runner
    _give_up_answers(bulk)
    keep(mill, bulk, [_stop_row(bulk, b"")])


def _give_up_answers(bulk: Bulk) -> None:
    """Count the jobs of a dead runner's last act: only this runner knew the store's answers."""
    bulk.uncounted, bulk.acting = bulk.uncounted + bulk.acting, 0


def _stop_row(bulk: Bulk, sample: bytes) -> HistoryRow:
    return HistoryRow("bulk", join_name(bulk.id, "stop"), ALWAYS, int(bulk.started), (), sample)


def is_asked_to_stop(mill: Tidemill, bulk: Bulk) -> bool:
    """True when a user has asked the runner of an operation to stop."""
    name = join_name(bulk.id, "stop")
    return bool(with_history(mill.broker, "bulk operations").history("bulk", ALWAYS, name=name))


def request_stop(mill: Tidemill, bulk: Bulk) -> None:
    """Ask the runner of an operation to stop. An interrupted operation is stopped at once."""
    with_history(mill.broker, "bulk operations").keep_history([_stop_row(bulk, _STOP)])
    if bulk.shown_state == "interrupted":
        bulk.state, bulk.text = "stopped", "stopped after its process had ended"
        _give_up_answers(bulk)
        with contextlib.suppress(SupersededError):  # the runner is back, and reads the request
            keep(mill, bulk)


def forget(mill: Tidemill, bulk: Bulk) -> None:
    """Delete the note of an operation.

    Raises:
        InvalidOption: the operation runs, or somebody else has changed it just now.
    """
    if bulk.shown_state == "running":
        raise InvalidOption("stop the operation first")
    assert bulk.kept is not None
    gone = [msgspec.structs.replace(bulk.kept, sample=b""), _stop_row(bulk, b"")]
    if not with_history(mill.broker, "bulk operations").replace_note(bulk.kept, gone):
        raise InvalidOption(CHANGED)


def forget_old(mill: Tidemill) -> None:
    """Delete the notes of old operations."""
    for old in operations(mill)[_KEPT:]:
        with contextlib.suppress(InvalidOption):
            forget(mill, old)
