"""The example site, started by its two commands, in a real browser."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import free_port, program

EXAMPLE = Path(__file__).parents[2] / "examples" / "django"
SECONDS = 120.0


def environment(data: Path) -> dict[str, str]:
    own = ("DJANGO_SETTINGS_MODULE", "TIDEMILL_URL", "TIDEMILL_APP")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    return {**clean, "SITE_DATA": str(data)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The site as the README starts it; its address."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "django"))
    readme = (EXAMPLE / "README.md").read_text()
    commands = re.findall(r"^\$ python examples/django/(.*)$", readme, re.MULTILINE)
    assert len(commands) == 2
    address = f"127.0.0.1:{free_port()}"
    first, second = (command.split() for command in commands)
    env = environment(tmp_path)
    subprocess.run([sys.executable, *first], cwd=folder, env=env, check=True, timeout=SECONDS)
    process = subprocess.Popen([sys.executable, *second, address], cwd=folder, env=env)
    try:
        _await(f"http://{address}/", process)
        yield f"http://{address}/"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the site answers; it tells nobody when it begins to."""
    while process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=SECONDS):
            return
    raise AssertionError("the site ended")


def test_a_newcomer_sees_a_report_made_and_its_job(site: str) -> None:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program("chromium", "chromium"), args=["--no-sandbox"]
        )
        with contextlib.closing(browser):
            page = browser.new_page()
            # given the page with the form
            page.goto(site)
            page.get_by_label("Title").fill("Sales <b>")
            page.get_by_label("Rows").fill("40")
            # when a report is asked for
            page.get_by_role("button", name="Make it").click()
            # then its progress moves, and its result appears
            line = page.get_by_role("listitem")
            expect(line).to_contain_text(re.compile(r"[1-9]\d* of 40, running"))
            expect(line).to_contain_text("40 of 40, succeeded 40 rows are fine")
            # then the admin shows the job, after a login
            page.get_by_role("link", name="Admin").click()
            page.get_by_label("Username").fill("admin")
            page.get_by_label("Password").fill("admin")
            page.get_by_role("button", name="Log in").click()
            page.locator("#content").get_by_role("link", name="Jobs").click()
            row = page.get_by_role("row").filter(has_text="reports.tasks.make_report")
            expect(row).to_contain_text("succeeded")
            row.get_by_role("link").click()
            expect(page.locator("#content")).to_contain_text("'40 rows are fine'")
            # then the schedule of the code is there, and runs on request
            page.goto(f"{site}admin/tidemill/schedule/")
            name = "reports.tasks.forget_old_reports"
            page.get_by_label(f"Select {name}").check()
            page.get_by_role("button", name="Run now").click()
            expect(page.locator(".messagelist")).to_contain_text("a job is enqueued")
            # then the worker is alive, and the dashboard is there for the same login
            page.goto(f"{site}admin/tidemill/owner/")
            expect(page.locator("#result_list")).to_contain_text("worker")
            page.goto(f"{site}tidemill/queues")
            expect(page.get_by_role("main")).to_contain_text("default")
