"""A walk through every page of the dashboard, on real servers, over jobs that workers ran."""

from __future__ import annotations

import html
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from dashboard_desk import counted, listed, numbers
from harness import Place, eventually, open_place
from servers import NETWORK, rabbitmq_url
from servers.http import JobServer

from tidemill import Limit, chain, group
from tidemill.brokers.contract.features import Feature
from tidemill.core.clock import new_id
from tidemill.dashboard import bulk
from tidemill.dashboard.bulk import Bulk
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.routes import Route, routes_at

APP = """
@mill.task(queue="mail", retries=0)
def send(number):
    if number % 10 == 0:
        raise ConnectionError(f"smtp.example.org refused letter {number}")
    note("sent", number)

@mill.task(queue="mail", retries=Retries(5, delay=3600))
def patient(number):
    raise TimeoutError(f"no answer to letter {number}")

@mill.task(queue="slow")
def wait(name):
    note("waits", name)
    while not os.path.exists(os.path.join(HERE, name)):
        time.sleep(0.02)

@mill.task(queue="nobody")
def later(number):
    return number
"""

BROKERS: dict[str, Callable[[str], str]] = {
    "redis": NETWORK["redis"],
    "postgresql": NETWORK["postgresql"],
    "rabbitmq": lambda name: f"{rabbitmq_url()}?prefix={name}",
}
MOST = 8
"""The most pages of one pattern that a walk opens: filters and windows combine without end."""


@pytest.fixture(params=BROKERS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A store in which a worker ran jobs, runs one, and takes from some queues only."""
    folder = tmp_path / "place"
    folder.mkdir()
    with open_place(folder, BROKERS[request.param](f"w{new_id()[-16:]}")) as place:
        place.write(APP)
        fill(place)
        yield place
        (place.path / "go").touch()


def fill(place: Place) -> None:
    """Put jobs of all kinds that the broker knows, and wait until all has happened."""
    mill, features = place.module.mill, place.mill.broker.features
    sent = place.enqueue_many("send", [(number,) for number in range(30)])
    place.worker("-Q", "mail,slow").wait_ready()
    place.enqueue("wait", "go")
    place.wait_notes("waits")
    place.wait_notes("sent", 27)
    eventually(lambda: len(list(place.mill.jobs(state="failed"))) == 3)
    if Feature.RESULTS in features:
        place.finish(sent)
    place.enqueue("patient", 7)
    place.enqueue_many("later", [(number,) for number in range(4)], delay=3600)
    place.enqueue_many("later", [(number,) for number in range(5)])
    mill.queue("inbox").put_many(["a", "b"])
    if Feature.LIMITS in features:
        place.enqueue("later", 1, limit=Limit("100/h", name="bank", key="7"))
    if Feature.FLOWS in features:
        later = place.module.later
        mill.enqueue(chain(group([later.call(n) for n in range(3)]), later))
    if Feature.SCHEDULES in features:
        mill.schedules.add("nightly", place.module.later.call(1), "0 3 * * *")
    if Feature.CANCEL in features:
        place.enqueue("later", 9).cancel()
    if Feature.PAUSE in features:
        mill.queue("inbox").pause()
    if Feature.INSPECT in features:
        eventually(lambda: len(list(place.mill.jobs(state="scheduled", queue="mail"))) == 1)
    if Feature.HISTORY in features:
        one = Bulk(id=new_id(), action="cancel", query="queue:nothing", who="anna")
        bulk.start(place.mill, one)
        eventually(lambda: bulk.get(place.mill, one.id).state == "done")


class Walker:
    """A visitor who follows the links of the dashboard. ``pages`` has the texts by path."""

    def __init__(self, server: JobServer, routes: list[Route]) -> None:
        self._server = server
        self._routes = routes
        self.pages: dict[str, str] = {}
        self.walked: Counter[str] = Counter()  # pages by their pattern

    def get(self, path: str) -> str:
        answer = self._server.get(path, headers={"Accept": "text/html"})
        if answer.status == 303:
            return self.get(answer.headers["location"])
        text = answer.data.decode()
        assert answer.status == 200, (path, answer.status, re.sub("<[^>]*>", " ", text)[-600:])
        return text

    def walk(self, first: str) -> None:
        ahead = deque([first])
        while ahead:
            path = ahead.popleft()
            pattern = self.pattern(path)
            if path in self.pages or self.walked[pattern] >= MOST:
                continue
            self.walked[pattern] += 1
            self.pages[path] = self.get(path)
            links = re.findall(r'href="(/[^"#]*)"', self.pages[path].partition("<body")[2])
            ahead += [html.unescape(link) for link in links if not link.startswith("/static/")]

    def pattern(self, path: str) -> str:
        """The pattern of a page."""
        return routes_at(self._routes, unquote(path.partition("?")[0]))["GET"][0].path


def test_every_page_opens_and_its_numbers_are_those_of_its_lists(place: Place) -> None:
    features = place.mill.broker.features
    server = JobServer("--quiet", where=place.url)
    try:
        routes = [
            route
            for route in Dashboard(place.mill).routes
            if route.method == "GET" and not route.path.startswith(("/live", "/static/"))
        ]
        walker = Walker(server, routes)
        walker.walk("/")
        told = [(path, *each) for path, text in walker.pages.items() for each in numbers(text)]
        if Feature.INSPECT in features:
            check_numbers(walker, told)
        else:
            assert all("state%3Afailed" in link for _, link, _ in told)
        assert "Traceback" not in server.output
    finally:
        server.close()
    assert {route.path for route in routes} - walker.walked.keys() == unwalked(place)


def check_numbers(walker: Walker, told: list[tuple[str, str, int]]) -> None:
    """Each number on a page is the number of jobs in the list that it links to."""
    found = {link: (listed(walker.get, link), counted(walker.get(link))) for _, link, _ in told}
    for path, link, number in told:
        assert found[link] == (number, number), (path, link)
    assert sum(number > 0 for number, _ in found.values()) > 10


def unwalked(place: Place) -> set[str]:
    """The pages that have nothing to show on this broker."""
    features = place.mill.broker.features
    of = {
        Feature.INSPECT: {f"/jobs/{{job_id}}{more}" for more in ("", "/file", "/edit", "/alter")},
        Feature.HISTORY: {"/bulk/{bulk_id}"},
        Feature.FLOWS: {"/flows/{flow_id}"},
        Feature.LIMITS: {"/limits/edit"},
        Feature.SCHEDULES: {"/schedules/{name}"},
    }
    lacking = {path for feature, paths in of.items() if feature not in features for path in paths}
    return lacking | (set() if {Feature.INSPECT, Feature.HISTORY} & features else {"/tasks/{task}"})
