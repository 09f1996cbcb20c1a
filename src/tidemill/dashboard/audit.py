"""The audit list: who changed how many things, and when. An entry is a note of the store."""

from __future__ import annotations

import itertools
import os

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import clock

KEPT = 90 * 86_400.0
"""Seconds for which an entry is kept."""

_LAST = 1 << 52
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
    name = f"{_newest_first(now)}.{os.getpid()}.{next(_number)}"
    _kept(mill).put(name, msgspec.json.encode(entry), seconds=KEPT)


def notes(mill: Tidemill, since: float = 0.0, until: float = 1 << 40) -> list[AuditNote]:
    """The notes of a time range, newest first.

    Raises:
        FeatureMissing: the broker keeps no history.
    """
    kept = _kept(mill).list(_newest_first(until), f"{_newest_first(since)}~")
    found = [msgspec.json.decode(one.body, type=AuditNote) for one in kept]
    return [entry for entry in found if since <= entry.at <= until]


def _newest_first(at: float) -> str:
    return f"{max(0, _LAST - int(at * 1e6)):014x}"


def _kept(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "audit", "the audit list")
