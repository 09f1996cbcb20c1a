"""The audit list: who changed how many things, and when. A note is a row of the history."""

from __future__ import annotations

import itertools
import os

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import HOUR, HistoryRow, join_name
from tidemill.core.clock import clock

_number = itertools.count()


class AuditNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action of a user.

    Attributes:
        at: wall time.
        who: the name of the user.
        what: the action in words, such as ``paused queue``.
        target: what the action changed: the name of a queue, the id of a job, a filter.
        count: how many things it changed.
    """

    at: float
    who: str
    what: str
    target: str = ""
    count: int = 1

    @property
    def is_search(self) -> bool:
        """True when the target is the search of a bulk operation. The search may be cut off."""
        return " bulk " in self.what


def note(mill: Tidemill, who: str, what: str, target: str = "", count: int = 1) -> None:
    """Add an action to the audit list; a broker without history keeps no list."""
    if Feature.HISTORY not in mill.broker.features:
        return
    now = clock.wall()
    entry = AuditNote(at=now, who=who, what=what, target=target[:500], count=count)
    at = int(now) // HOUR * HOUR
    name = join_name(f"{now:.6f}", f"{os.getpid()}", f"{next(_number)}")
    row = HistoryRow("audit", name, HOUR, at, (count,), msgspec.json.encode(entry))
    with_history(mill.broker, "audit").keep_history([row])


def notes(mill: Tidemill, since: float = 0.0, until: float = 1 << 40) -> list[AuditNote]:
    """The notes of a time range, newest first.

    Raises:
        FeatureMissing: the broker keeps no history.
    """
    first = int(since) // HOUR * HOUR
    rows = with_history(mill.broker, "audit").history("audit", HOUR, first, int(until) + 1)
    found = [msgspec.json.decode(row.sample, type=AuditNote) for row in rows if row.sample]
    found = [entry for entry in found if since <= entry.at <= until]
    return sorted(found, key=lambda entry: entry.at, reverse=True)
