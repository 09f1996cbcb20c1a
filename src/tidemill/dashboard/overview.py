"""The overview: states, rates, times, and problems."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from starlette.responses import Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import totals_of
from tidemill.client.history import FailureNumbers, TaskNumbers
from tidemill.dashboard.formats import duration, number, percent, rate
from tidemill.dashboard.jobs import RETRY_FIRST
from tidemill.dashboard.page import Page, jobs_query
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.windows import (
    Window,
    chart,
    failures,
    known_seconds,
    per_period,
    percentiles,
    queue_history,
    series,
    totals,
    window,
)
from tidemill.doctor.examine import problems as found_problems
from tidemill.doctor.findings import Finding
from tidemill.doctor.findings import has_tasks as has_tasks_in

routes = Routes()

_NOW = ("ready", "running", "scheduled", "waiting")
_MOST_TASKS = 8


class Tile(NamedTuple):
    """A number with a name, and the link to the list of the things that are counted."""

    label: str
    value: str
    note: str = ""
    link: str = ""
    state: str = ""


class FailingTask(NamedTuple):
    """A task with failed attempts, the search for its jobs, and its most frequent failure."""

    numbers: TaskNumbers
    query: str
    failure: FailureNumbers | None


@routes.get("/")
def overview(page: Page) -> Response:
    over = window(page)
    by_task = totals(page, over, ("task",))
    whole = next(iter(totals(page, over, ())), None)
    queues = sorted(page.look.queues, key=lambda row: (-row.ready, -row.running, row.name))
    return page.render(
        "overview.html",
        title="Overview",
        over=over,
        problems=problems(page),
        first_commands=() if queues else first_commands(page),
        tiles=[tiles for tiles in (_now(page), _ended(page, over)) if tiles],
        whole=whole,
        charts=_charts(page, over),
        failing=_failing(page, over, by_task),
        first=RETRY_FIRST,
        busiest=by_task[:_MOST_TASKS],
        queues=queues[:_MOST_TASKS],
    )


def _now(page: Page) -> list[Tile]:
    """Jobs by state now, and the age of the oldest."""
    knows = page.has(Feature.INSPECT)
    counts = totals_of(page.look.queues, knows=knows)
    links = {state: page.jobs_url(state=state) if knows else "" for state in _NOW}
    tiles = [
        _running(page, count, links[state])
        if state == "running"
        else Tile(state.capitalize(), number(count), "now", links[state], state)
        for state in _NOW
        if (count := counts[state]) is not None
    ]
    with_oldest = [row for row in page.look.queues if row.oldest]
    if with_oldest:
        row = min(with_oldest, key=lambda row: row.oldest)
        link = page.url("/queues/{}", row.name)
        age = duration(page.look.at - row.oldest)
        tiles.append(Tile("Oldest ready", age, f"in {row.name}", link, "scheduled"))
    elif knows:
        tiles.append(Tile("Oldest ready", duration(None), "nothing waits", "", "scheduled"))
    return tiles


def _running(page: Page, leased: int, link: str) -> Tile:
    """Running jobs, and the jobs that wait in their workers."""
    fetched = page.held.waiting()
    if fetched is None:
        return Tile("Running or fetched", number(leased), "now", link, "running")
    note = f"and {fetched:,} fetched" if fetched else "now"
    return Tile("Running", number(max(0, leased - fetched)), note, link, "running")


def _ended(page: Page, over: Window) -> list[Tile]:
    numbers = queue_history(page, over).get("")
    if numbers is None:
        return []
    note = f"in {over.words}"
    tiles = []
    for state in ("succeeded", "failed"):
        count = numbers.total(state)
        link = page.url("/failed", over=over.name) if state == "failed" else ""
        tiles.append(Tile(state.capitalize(), number(count), note, link, state))
    ended = numbers.total("succeeded") + numbers.total("failed")
    share = numbers.total("failed") / ended if ended else None
    tiles.append(Tile("Failure rate", percent(share), "of ended jobs"))
    tiles.append(Tile("Throughput", rate(ended / known_seconds(page, over)), "ended jobs"))
    return tiles


def _failing(page: Page, over: Window, by_task: list[TaskNumbers]) -> list[FailingTask]:
    found = sorted(failures(page, over), key=lambda one: (one.failed, one.count))
    worst = {one.task: one for one in found}  # the most frequent failure of each task
    rows = sorted(by_task, key=lambda one: (-one.failed, -one.retried))
    return [
        FailingTask(one, jobs_query(state="failed", task=one.task), worst.get(one.task))
        for one in rows
        if one.failed or one.retried
    ][:_MOST_TASKS]


def _charts(page: Page, over: Window) -> list[dict[str, Any]]:
    found = series(page, over)
    if found is None:
        return []
    unit = "minute" if found.span == 60 else "hour"
    runs = [
        (name, name if name != "retried" else "cancelled", per_period(counts, found.at, found.span))
        for name, counts in (
            ("succeeded", found.succeeded),
            ("failed", found.failed),
            ("retried", found.retried),
        )
    ]
    waits, times = percentiles(found, "wait"), percentiles(found, "run")
    return [
        {"title": f"Runs per {unit}", "id": "runs", "data": chart(found.at, runs)},
        {"title": "Wait until the first start", "id": "waits", "data": waits},
        {"title": "Time of a run", "id": "times", "data": times},
    ]


_SHARED = 3.0  # seconds for which viewers share the findings
_SAMPLE_SHARED = 10.0
_PLACES = {  # the page that shows more about the findings of a check
    **dict.fromkeys(("disk", "map", "space", "grants", "moved"), "/settings"),
    **dict.fromkeys(("workers", "clock", "versions"), "/workers"),
    **dict.fromkeys(("queues", "backlog"), "/queues"),
    "schedules": "/schedules",
    "limits": "/limits",
}


class Problem(NamedTuple):
    """A banner: the problem, the remedy, a page that shows more, and a command for a terminal."""

    level: str  # ``bad`` or ``warn``
    text: str
    advice: str = ""
    link: str = ""
    link_text: str = ""
    command: str = ""


def worker_command(page: Page, queue: str = "") -> str:
    own = f" -Q {shlex.quote(queue)}" if queue else ""
    known = page.mill.runtime.worker_command
    return f"{known or f'tidemill worker {shlex.quote(page.dashboard.app)}'}{own}"


def first_commands(page: Page) -> list[tuple[str, str]]:
    task = next(iter(sorted(page.mill.tasks)), "TASK")
    app = shlex.quote(page.dashboard.app)
    enqueue = f"tidemill enqueue --app {app} {shlex.quote(task)}"
    return [("Make the first job", enqueue), ("Start the first worker", worker_command(page))]


def problems(page: Page) -> list[Problem]:
    """All problems, the worst first."""
    found = page.cached("findings", _SHARED, lambda: found_problems(page.mill))
    return [_banner(page, finding) for finding in found]


def _banner(page: Page, finding: Finding) -> Problem:
    level = "bad" if finding.status == "fail" else "warn"
    text, advice, command = finding.message, finding.advice, ""
    if finding.note in ("no worker", "no worker alive"):
        advice, command = "", worker_command(page, finding.queue)
    return Problem(level, text[:1].upper() + text[1:], advice, *_link(page, finding), command)


def _link(page: Page, finding: Finding) -> tuple[str, str]:
    """The page that shows more, and the text of its link."""
    if finding.queue:
        return page.url("/queues/{}", finding.queue), "Show the queue"
    if finding.task:
        return page.jobs_url(state="scheduled", task=finding.task), "Show the jobs"
    if finding.schedule:
        return page.url("/schedules/{}", finding.schedule), "Show the schedule"
    if finding.check == "leases":
        return page.jobs_url(state="running"), "Show running jobs"
    place = _PLACES.get(finding.check, "")
    return (page.url(place), f"Show the {place[1:]}") if place else ("", "")


def has_tasks(page: Page, queue: str) -> bool:
    """True when the queue has ready jobs of tasks, which need a worker. Messages need none."""

    def look() -> bool:
        return has_tasks_in(page.mill.broker, queue)

    return page.cached(("has tasks", queue), _SAMPLE_SHARED, look)
