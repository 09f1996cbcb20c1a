"""An app for the tests of messages, on every broker that needs no server, or none but ours.

And a browser for the tests of the dashboard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cli_store import Desk
from harness import Place
from servers import forget_served, served
from servers.http import JobServer

from tidemill import Tidemill

if TYPE_CHECKING:
    from browser import Visit
    from playwright.sync_api import Browser


@pytest.fixture(params=["memory", "lmdb", "http"])
def mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tidemill]:
    url = "memory://" if request.param == "memory" else f"lmdb://{tmp_path}/store"
    with Tidemill(served(url) if request.param == "http" else url) as mill:
        yield mill
    forget_served(tmp_path)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Closes at the end what the test enters."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A store for the command line, and an app of it."""
    desk = Desk(tmp_path)
    yield desk
    desk.close()


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    """A job server for all tests of a module."""
    server = JobServer("--quiet")
    yield server
    server.close()


@pytest.fixture
def start() -> Iterator[Callable[..., JobServer]]:
    """Start job servers for one test."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, **more: Any) -> JobServer:
            server = JobServer(*options, **more)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from browser import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def dashboard_url(place: Place) -> Iterator[str]:
    """The dashboard of the store of a module's ``place``."""
    server = JobServer("--quiet", where=place.url)
    yield server.url
    server.close()


@pytest.fixture
def visit(browser: Browser, dashboard_url: str) -> Iterator[Callable[..., Visit]]:
    """Open a visit; at the end no page of it has done anything that it must not."""
    from browser import open_visits

    with open_visits(browser, dashboard_url) as visit:
        yield visit
