"""Ten questions of somebody who is new to the dashboard, and the clicks to each answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from browser import Visit, run_letters
from harness import Place, eventually, open_place
from playwright.sync_api import Locator, Page, expect

APP = """
@mill.task(queue="mail", retries=0)
def send(number):
    if number % 10 == 0 and not os.path.exists(os.path.join(HERE, "mended")):
        raise ConnectionError(f"smtp.example.org refused letter {number}")
    return number

@mill.task(queue="slow")
def wait(name):
    while not os.path.exists(os.path.join(HERE, name)):
        time.sleep(0.02)

@mill.task(queue="mail")
def nightly(number):
    return number
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A store in which a worker ran 100 jobs, 10 of which failed, and runs one now."""
    with open_place(tmp_path_factory.mktemp("questions")) as place:
        place.write(APP)
        run_letters(place)
        place.module.mill.schedules.add("reports", place.module.nightly.call(1), "0 3 * * *")
        yield place
        (place.path / "go").touch()


class Newcomer:
    """Somebody who begins on the overview. ``clicks`` counts; typing and Enter cost none."""

    def __init__(self, visit: Visit) -> None:
        self.page: Page = visit.go("/")
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.clicks = 0

    def click(self, what: Locator) -> None:
        what.click()
        self.clicks += 1

    def link(self, name: str) -> None:
        """Click a link or a button of this name."""
        pattern = re.compile(name)
        found = self.page.get_by_role("link", name=pattern)
        self.click(found.or_(self.page.get_by_role("button", name=pattern)).first)


@pytest.fixture
def newcomer(visit: Callable[..., Visit]) -> Newcomer:
    return Newcomer(visit())


def test_is_all_well(newcomer: Newcomer) -> None:
    expect(newcomer.page.locator(".tile.failed .value")).to_have_text("10")


def test_why_do_jobs_fail(newcomer: Newcomer) -> None:
    expect(newcomer.page.locator("main")).to_contain_text("ConnectionError: smtp.example.org")
    newcomer.link("Show the latest failed job")
    expect(newcomer.page.locator("details.trace pre").first).to_contain_text("in send")
    assert newcomer.clicks == 1


def test_where_is_my_job(newcomer: Newcomer, place: Place) -> None:
    job = next(iter(place.mill.jobs(queue="mail")))
    newcomer.page.get_by_role("searchbox").fill(job.id[-8:])
    newcomer.page.get_by_role("searchbox").press("Enter")
    newcomer.page.wait_for_url(f"**/jobs/{job.id}")
    assert newcomer.clicks == 0


def test_what_runs_now_and_where(newcomer: Newcomer) -> None:
    newcomer.link("^Workers$")
    expect(newcomer.page.locator("article.worker tbody")).to_contain_text("wait")
    assert newcomer.clicks == 1


def test_run_a_failed_job_again_with_a_change(newcomer: Newcomer) -> None:
    newcomer.link("^Edit the latest failed job")
    newcomer.page.get_by_label("Arguments, as JSON").fill('{"args": [7], "kwargs": {}}')
    newcomer.link("^Run it$")
    expect(newcomer.page.locator("h1")).to_contain_text("succeeded")
    assert newcomer.clicks == 2


def test_stop_one_running_job(newcomer: Newcomer, place: Place) -> None:
    job = place.enqueue("wait", "stop")
    eventually(lambda: job.state == "running")
    newcomer.page.reload()
    newcomer.click(newcomer.page.locator("a.tile.running"))
    newcomer.click(newcomer.page.get_by_role("button", name=f"Cancel job {job.id}"))
    expect(newcomer.page.get_by_role("status")).to_contain_text("cancelled the job")
    assert newcomer.clicks == 2
    (place.path / "stop").touch()
    eventually(lambda: job.state.finished)


def test_pause_a_queue(newcomer: Newcomer, place: Place) -> None:
    newcomer.link("^slow$")
    newcomer.link("^Pause$")
    expect(newcomer.page.get_by_role("status")).to_contain_text("Queue slow is paused")
    place.mill.queue("slow").resume()
    assert newcomer.clicks == 2


def test_when_does_a_schedule_come_and_run_it_now(newcomer: Newcomer) -> None:
    newcomer.link("^Schedules$")
    expect(newcomer.page.locator("tbody")).to_contain_text("in ")
    newcomer.link("^Run now$")
    newcomer.page.wait_for_url("**/jobs/*")
    assert newcomer.clicks == 2


def test_who_did_what(newcomer: Newcomer) -> None:
    newcomer.link("^Audit$")
    expect(newcomer.page.locator("h1")).to_contain_text("Audit")
    assert newcomer.clicks == 1


def test_retry_all_jobs_that_failed(newcomer: Newcomer, place: Place) -> None:
    (place.path / "mended").touch()
    newcomer.link("^Retry the failed jobs of")
    newcomer.link("^Retry .* jobs$")
    expect(newcomer.page.locator("h1")).to_contain_text("done")
    eventually(lambda: not list(place.mill.jobs(state="failed", queue="mail")))
    assert newcomer.clicks == 2
