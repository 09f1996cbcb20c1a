"""The audit list: who changed how many things, and when. An entry is a note of the store."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import clock
from tidemill.errors import TidemillError

log = logging.getLogger("tidemill.audit")

KEPT = 90 * 86_400.0  # seconds for which an entry is kept
_LAST = 1 << 52
_number = itertools.count()


class AuditNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at: float  # wall time
    who: str  # the name of the user
    what: str  # the action in words, such as ``paused queue``
    target: str = ""  # what it changed: the name of a queue, the id of a job, a filter
    count: int = 1  # how many things it changed

    @property
    def is_search(self) -> bool:
        """True when the target is the search of a bulk operation. The search may be cut off."""
        return " bulk " in self.what


def note(store: Store, who: str, what: str, target: str = "", count: int = 1) -> None:
    """Add an action to the audit list; a store without history keeps no list.

    The action is done already. So an entry that cannot be written is a warning, and no error.
    """
    if Feature.HISTORY not in store.features:
        return
    now = clock.wall()
    entry = AuditNote(at=now, who=who, what=what, target=target[:500], count=count)
    name = f"{_newest_first(now)}.{os.getpid()}.{next(_number)}"
    try:
        _kept(store).put(name, msgspec.json.encode(entry), seconds=KEPT)
    except TidemillError as error:
        log.warning("the audit list lacks this: %s %s %s (%s)", who, what, target, error)


def notes(store: Store, since: float = 0.0, until: float = 1 << 40) -> Iterator[AuditNote]:
    """The notes of a time range, newest first. Raises FeatureMissing without history.

    The store is read page by page, as far as the notes are used.
    """
    kept = _kept(store).list(_newest_first(until), f"{_newest_first(since)}~")
    found = (msgspec.json.decode(one.body, type=AuditNote) for one in kept)
    return (entry for entry in found if since <= entry.at <= until)


def _newest_first(at: float) -> str:
    return f"{max(0, _LAST - int(at * 1e6)):014x}"


def _kept(store: Store) -> Notes:
    return Notes(store, "audit", "the audit list")
