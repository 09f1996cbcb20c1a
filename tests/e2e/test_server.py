"""``tidemill server`` as a real process: what comes in, what goes out, how it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from servers.http import JobServer

from tidemill import Tidemill


@pytest.fixture
def server() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()


@pytest.mark.everyday
def test_a_message_put_over_http_is_in_the_store(server: JobServer) -> None:
    # when a message is put
    answer = server.post("/v1/jobs", {"queue": "orders", "body": {"order": 17}})
    # then the answer names it, and the store has it after the server has ended
    assert (answer.status, answer.json["placed"]) == (201, "created")
    assert server.end() == 0
    with Tidemill(server.where) as mill:
        message = mill.queue("orders").get(timeout=0)
        assert (message.id, message.body) == (answer.json["id"], {"order": 17})


@pytest.mark.everyday
def test_the_server_reports_that_it_serves(server: JobServer) -> None:
    assert server.get("/health").json == {"status": "ok"}
    assert server.get("/ready").json == {"status": "ready"}
    assert server.get("/").headers["content-type"].startswith("text/html")
    assert server.get("/v1/openapi.json").json["openapi"] == "3.1.0"


@pytest.mark.parametrize(
    ("driver", "url"), [("psycopg", "postgresql://localhost/x"), ("redis", "redis://localhost")]
)
@pytest.mark.parametrize("verb", [("server", "--port", "0"), ("info", "--url")])
def test_a_missing_driver_is_a_wrong_usage(driver: str, url: str, verb: tuple[str, ...]) -> None:
    hidden = f"import sys; sys.modules[{driver!r}] = None; from tidemill.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hidden, *verb, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"tidemill: {url.partition('/')[0]}// needs {driver}; install it: pip")
