"""The pages of schedules: the next times of each, its last jobs, and its actions."""

from __future__ import annotations

import datetime as dt
from typing import Any

from starlette.responses import Response

from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.compositions import records_of
from tidemill.core.clock import clock
from tidemill.core.config import number_or_text
from tidemill.dashboard.job_search import LOOK, Listed
from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.errors import InvalidOption
from tidemill.schedules.declare import Schedule
from tidemill.schedules.parse import When
from tidemill.schedules.words import cron_in_words

routes = Routes()

_NEXT = 5
_LAST = 10
_MOST = 500


@routes.get("/schedules")
def schedules(page: Page) -> Response:
    need(page.mill.broker, Feature.SCHEDULES, "the page of schedules")
    found = []
    for schedule in page.mill.schedules:
        found.append(schedule)
        if len(found) >= _MOST:
            break
    ids = [one.last_job for one in found if one.last_job]
    jobs = records_of(page.mill.broker, ids)
    last = {job.envelope.id: job.for_list() for job in jobs if job is not None}
    return page.render(
        "schedules.html",
        title="Schedules",
        rows=[
            (one, words_of(one.when), state_of(one), last.get(one.last_job or "")) for one in found
        ],
        now=clock.wall(),
        most=_MOST,
        every=10,
    )


@routes.get("/schedules/{name}")
def schedule(page: Page, name: str) -> Response:
    return _page(page, name)


def _page(page: Page, name: str, problem: str = "", **given: str) -> Response:
    one = page.mill.schedules.get(name)
    kind, text, zone = _rule_of(one.when)
    values = {"kind": kind, "text": text, "zone": zone, **given}
    return page.render(
        "schedule.html",
        400 if problem else 200,
        title=name,
        one=one,
        words=words_of(one.when),
        state=state_of(one),
        next_times=page.mill.schedules.next_times(name, _NEXT),
        last=_last_runs(page, one),
        values=values,
        problem=problem,
        still=bool(problem),
    )


def _last_runs(page: Page, one: Schedule) -> Listed:
    """The newest jobs of a schedule, among the newest jobs of its task."""
    if not page.has(Feature.INSPECT):
        return Listed([], "", is_full=True)
    found = page.mill.jobs(Filter(task=one.task, look=LOOK)).page(limit=_MOST)
    planned = [(record, record.envelope.planned) for record in found.records]
    own = [record for record, plan in planned if plan and plan.schedule == one.name]
    return Listed(own[:_LAST], found.cursor, is_full=bool(own) or not found.cursor)


def words_of(when: str) -> str:
    """A rule in words; a cron text becomes a sentence."""
    kind, text, zone = _rule_of(when)
    return f"{cron_in_words(text)} ({zone})" if kind == "cron" else when


def _looks_like_cron(fields: list[str]) -> bool:
    return all(set(field) <= set("0123456789*/,-LABCDEFGHIJKMNOPQRSTUVWXYZ#") for field in fields)


def state_of(one: Schedule) -> tuple[str, str]:
    """The state of a schedule: a name for its style, and its text."""
    if one.undeclared or one.declared is False:
        return "expired", "no worker declares it"
    if one.ended:
        return "cancelled", "ended"
    if one.paused:
        return "paused", "paused"
    if one.known is False:
        return "failed", "unknown task"
    return "succeeded", "active"


# -- changing --------------------------------------------------------------------------------------


@routes.post("/schedules/{name}/run", Role.OPERATOR)
def run(page: Page, name: str) -> Response:
    job = page.mill.schedules.run(name)
    page.audit("ran schedule", name)
    return page.redirect(page.url("/jobs/{}", job.id), f"put by hand for schedule {name}")


@routes.post("/schedules/{name}/pause", Role.ADMIN)
def pause(page: Page, name: str) -> Response:
    page.mill.schedules.pause(name)
    page.audit("paused schedule", name)
    return page.back(f"schedule {name} is paused", "/schedules")


@routes.post("/schedules/{name}/resume", Role.ADMIN)
def resume(page: Page, name: str) -> Response:
    page.mill.schedules.resume(name)
    page.audit("resumed schedule", name)
    return page.back(f"schedule {name} goes on", "/schedules")


@routes.post("/schedules/{name}/remove", Role.ADMIN)
def remove(page: Page, name: str) -> Response:
    """Remove a schedule; its jobs stay."""
    page.confirm(name)
    page.mill.schedules.remove(name)
    page.audit("removed schedule", name)
    return page.redirect(page.url("/schedules"), f"schedule {name} is removed")


@routes.post("/schedules/{name}/edit", Role.ADMIN)
def edit(page: Page, name: str) -> Response:
    fields = ("kind", "text", "zone")
    values = {field: page.request.field(field).strip() for field in fields}
    try:
        page.mill.schedules.retime(name, _when(values))
    except InvalidOption as error:
        return _page(page, name, str(error), **values)
    page.audit("changed schedule", f"{name}: {values['text']}")
    return page.redirect(page.url("/schedules/{}", name), f"schedule {name} has new times")


def _rule_of(when: str) -> tuple[str, str, str]:
    """The kind, the text and the zone of a rule, for the form that changes it."""
    fields = when.split()
    for count in (6, 5):
        if len(fields) in (count, count + 1) and _looks_like_cron(fields[:count]):
            zone = fields[count] if len(fields) > count else "UTC"
            return "cron", " ".join(fields[:count]), zone
    if fields[:1] == ["every"]:
        text = when.removeprefix("every ").removesuffix(" s")
        zone = fields[-1] if "/" in fields[-1] else ""
        return "every", text.removesuffix(f" {zone}") if zone else text, zone
    return "at", when.removeprefix("once at ").replace(" ", "T"), ""


def _when(values: dict[str, str]) -> When:
    """The rule of a form. Raises InvalidOption for a rule that cannot be used."""
    kind, text, zone = values["kind"], values["text"], values["zone"]
    given: dict[str, Any] = {"zone": zone} if zone else {}
    if kind == "cron":
        return When(cron=text, **given)
    if kind == "every":
        return When(every=number_or_text(text), **given)
    if kind == "at":
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError:
            raise InvalidOption(f"{text[:40]!r} is no time; write 2027-01-31T09:00") from None
        return When(at=moment, **(given or {"zone": "UTC"}))
    raise InvalidOption("choose cron, every or at")
