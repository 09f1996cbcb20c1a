"""Messages that a consumer without keys cannot open: another app's consumer can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import eventually
from port_here import port_of
from servers.beanstalk import Tongue
from servers.http import JobServer

from tidemill import State, Tidemill

KEYS = ["k" * 32]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a pickled message, and one behind it that is not."""
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url, secret_keys=KEYS, serializer="pickle") as mill:
        mill.queue("q").put({1, 2}, id="pickled", priority=1)
    with Tidemill(url) as mill:
        mill.queue("q").put("plain", id="plain")
    return url


def check_comes_again(url: str) -> None:
    with Tidemill(url, secret_keys=KEYS, serializer="pickle") as mill:
        record = mill.broker.get("pickled")
        assert (record.state, record.attempt, record.error) == (State.SCHEDULED, 0, "")
        assert mill.job("pickled").retry()  # before its time
        message = mill.queue("q").get(10)
        assert message.body == {1, 2}


def test_a_consumer_without_keys_releases_what_it_cannot_open(url: str) -> None:
    with Tidemill(url) as mill:
        message = mill.queue("q").get(10)
        assert message.id == "plain"
        assert mill.queue("q").get(timeout=0) is None
    check_comes_again(url)


def test_a_server_without_keys_releases_what_it_cannot_open(url: str) -> None:
    server = JobServer("--quiet", where=url)
    try:
        got = [job["id"] for _ in range(2) for job in reserve(server)]
        assert got == ["plain"]
        assert "give the app its secret_keys" in server.output
    finally:
        server.close()
    check_comes_again(url)


def reserve(server: JobServer) -> list[dict[str, object]]:
    return list(server.post("/v1/reserve", {"queues": ["q"], "timeout": 0}).json["jobs"])


def test_a_beanstalk_port_without_keys_releases_what_it_cannot_open(url: str) -> None:
    with Tidemill(url) as mill, port_of(mill) as port:
        client = Tongue(port.number)
        client.ask(b"watch q\r\n")
        assert client.ask(b"reserve-with-timeout 10\r\n").endswith(b"plain")
        assert client.ask(b"reserve-with-timeout 0\r\n") == b"TIMED_OUT"
        client.close()
    check_comes_again(url)


def test_a_pickled_call_that_a_worker_over_http_reserves_comes_again(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url, secret_keys=KEYS, serializer="pickle", allow_imports=["js.*"]) as mill:
        pickled = mill.enqueue(mill.call("js.work", 1).using(queue="q"))
    server = JobServer("--quiet", where=url)
    try:
        wish = {"tasks": ["js.work"], "queues": ["q"]}
        assert server.post("/v1/tasks/reserve", wish).json == {"jobs": []}
        eventually(lambda: "give the app its secret_keys" in server.output)

        def given_back() -> Any:  # in the exchange after the one that led to the log line
            shown = server.get(f"/v1/jobs/{pickled.id}").json
            return shown if shown["state"] != "running" else None

        shown = eventually(given_back)
        assert (shown["state"], shown["attempt"], shown["error"]) == ("scheduled", 0, None)
    finally:
        server.close()
