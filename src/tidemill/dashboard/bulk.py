"""The pages of actions on all jobs that match: preview, start, progress, stop and resume."""

from __future__ import annotations

from starlette.responses import Response

from tidemill.core.clock import clock
from tidemill.core.errors import InvalidOption
from tidemill.dashboard import bulk_notes, bulk_run
from tidemill.dashboard.job_actions import ACTIONS
from tidemill.dashboard.jobs import query_of
from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.target import target_of

routes = Routes()

_FIRST_MOST = 1000

_TITLES = {name: f"{action.label} all that match" for name, action in ACTIONS.items()}
_TITLES["restore"] = "Restore a purge"

_PATIENCE = 0.06
"""Seconds for which a preview counts jobs, unless the user asks to count all."""


@routes.get("/bulk")
def bulk_list(page: Page) -> Response:
    """All operations."""
    found = bulk_notes.operations(page.mill)
    return page.render(
        "bulk.html",
        title="Bulk operations",
        section="/bulk",
        operations=found,
        titles=_TITLES,
        every=1 if any(each.state == "running" for each in found) else 10,
    )


@routes.get("/bulk/new", Role.OPERATOR)
def preview(page: Page) -> Response:
    """Preview an action on all jobs that match."""
    action, text = _action(page.request.arg("act")), page.request.arg("q")
    query = bulk_run.narrowed(query_of(page, text), action)
    return page.render(
        "bulk_new.html",
        title=_TITLES[action],
        section="/bulk",
        still=True,
        name=action,
        action=ACTIONS[action],
        query=query,
        survey=bulk_run.survey(
            page.mill, query, action, 5.0 if page.request.arg("count") else _PATIENCE
        ),
        rates=bulk_run.RATES,
        first=page.request.arg("first"),
        queues=[row.name for row in page.look.queues],
        now=clock.wall(),
    )


@routes.post("/bulk", Role.OPERATOR)
def start(page: Page) -> Response:
    """Start an operation."""
    request = page.request
    action = _action(request.field("act"))
    page.need(ACTIONS[action].role)
    query = bulk_run.narrowed(query_of(page, request.field("q")), action)
    expected = _number("expected", request.field("expected", "0"), 1 << 40)
    bulk = bulk_run.start(
        page.mill,
        action,
        query,
        page.user.name,
        rate=_number("rate", request.field("rate", "0"), 100_000),
        first=_number("first", request.field("first") or "0", _FIRST_MOST),
        expected=expected,
        target=target_of(request, action),
    )
    page.dashboard.looks.forget()
    return page.redirect(page.url("/bulk/{}", bulk.id))


@routes.get("/bulk/{bulk_id}")
def bulk(page: Page, bulk_id: str) -> Response:
    """One operation."""
    one = bulk_notes.get(page.mill, bulk_id)
    return page.render(
        "bulk_one.html",
        title=_TITLES[one.action],
        section="/bulk",
        one=one,
        now=clock.wall(),
        every=1 if one.state == "running" else 10,
    )


@routes.post("/bulk/{bulk_id}/stop", Role.OPERATOR)
def stop(page: Page, bulk_id: str) -> Response:
    """Stop an operation."""
    one = bulk_notes.get(page.mill, bulk_id)
    bulk_notes.request_stop(page.mill, one)
    page.audit(f"stopped {one.what}", one.query, one.done)
    return page.redirect(page.url("/bulk/{}", bulk_id), "the operation stops after this piece")


@routes.post("/bulk/{bulk_id}/resume", Role.OPERATOR)
def resume(page: Page, bulk_id: str) -> Response:
    """Resume an operation."""
    one = bulk_notes.get(page.mill, bulk_id)
    page.need(Role.ADMIN if one.action == "restore" else ACTIONS[one.action].role)
    bulk_run.resume(page.mill, one)
    page.audit(f"resumed {one.what}", one.query, one.done)
    return page.redirect(page.url("/bulk/{}", bulk_id), "the operation goes on")


@routes.post("/bulk/{bulk_id}/forget", Role.OPERATOR)
def forget(page: Page, bulk_id: str) -> Response:
    """Delete the note of an operation."""
    bulk_notes.forget(page.mill, bulk_notes.get(page.mill, bulk_id))
    return page.redirect(page.url("/bulk"), "deleted; the audit list still has the operation")


def _action(name: str) -> str:
    if name not in ACTIONS:
        raise InvalidOption(f"choose an action: {', '.join(ACTIONS)}")
    return name


def _number(field: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) <= most):
        raise InvalidOption(f"{field} must be a whole number up to {most:,}, not {text[:20]!r}")
    return int(text)
