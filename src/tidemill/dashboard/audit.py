"""The audit list: who changed how many things, and when. An entry is a note of the store."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import clock
from tidemill.dashboard.routes import Routes

if TYPE_CHECKING:
    from tidemill.dashboard.page import Page

routes = Routes()

KEPT = 90 * 86_400.0  # seconds for which an entry is kept
_LAST = 1 << 52
_number = itertools.count()


class AuditNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action of a user."""

    at: float  # wall time
    who: str  # the name of the user
    what: str  # the action in words, such as ``paused queue``
    target: str = ""  # what it changed: the name of a queue, the id of a job, a filter
    count: int = 1  # how many things it changed

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
    """The notes of a time range, newest first. Raises FeatureMissing without history."""
    kept = _kept(mill).list(_newest_first(until), f"{_newest_first(since)}~")
    found = [msgspec.json.decode(one.body, type=AuditNote) for one in kept]
    return [entry for entry in found if since <= entry.at <= until]


def _newest_first(at: float) -> str:
    return f"{max(0, _LAST - int(at * 1e6)):014x}"


def _kept(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "audit", "the audit list")


_PAGE = 100


@routes.get("/audit")
def index(page: Page) -> Response:
    """Actions of users, newest first; a page ends with a link to older actions."""
    values: dict[str, Any] = {
        "title": "Audit",
        "section": "/audit",
        "knows": page.has(Feature.HISTORY),
    }
    if not values["knows"]:
        return page.render(
            "audit.html", rows=[], more="", who="", what="", filtered=False, **values
        )
    before = _time(page.request.arg("before"))
    who, what = page.request.arg("who").strip(), page.request.arg("what").strip()
    found = notes(page.mill, clock.wall() - KEPT, before)
    found = [
        note
        for note in (_shown(page, note) for note in found)
        if who.lower() in note.who.lower() and what.lower() in f"{note.what} {note.target}".lower()
    ]
    rows = found[:_PAGE]
    more = f"{rows[-1].at - 1e-6:.6f}" if len(found) > _PAGE else ""
    filtered = bool(who or what or page.request.arg("before"))
    return page.render(
        "audit.html", rows=rows, more=more, who=who, what=what, filtered=filtered, **values
    )


def _shown(page: Page, note: AuditNote) -> AuditNote:
    """A note without the parts that the user may not see. The page searches notes in this form."""
    if not note.is_search:
        return note
    return msgspec.structs.replace(note, target=page.shown_search(note.target))


def _time(text: str) -> float:
    try:
        return float(text[:30])
    except ValueError:
        return float(1 << 40)
