"""Chromium without a window, for tests of the dashboard. It notes what a page must never do.

The fixtures ``browser`` and ``visit`` of ``conftest.py`` use it, on the ``place`` of a module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import Place, eventually
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright
from servers.base import program

expect.set_options(timeout=60_000)  # milliseconds; 5 s are too few on a busy machine
AXE = Path(__file__).parents[1] / "vendor" / "axe.min.js"
GRAVE = ("serious", "critical")
PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1200, "height": 900}
WIDE = {"width": 1440, "height": 900}
CUT = """() => [...document.querySelectorAll(".scroll")]
    .filter((box) => box.checkVisibility() && box.scrollWidth > box.clientWidth + 1)
    .map((box) => `${box.innerText.slice(0, 60)}: ${box.scrollWidth} > ${box.clientWidth}`)"""
"""The visible tables that are wider than their place, so that their last columns are cut off."""


class Visit:
    """One visitor: a page of a fresh browser profile, and the misdeeds of all its pages."""

    def __init__(self, browser: Browser, site: str, **options: Any) -> None:
        self.site = site
        self._context = browser.new_context(**{"viewport": WIDE, "bypass_csp": False, **options})
        self.page: Page = self._context.new_page()
        self.misdeeds: list[str] = []
        self.page.on("console", self._note_line)
        self.page.on("pageerror", lambda error: self.misdeeds.append(f"error: {error}"))
        self.page.on("request", self._note_request)

    def _note_line(self, line: ConsoleMessage) -> None:
        if line.type in ("error", "warning"):
            self.misdeeds.append(f"{line.type}: {line.text}")

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith((self.site, "data:")):
            self.misdeeds.append(f"request to {request.url}")

    def go(self, path: str) -> Page:
        """Open a page of the dashboard."""
        self.page.goto(f"{self.site}{path}")
        return self.page

    def faults(self) -> list[str]:
        """What axe-core finds on the page that is serious or worse, for WCAG 2.2 AA."""
        if not self.page.evaluate("typeof window.axe !== 'undefined'"):
            # Playwright evaluates outside the content security policy of the page.
            self.page.evaluate(AXE.read_text())
        found = self.page.evaluate(
            "() => axe.run(document, {runOnly: "
            "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']})"
        )
        return [
            f"{fault['id']}: {fault['help']}: {node['html'][:200]} {node['failureSummary'][:200]}"
            for fault in found["violations"]
            if fault["impact"] in GRAVE
            for node in fault["nodes"]
        ]

    def close(self) -> None:
        """Close the profile."""
        self._context.close()


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser for the time of a block."""
    path = program("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def open_visits(browser: Browser, site: str) -> Iterator[Callable[..., Visit]]:
    """What opens a visit. At the end no page has done anything that it must not."""
    visits: list[Visit] = []

    def visit(**options: object) -> Visit:
        visits.append(Visit(browser, site, **options))
        return visits[-1]

    yield visit
    misdeeds = [misdeed for one in visits for misdeed in one.misdeeds]
    for one in visits:
        one.close()
    assert misdeeds == []


def check_screens(visit: Callable[..., Visit], path: str) -> None:
    """Look at a page on wide light screens and on a dark phone: all can read and reach it."""
    wide = visit(color_scheme="light")
    page = wide.go(path)
    assert wide.faults() == []
    page.set_viewport_size(LAPTOP)
    assert page.evaluate(CUT) == []
    small = visit(color_scheme="dark", viewport=PHONE)
    page = small.go(path)
    assert small.faults() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate(CUT) == []


def run_letters(place: Place, *queues: str) -> None:
    """Let a worker run 100 jobs of ``send``, 10 of which fail, and hold one job of ``wait``."""
    jobs = place.enqueue_many("send", [(number,) for number in range(100)])
    place.worker("-p", "1", "-c", "2", *queues).wait_ready()
    held = place.enqueue("wait", "go")
    eventually(lambda: all(job.state.finished for job in jobs))
    eventually(lambda: held.state == "running")
