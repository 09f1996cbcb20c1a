"""The dashboard in a browser: what a person sees and does, with keys alone, on any screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Visit, check_screens, run_letters
from harness import Place, open_place
from playwright.sync_api import Locator, Page, Route, expect

APP = """
@mill.task(queue="mail", retries=0)
def send(number):
    if number % 10 == 0:
        raise ConnectionError(f"smtp.example.org refused letter {number}")

@mill.task(queue="slow")
def wait(name):
    while not os.path.exists(os.path.join(HERE, name)):
        time.sleep(0.02)
"""
PAGES = ("/", "/queues", "/queues/mail", "/workers", "/audit", "/settings", "/help")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A store in which a worker ran 100 jobs, 10 of which failed, and runs one now."""
    with open_place(tmp_path_factory.mktemp("dashboard")) as place:
        place.write(APP)
        run_letters(place)
        yield place
        (place.path / "go").touch()


def tile(page: Page, label: str) -> Locator:
    """The number on a tile."""
    found = page.locator(".tile").filter(has=page.get_by_text(label, exact=True))
    return found.locator(".value")


def test_the_overview_shows_what_ran_and_moves_by_itself(
    visit: Callable[..., Visit], place: Place
) -> None:
    page = visit().go("/")
    for label, number in (("Succeeded", "90"), ("Failed", "10"), ("Running", "1")):
        expect(tile(page, label)).to_have_text(number)
    expect(page.locator("#chart-runs canvas")).to_be_visible()
    before = page.locator("#chart-runs").get_attribute("data-chart") or ""
    place.enqueue_many("send", [(number,) for number in range(1, 10)])
    expect(page.locator(".tile.succeeded .value")).to_have_text("99")
    # the chart shows no runs of a minute of which less than a quarter is over
    expect(page.locator("#chart-runs")).not_to_have_attribute("data-chart", before, timeout=60_000)
    expect(page.locator("#chart-runs canvas")).to_have_count(1)


def test_a_queue_is_paused_with_two_clicks_and_the_action_is_written_down(
    visit: Callable[..., Visit], place: Place
) -> None:
    page = visit().go("/queues")
    row = page.locator("tr", has=page.get_by_role("link", name="mail", exact=True))
    row.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status")).to_contain_text("Queue mail is paused")
    assert {queue.name for queue in place.mill.queues() if queue.paused} == {"mail"}
    page.goto(page.url.replace("/queues", "/audit"))
    expect(page.locator("tbody tr").first).to_contain_text("paused queue")
    page.goto(page.url.replace("/audit", "/"))
    expect(page.locator(".banner")).to_contain_text("Queue mail is paused")
    page.goto(f"{page.url}queues/mail")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("status")).to_contain_text("Queue mail goes on")
    assert not any(queue.paused for queue in place.mill.queues())


def test_a_purge_is_refused_until_the_name_is_typed(
    visit: Callable[..., Visit], place: Place
) -> None:
    place.mill.queue("letters").put("hello")
    page = visit().go("/queues/letters")
    page.get_by_role("button", name="Purge").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox").fill("leters")
    dialog.get_by_role("button", name="Purge").click()
    expect(page.get_by_role("status")).to_contain_text("type 'letters' exactly")
    page.get_by_role("button", name="Purge").click()
    dialog.get_by_role("textbox").fill("letters")
    dialog.get_by_role("button", name="Purge").click()
    expect(page.get_by_role("status")).to_contain_text("1 job was deleted")


def test_the_stacks_of_a_worker_show_what_it_runs(visit: Callable[..., Visit]) -> None:
    page = visit().go("/workers")
    expect(page.locator("article.worker tbody")).to_contain_text("wait")
    page.get_by_role("button", name="Stacks").click()
    expect(page.locator("pre").first).to_contain_text("in wait")


@pytest.mark.everyday
def test_keys_alone_lead_everywhere(visit: Callable[..., Visit], place: Place) -> None:
    visitor = visit()
    visitor.page.clock.set_fixed_time(1_800_000_000_000)  # no key comes too late after a g
    page = visitor.go("/")
    for keys, path in (("gq", "/queues"), ("gw", "/workers"), ("ga", "/audit"), ("go", "/")):
        page.keyboard.press(keys[0])
        page.keyboard.press(keys[1])
        page.wait_for_url(f"**{path}")
        page.wait_for_load_state("load")
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.wait_for_url("**/queues")
    page.wait_for_load_state("load")
    page.keyboard.press("j")
    expect(page.locator("tr.at")).to_have_count(1)
    page.keyboard.press("Enter")
    page.wait_for_url("**/queues/*")
    page.wait_for_load_state("load")
    page.keyboard.press("p")
    expect(page.locator("[data-live-switch]")).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("?")
    page.wait_for_url("**/help")
    page.wait_for_load_state("load")
    expect(page.locator("[data-live-switch]")).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("p")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_held_pages_stay_as_they_are(visit: Callable[..., Visit], place: Place) -> None:
    page = visit().go("/queues")
    page.keyboard.press("p")
    place.mill.queue("another").put("hello")
    expect(page.get_by_role("link", name="another", exact=True)).to_have_count(0)
    page.keyboard.press("p")
    expect(page.get_by_role("link", name="another", exact=True)).to_be_visible()


def test_a_page_without_an_answer_says_from_when_it_is(  # case M17
    visit: Callable[..., Visit], place: Place
) -> None:
    page = visit().go("/queues")
    text = page.locator(".live-text")
    expect(text).to_have_text("Live")
    # when the server hangs: an answer to a request for news does not come
    news = LateNews(page, place, "silent")
    expect(text).to_have_text(re.compile(r"as of \d\d:\d\d:\d\d"), timeout=60_000)
    # and when it answers again
    news.come()
    expect(text).to_have_text("Live", timeout=60_000)


class LateNews:
    """News of a queue: the page has asked for them, and they come when the test says so."""

    def __init__(self, page: Page, place: Place, queue: str) -> None:
        self._page = page
        self._queue = queue
        self._late: Route | None = None
        page.route("**/queues", self._keep_first)
        with page.expect_request(lambda request: "x-live" in request.headers):
            place.mill.queue(queue).put("hello")

    def _keep_first(self, route: Route) -> None:
        if "x-live" in route.request.headers and self._late is None:
            self._late = route
        else:
            route.continue_()

    def come(self) -> None:
        """Let the answer come, and wait until the page has handled the answer."""
        answer = self._late.fetch()
        while f">{self._queue}<" not in answer.text():  # viewers share a look for a second
            answer = self._late.fetch()
        self._page.evaluate(
            "() => { window.handled = new Promise((done) => "
            "document.addEventListener('htmx:afterRequest', () => done(true), { once: true })) }"
        )
        self._late.fulfill(response=answer)
        assert self._page.evaluate("window.handled")


def test_news_that_come_late_do_not_move_a_held_page(
    visit: Callable[..., Visit], place: Place
) -> None:
    page = visit().go("/queues")
    news = LateNews(page, place, "late")
    page.keyboard.press("p")
    news.come()
    expect(page.get_by_role("link", name="late", exact=True)).to_have_count(0)
    page.keyboard.press("p")
    expect(page.get_by_role("link", name="late", exact=True)).to_be_visible()


@pytest.mark.parametrize("path", PAGES)
def test_pages_fit_every_screen_and_axe_finds_nothing_serious(
    visit: Callable[..., Visit], path: str
) -> None:
    check_screens(visit, path)


def test_the_zone_of_times_is_that_of_the_browser_until_the_viewer_switches(
    visit: Callable[..., Visit],
) -> None:
    page = visit(timezone_id="Asia/Tokyo").go("/queues")
    zone = page.locator("[data-zone-switch] .zone")
    for name in ("Asia/Tokyo", "UTC"):
        expect(zone).to_have_text(name)
        page.goto(page.url)
        expect(page.locator("html")).to_have_attribute("data-zone", name)  # of the server
        page.locator("[data-zone-switch]").click()
    expect(zone).to_have_text("Asia/Tokyo")


def test_the_theme_is_kept(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit(color_scheme="light").go("/help")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("[data-theme-switch]").click()
    page.locator("[data-theme-switch]").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(paper) != light
