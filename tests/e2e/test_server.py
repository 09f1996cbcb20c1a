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
        assert message is not None
        assert (message.id, message.body) == (answer.json["id"], {"order": 17})


@pytest.mark.everyday
def test_the_server_reports_that_it_serves(server: JobServer) -> None:
    assert server.get("/health").json == {"status": "ok"}
    assert server.get("/ready").json == {"status": "ready"}
    assert server.get("/").headers["content-type"].startswith("text/html")
    assert server.get("/v1/openapi.json").json["openapi"] == "3.1.0"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
def test_another_name_is_not_answered(server: JobServer, host: str) -> None:
    answer = server.get("/v1/queues", headers={"Host": host})
    assert (answer.status, answer.json["type"]) == (403, "urn:tidemill:problem:forbidden")


def test_a_page_of_another_site_changes_nothing(server: JobServer) -> None:
    job = {"queue": "a", "body": 1}
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert server.post("/v1/jobs", job, headers=headers).status == 403
    assert server.post("/v1/jobs", job, headers={"Origin": server.url}).status == 201


def test_a_wrong_request_is_refused_in_one_sentence(server: JobServer) -> None:
    for body, detail in [
        ({"body": 1, "delay": "x"}, "delay: expected number or null, got text"),
        ({"body": 1, "dela": 1}, "unknown field dela; did you mean 'delay'?"),
        ({"body": 1, "timeout": 3}, "timeout and result_ttl belong to a task; a message has a ttr"),
        (
            {"body": 1, "limit": "x"},
            'limit must be jobs per time, as "10/s", "100/m", "5000/h", "1/d" or "10/30s", '
            "not 'x'",
        ),
        ({"queue": "a"}, "body or task is required: body for a message, task for a call"),
        ({"body": 1, "queue": "a\tb"}, "queue 'a\\tb' contains a control or invisible character"),
    ]:
        answer = server.post("/v1/jobs", body)
        assert (answer.status, answer.json["detail"]) == (400, detail)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/queues/a/messages"])
def test_a_body_that_is_no_text_is_refused(server: JobServer, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.post(path, b'{"queue": "\xff", "body": 1}', headers=headers)
    assert (answer.status, answer.json["type"]) == (400, "urn:tidemill:problem:invalid-request")
    assert "UTF-8" in answer.json["detail"]


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
