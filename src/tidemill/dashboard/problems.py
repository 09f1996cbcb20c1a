"""The present problems: the banners of the overview, which are the findings of ``doctor``."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from tidemill.dashboard.page import Page
from tidemill.doctor.examine import problems as found_problems
from tidemill.doctor.findings import Finding
from tidemill.doctor.findings import has_tasks as has_tasks_in

_SHARED = 3.0
"""Seconds for which viewers share the findings."""

_SAMPLE_SHARED = 10.0

_PLACES = {
    **dict.fromkeys(("disk", "map", "space", "grants", "moved"), "/settings"),
    **dict.fromkeys(("workers", "clock", "versions"), "/workers"),
    **dict.fromkeys(("queues", "backlog"), "/queues"),
    "schedules": "/schedules",
    "limits": "/limits",
}
"""The page that shows more about the findings of a check."""


class Problem(NamedTuple):
    """A banner: its level (``bad`` or ``warn``), the problem, and the remedy.

    ``link`` is a page that shows more; ``command`` is for a terminal.
    """

    level: str
    text: str
    advice: str = ""
    link: str = ""
    link_text: str = ""
    command: str = ""


def worker_command(page: Page, queue: str = "") -> str:
    """The command that starts a worker, for a queue."""
    own = f" -Q {shlex.quote(queue)}" if queue else ""
    return f"tidemill worker {shlex.quote(page.dashboard.app)}{own}"


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
