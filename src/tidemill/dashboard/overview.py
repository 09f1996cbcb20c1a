"""The overview: states, rates, times, and problems."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.responses import Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import totals_of
from tidemill.client.history import FailureNumbers, TaskNumbers
from tidemill.dashboard.formats import duration, number, percent, rate
from tidemill.dashboard.job_actions import RETRY_FIRST
from tidemill.dashboard.page import Page, jobs_query
from tidemill.dashboard.problems import problems
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.windows import (
    WINDOWS,
    Window,
    chart,
    failures,
    known_seconds,
    per_period,
    queue_history,
    series,
    totals,
    window,
)

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
    """The first page."""
    over = window(page)
    by_task = totals(page, over, ("task",))
    whole = next(iter(totals(page, over, ())), None)
    queues = sorted(page.look.queues, key=lambda row: (-row.ready, -row.running, row.name))
    return page.render(
        "overview.html",
        title="Overview",
        section="/",
        over=over,
        windows=WINDOWS,
        problems=problems(page),
        tiles=[tiles for tiles in (_now(page), _ended(page, over)) if tiles],
        whole=whole,
        charts=_charts(page, over),
        failing=_failing(page, over, by_task),
        first=RETRY_FIRST,
        busiest=by_task[:_MOST_TASKS],
        queues=queues[:_MOST_TASKS],
        more_queues=max(0, len(queues) - _MOST_TASKS),
        knows=page.has(Feature.INSPECT),
        has_history=page.has(Feature.HISTORY),
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
    """Jobs that ended in the window."""
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
    """The tasks that failed most."""
    found = sorted(failures(page, over), key=lambda one: (one.failed, one.count))
    worst = {one.task: one for one in found}  # the most frequent failure of each task
    rows = sorted(by_task, key=lambda one: (-one.failed, -one.retried))
    return [
        FailingTask(one, jobs_query(state="failed", task=one.task), worst.get(one.task))
        for one in rows
        if one.failed or one.retried
    ][:_MOST_TASKS]


def _charts(page: Page, over: Window) -> list[dict[str, Any]]:
    """The charts of a window; none without history."""
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
    waits = [("p50", "ready", found.wait_p50), ("p95", "running", found.wait_p95)]
    times = [("p50", "ready", found.run_p50), ("p95", "running", found.run_p95)]
    return [
        {"title": f"Runs per {unit}", "id": "runs", "data": chart(found.at, runs), "unit": ""},
        {
            "title": "Wait until the first start",
            "id": "waits",
            "data": chart(found.at, [*waits, ("p99", "scheduled", found.wait_p99)], "s"),
            "unit": "s",
        },
        {
            "title": "Time of a run",
            "id": "times",
            "data": chart(found.at, [*times, ("p99", "scheduled", found.run_p99)], "s"),
            "unit": "s",
        },
    ]
