"""The pages of jobs in a browser: search, follow, retry and act on all, with keys alone, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from browser import Visit, check_screens, run_letters
from declared_schedules import store_declared
from harness import Place, eventually, open_place
from playwright.sync_api import expect

from tidemill import chain, group

APP = """
from tidemill import Limit, this_job

@mill.task(queue="mail", retries=0, limit=Limit(concurrency=3, name="smtp"))
def send(number):
    if number % 10 == 0 and not os.path.exists(os.path.join(HERE, "mended")):
        raise ConnectionError(f"smtp.example.org refused letter {number}")
    return number

@mill.task(queue="slow")
def wait(name):
    job = this_job()
    job.log("waits for " + name)
    while not os.path.exists(os.path.join(HERE, name)):
        time.sleep(0.02)
    job.log("has seen " + name)

@mill.task(queue="later")
def later(number):
    return number

mill.schedule("nightly", later.call(1), "0 3 * * *")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A store in which a worker ran 100 jobs, 10 of which failed, and runs one now."""
    with open_place(tmp_path_factory.mktemp("jobs")) as place:
        place.write(APP)
        run_letters(place, "-Q", "mail,slow")
        later = place.module.later
        place.module.mill.enqueue(chain(group([later.call(n) for n in range(3)]), later))
        store_declared(place.module.mill)
        yield place
        (place.path / "go").touch()


def failed(place: Place) -> list[str]:
    return [job.id for job in place.mill.jobs(state="failed", queue="mail")]


@pytest.mark.everyday
def test_a_failed_job_is_found_by_its_id_and_retried(  # case W3
    visit: Callable[..., Visit], place: Place
) -> None:
    job_id = failed(place)[0]
    page = visit().go("/")
    page.get_by_role("searchbox").fill(job_id[-8:])
    page.get_by_role("searchbox").press("Enter")
    page.wait_for_url(f"**/jobs/{job_id}")
    expect(page.locator(".waterfall")).to_contain_text("attempt 1 of 1")
    expect(page.locator("details.trace pre").first).to_contain_text("ConnectionError")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("status")).to_contain_text("retried the job")
    expect(page.locator(".waterfall")).to_contain_text("run 2, attempt 1 of 1")


def test_a_failed_job_is_found_and_retried_by_keys_alone(  # case W3
    visit: Callable[..., Visit], place: Place
) -> None:
    page = visit().go("/")
    page.keyboard.press("/")
    page.keyboard.type("state:failed queue:mail")
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs?q=*")
    page.wait_for_load_state("load")
    page.keyboard.press("p")  # so that no news moves the list
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.locator("[data-selected-count]")).to_have_text("1")
    page.keyboard.press("r")
    expect(page.get_by_role("status")).to_contain_text("retried 1 job")


def test_the_log_of_a_running_job_comes_by_itself(
    visit: Callable[..., Visit], place: Place
) -> None:
    job = place.enqueue("wait", "tail")
    eventually(lambda: job.state == "running")
    page = visit().go(f"/jobs/{job.id}")
    expect(page.locator(".log")).to_contain_text("waits for tail")
    (place.path / "tail").touch()
    expect(page.locator(".log")).to_contain_text("has seen tail")
    expect(page.locator("h1")).to_contain_text("succeeded")


def test_all_failed_jobs_are_retried_a_few_first(visit: Callable[..., Visit], place: Place) -> None:
    (place.path / "mended").touch()
    page = visit().go("/failed")
    page.get_by_role("link", name="Retry 5, then all").click()
    page.get_by_role("button", name="Retry 1").click()
    expect(page.locator("h1")).to_contain_text("done")
    eventually(lambda: not failed(place))


def test_a_selected_job_stays_selected_when_news_come(
    visit: Callable[..., Visit], place: Place
) -> None:
    page = visit().go("/jobs?q=queue:later")
    box = page.locator("tbody input[type=checkbox]").first
    box.check()
    place.mill.queue("later").put("news")
    expect(page.locator("tbody tr")).to_have_count(5)
    chosen = page.locator("tbody input[type=checkbox]:checked")
    expect(chosen).to_have_count(1)
    assert chosen.get_attribute("value") != page.locator("tbody input").first.get_attribute("value")


@pytest.mark.parametrize(
    "path",
    [
        *("/jobs", "/jobs?q=state:failed", "JOB", "EDIT", "/failed", "/tasks", "TASK"),
        *("/schedules", "/schedules/nightly", "/flows", "FLOW", "/limits", "/bulk"),
        "/bulk/new?act=delete&q=queue:mail",
    ],
)
def test_pages_of_jobs_fit_every_screen_and_axe_finds_nothing_serious(
    visit: Callable[..., Visit], place: Place, path: str
) -> None:
    job = next(iter(place.mill.jobs(queue="mail")))
    [whole] = [job.id for job in place.mill.jobs(state="waiting") if job.id.count(".") == 0]
    paths = {
        "JOB": f"/jobs/{job.id}",
        "EDIT": f"/jobs/{job.id}/edit",
        "TASK": f"/tasks/{place.task('send')}",
        "FLOW": f"/flows/{whole}",
    }
    check_screens(visit, paths.get(path, path))
