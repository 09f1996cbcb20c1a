"""The programs of the how-to pages do what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_docs import DOCS, blocks

from tidemill.testing import run_all

pytestmark = pytest.mark.everyday

HOW_TO = DOCS / "how-to"
LINKS = {"/": ("/a", "/b", "/a#part"), "/a": ("/", "/b"), "/b": ("/a", "/gone")}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run the first Python blocks of a page as one module; the names that they define."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_URL", "memory://")
    names: dict[str, Any] = {"__name__": "shop"}

    def run(page: str, count: int = 1) -> dict[str, Any]:
        for block in blocks(HOW_TO / page, "python")[:count]:
            exec(compile(block, page, "exec"), names)
        return names

    yield run
    names["mill"].close()


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    """A web site: its address, and the paths that were asked for."""
    asked = list[str]()

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path in LINKS else 404)
            self.end_headers()
            links = LINKS.get(self.path, ())
            self.wfile.write("".join(f'<a href="{link}">' for link in links).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


Python = Callable[..., str]


@pytest.fixture
def files_of(tmp_path: Path) -> Callable[[Path], Python]:
    """Write the files of a page; returns a function that runs Python beside them."""

    def python(*arguments: str) -> str:
        environment = {**os.environ, "TIDEMILL_URL": "memory://", "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    def write(page: Path) -> Python:
        for block in blocks(page, "python"):
            name = re.match(r"# (\S+\.py)\n", block)
            assert name is not None, block
            file = tmp_path / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.parent != tmp_path:
                (file.parent / "__init__.py").touch()
            file.write_text(block)
        return python

    return write


def test_the_files_of_an_app_factory_work(files_of: Callable[[Path], Python]) -> None:
    python = files_of(HOW_TO / "app-factory.md")
    # when the test of the page runs, then it passes
    assert "1 passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_greet.py")
    # and the worker's module opens the context of the app for each job
    script = """
        import os
        os.environ["FLASK_TIDEMILL_URL"] = "memory://"
        from shop.worker import mill
        from shop.jobs import greet
        from tidemill.testing import run_all
        job = greet.enqueue("bob")
        run_all(mill)
        print(mill.url, job.result())
    """
    assert python("-c", textwrap.dedent(script)) == "memory:// shop greets bob\n"


def test_a_worker_of_the_larger_layout_knows_the_tasks_on_the_page(
    files_of: Callable[[Path], Python],
) -> None:
    page = HOW_TO / "layout.md"
    python = files_of(page)
    # when a worker loads its module, then it has the tasks of the banner
    known = python("-c", "from shop.worker import mill; print(*sorted(mill.tasks), sep=', ')")
    assert f"tasks   {known.strip()}\n" in page.read_text()
    # and the test of the page passes
    assert "1 passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mail.py")


def test_the_crawler_visits_each_page_once(
    program: Callable[..., Any], site: tuple[str, list[str]]
) -> None:
    address, asked = site
    names = program("crawler.md")
    mill, fetch = names["mill"], names["fetch"]

    fetch.enqueue(address + "/")
    mill.limits.set(fetch.name, rate="1000/s")
    run_all(mill)

    assert sorted(asked) == ["/", "/a", "/b", "/gone"]
    assert [job.error for job in mill.jobs(state="failed")] == ["Fail: HTTP Error 404: Not Found"]
    # the crawled pages hold their keys, and the failed page is put again
    assert fetch.enqueue(address + "/a").placed == "kept"
    assert fetch.enqueue(address + "/gone").placed == "created"


def test_an_order_closes_unless_it_is_paid(program: Callable[..., Any]) -> None:
    names = program("unpaid-orders.md", 2)
    mill, place, pay = names["mill"], names["place"], names["pay"]

    place(17)
    place(18)
    run_all(mill)
    assert pay(17)
    run_all(mill, scheduled=True)

    assert mill.job("close-17").state == "cancelled"
    assert mill.job("close-18").result() == "closed"
    assert not pay(18)
    # a customer who gets more time has one job
    names["wait"](19, 1800)
    names["wait"](19, 1800)
    assert len(list(mill.jobs(key="close-19", state="scheduled"))) == 1
    names["stop_waiting"](19)
    assert not list(mill.jobs(state="scheduled"))


def test_the_first_error_fails_and_a_retry_with_new_code_succeeds(
    program: Callable[..., Any],
) -> None:
    names = program("first-error.md")
    mill, price = names["mill"], names["price"]

    job = price.enqueue("pot", 3)
    run_all(mill, scheduled=True)
    assert (job.state, job.error, len(job.attempts)) == ("failed", "KeyError: 'pot'", 3)

    names["PRICES"]["pot"] = 30
    assert job.retry()
    run_all(mill)

    assert job.result() == 90
    with pytest.raises(TypeError, match="count"):
        price.enqueue("tea")
