"""The page of the audit list: who changed how many things, and when."""

from __future__ import annotations

import itertools

import msgspec
from starlette.responses import Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.audit import KEPT, AuditNote, notes
from tidemill.core.clock import clock
from tidemill.dashboard.page import Page
from tidemill.dashboard.routes import Routes

routes = Routes()

_PAGE = 100


@routes.get("/audit")
def index(page: Page) -> Response:
    """Actions of users, newest first; a page ends with a link to older actions."""
    knows = page.has(Feature.HISTORY)
    before = _time(page.request.arg("before"))
    who, what = page.request.arg("who").strip(), page.request.arg("what").strip()
    every = notes(page.mill.broker, clock.wall() - KEPT, before) if knows else ()
    matching = (
        note
        for note in (_shown(page, note) for note in every)
        if who.lower() in note.who.lower() and what.lower() in f"{note.what} {note.target}".lower()
    )
    found = [*itertools.islice(matching, _PAGE + 1)]
    return page.render(
        "audit.html",
        title="Audit",
        knows=knows,
        rows=found[:_PAGE],
        more=f"{found[_PAGE - 1].at - 1e-6:.6f}" if len(found) > _PAGE else "",
        who=who,
        what=what,
        filtered=bool(who or what or page.request.arg("before")),
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
