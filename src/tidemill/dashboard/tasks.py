"""The pages of tasks: the runs and times of each task, and the effect of a release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from starlette.responses import Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.history import Deploy, TaskNumbers, Times
from tidemill.dashboard.job import latest_jobs
from tidemill.dashboard.job_search import Listed
from tidemill.dashboard.page import NotFound, Page
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.windows import (
    WINDOWS,
    Window,
    chart,
    failures,
    per_period,
    read,
    series,
    totals,
    window,
)

routes = Routes()


class Bin(NamedTuple):
    """A bar of a histogram: its height (1 for the highest), its count, and its bounds (s)."""

    height: float
    number: int
    low: float
    high: float


class Compared(NamedTuple):
    """A number of a release beside the number of the previous release, with a verdict."""

    name: str
    now: float | None
    before: float | None
    kind: str  # how to show the values: percent, duration, number
    less_is_better: bool = True

    @property
    def verdict(self) -> str:
        """``up`` or ``down`` after a change by more than a fifth; empty after a smaller change."""
        if self.now is None or self.before is None:
            return ""
        if self.now > self.before * 1.2 + 1e-9:
            return "up"
        return "down" if self.now < self.before / 1.2 - 1e-9 else ""


@routes.get("/tasks")
def tasks(page: Page) -> Response:
    """All tasks that ran in the window, or that the app declares."""
    over = window(page)
    known = totals(page, over, ("task",))
    ran = {one.task for one in known}
    return page.render(
        "tasks.html",
        title="Tasks",
        over=over,
        rows=known,
        idle=sorted(name for name in list(page.mill.tasks) if name not in ran),
    )


@routes.get("/tasks/{task}")
def task(page: Page, task: str) -> Response:
    over = window(page)
    latest = _latest(page, task)
    queues = totals(page, over, ("queue",), task)
    if not (latest.records or latest.cursor or queues or task in page.mill.tasks):
        raise NotFound(f"no job of the task {task[:200]} is kept, and none ran lately")
    releases = totals(page, over, ("release",), task)
    whole = totals(page, over, ("task",), task)
    marks: list[Deploy] = read(page, over, "deploys", [])
    when = {mark.release: mark.at for mark in marks}
    return page.render(
        "task.html",
        title=task,
        over=over,
        name=task,
        whole=whole[0] if whole else None,
        queues=queues,
        releases=sorted(releases, key=lambda one: -when.get(one.release, 0)),
        compared=_compared(releases, read(page, WINDOWS[-1], "deploys", [])),
        charts=_charts(page, over, task, marks),
        marks=marks,
        run_bins=bins_of(whole[0].run) if whole else [],
        wait_bins=bins_of(whole[0].wait) if whole else [],
        failures=failures(page, over, task),
        latest=latest,
    )


def _latest(page: Page, task: str) -> Listed:
    if not page.has(Feature.INSPECT):
        return Listed([], "", is_full=True)
    return latest_jobs(page.mill, Filter(task=task))


def _charts(
    page: Page, over: Window, task: str, marks: Sequence[Deploy]
) -> list[tuple[str, str, dict[str, object]]]:
    """Id, title and data of each chart; ``marks`` are the deploys to mark."""
    found = series(page, over, task=task)
    if found is None or not any((*found.succeeded, *found.failed, *found.retried)):
        return []
    at, span = found.at, found.span
    unit = " per minute" if span == 60 else " per hour"
    bad = [failed + retried for failed, retried in zip(found.failed, found.retried, strict=True)]
    runs = chart(
        at,
        [
            ("succeeded", "succeeded", per_period(found.succeeded, at, span)),
            ("failed attempts", "failed", per_period(bad, at, span)),
        ],
    )
    times = chart(
        at,
        [
            ("run p50", "running", found.run_p50),
            ("run p95", "scheduled", found.run_p95),
            ("wait p95", "ready", found.wait_p95),
        ],
        "s",
    )
    noted = [{"at": mark.at, "name": mark.release} for mark in marks]
    runs["marks"] = times["marks"] = noted
    return [
        ("runs", f"Runs{unit}", runs),
        ("times", "Time of a run, wait until the first start", times),
    ]


def _compared(releases: list[TaskNumbers], marks: Sequence[Deploy]) -> list[Compared]:
    """The latest release of a task beside the previous release; empty without two releases."""
    when = {mark.release: mark.at for mark in marks}
    known = sorted(
        (one for one in releases if one.release in when), key=lambda one: -when[one.release]
    )
    if len(known) < 2:
        return []
    new, old = known[:2]
    return [
        Compared("Release", None, None, f"{new.release}\n{old.release}"),
        Compared("Runs", new.runs, old.runs, "number", less_is_better=False),
        Compared("Failed attempts", new.failure_rate, old.failure_rate, "percent"),
        Compared("Run p50", new.run.p50, old.run.p50, "duration"),
        Compared("Run p95", new.run.p95, old.run.p95, "duration"),
        Compared("Wait p95", new.wait.p95, old.wait.p95, "duration"),
    ]


def bins_of(times: Times) -> list[Bin]:
    """The bars of a histogram, from the first bucket with a run to the last."""
    used = [n for n, count in enumerate(times.buckets) if count]
    if not used:
        return []
    most = max(times.buckets)
    first, last = used[0], used[-1]
    return [
        Bin(count / most, count, 2.0 ** (n - 1) / 1000 if n else 0.0, 2.0**n / 1000)
        for n, count in enumerate(times.buckets)
        if first <= n <= last
    ]
