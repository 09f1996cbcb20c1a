"""The page of limits: the taken places of each limit, and the jobs that take them."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from starlette.responses import Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.core.job import Record, State
from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.doctor.queues import state_of_limit
from tidemill.errors import InvalidOption
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import rate_text, terms_text, value_of

routes = Routes()

_RUNNING_MOST = 500
_HOLDERS = 20
_FIELDS = ("rate", "burst", "window", "concurrency", "breaker")


class Row(NamedTuple):
    """A limit, with the running jobs that take its places, by key."""

    stats: LimitStats
    terms: str
    state: str
    holders: list[Record]
    keys: list[tuple[str, int]]


@routes.get("/limits")
def limits(page: Page) -> Response:
    stats = with_limits(page.mill.broker, "the page of limits").limits()
    running = _running(page)
    return page.render("limits.html", title="Limits", rows=[_row(one, running) for one in stats])


def _running(page: Page) -> list[Record]:
    if not page.has(Feature.INSPECT):
        return []
    what = Filter(states=frozenset({State.RUNNING}), look=20_000)
    return page.mill.jobs(what).page(limit=_RUNNING_MOST).records


def _row(one: LimitStats, running: list[Record]) -> Row:
    if one.queue:
        held = [record for record in running if record.envelope.queue == one.name]
    else:
        held = [r for r in running if r.envelope.limit and r.envelope.limit.name == one.name]
    keys = collections.Counter(r.envelope.limit.key for r in held if r.envelope.limit)
    return Row(
        stats=one,
        terms=terms_text(one.terms) or "no settings",
        state=state_of_limit(one),
        holders=held[:_HOLDERS],
        keys=[(key, count) for key, count in keys.most_common(_HOLDERS) if key],
    )


@routes.get("/limits/edit", Role.ADMIN)
def edit(page: Page) -> Response:
    one = _limit(page, page.request.arg("name"), bool(page.request.arg("queue")))
    return _form(page, one, _values(one))


def _limit(page: Page, name: str, queue: bool) -> LimitStats:
    for one in with_limits(page.mill.broker, "a limit").limits():
        if one.name == name and one.queue == queue:
            return one
    if queue and page.look.queue(name) is not None:
        return LimitStats(name=name, queue=True)
    raise InvalidOption(f"there is no limit {name[:80]!r}; a job must have it first")


def _values(one: LimitStats) -> dict[str, str]:
    terms = one.terms
    return {
        "rate": rate_text(terms.rate) if terms.rate else "",
        "burst": f"{terms.burst:g}" if terms.rate else "",
        "window": rate_text(terms.window) if terms.window else "",
        "concurrency": "" if terms.concurrency is None else str(terms.concurrency),
        "breaker": f"{terms.breaker[0]}" if terms.breaker else "",
    }


def _form(page: Page, one: LimitStats, values: dict[str, str], problem: str = "") -> Response:
    return page.render(
        "limit_edit.html",
        400 if problem else 200,
        title=f"Limit {one.name}",
        still=True,
        one=one,
        values=values,
        problem=problem,
        declared=terms_text(one.declared) if one.declared else "",
    )


@routes.post("/limits/edit", Role.ADMIN)
def change(page: Page) -> Response:
    """Change a limit, or apply the settings of its code again."""
    request = page.request
    one = _limit(page, request.field("name"), bool(request.field("queue")))
    own = page.mill.limits
    if request.field("declared"):
        (own.reset_queue if one.queue else own.reset)(one.name)
        page.audit("reset limit", one.name)
        return page.redirect(page.url("/limits"), f"limit {one.name} is as the code declares it")
    values = {field: request.field(field).strip() for field in _FIELDS}
    try:
        changes: dict[str, Any] = {
            field: value_of(field, values[field]) if values[field] else None
            for field in _FIELDS
            if (one.queue or field != "breaker") and (values["rate"] or field != "burst")
        }
        (own.set_queue if one.queue else own.set)(one.name, **changes)
    except InvalidOption as error:
        return _form(page, one, values, str(error))
    page.audit("changed limit", one.name)
    return page.redirect(page.url("/limits"), f"limit {one.name} is changed for all workers")
