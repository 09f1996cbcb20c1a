"""Case W1, over every call that the server describes: a look changes nothing."""

from __future__ import annotations

import contextlib
import http.client
import re
import urllib.parse
from collections.abc import Iterator
from typing import NamedTuple

import lmdb
import pytest
from servers.http import JobServer

pytestmark = pytest.mark.everyday


class Call(NamedTuple):
    """One call: the parameters in its path name existing things, and a stream has no end."""

    method: str
    path: str
    query: tuple[str, ...] = ()
    streams: bool = False


def described(server: JobServer) -> list[Call]:
    """Every call of the description."""
    paths = server.get("/v1/openapi.json").json["paths"]
    calls = []
    for path, operations in paths.items():
        for method, operation in operations.items():
            query = tuple(p["name"] for p in operation["parameters"] if p["in"] == "query")
            answers = operation["responses"].values()
            streams = any("text/event-stream" in answer.get("content", ()) for answer in answers)
            calls.append(Call(method.upper(), path, query, streams))
    return calls


def filled(path: str, names: dict[str, str]) -> str:
    """A path with names for its braces."""
    for part, name in names.items():
        path = path.replace(f"{{{part}}}", urllib.parse.quote(name, safe=""))
    assert "{" not in path, "what is it called?"
    return path


def ask(server: JobServer, call: Call, path: str) -> int:
    """The status of an answer; a stream is closed after its head."""
    if not (call.streams and call.method == "GET"):
        return server.request(call.method, path).status
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


REPLIES = b"tidemill-said"
ORDER = b"tidemill-=order"
BY_TIME = re.compile(rb"tidemill-=clock|tidemill-=h/.{4}queue\0.*", re.DOTALL)
"""Rows that a server writes as time passes: the clock, and snapshots of queues."""


def kept(server: JobServer) -> dict[bytes, dict[bytes, bytes]]:
    """All that the store has, byte by byte, except for rows that time changes.

    Of the table of replies only the owners' signs of life are left out, whose keys begin with o;
    of the mark of the order of acceptance only its last field, an id of 11 bytes made of the time.
    """
    found: dict[bytes, dict[bytes, bytes]] = {}
    with lmdb.open(str(server.path / "store"), readonly=True, max_dbs=100) as env:
        with env.begin() as txn:
            everything = dict(txn.cursor())
        found[b""] = {k: v for k, v in everything.items() if not BY_TIME.fullmatch(k)}
        found[b""][ORDER] = found[b""][ORDER][:-11]
        for name in everything:
            with contextlib.suppress(lmdb.Error):
                table = env.open_db(name, create=False)
                found[b""].pop(name, None)  # the number of its first page, which any write changes
                with env.begin(db=table) as txn:
                    found[name] = dict(txn.cursor())
    replies = found[REPLIES]
    found[REPLIES] = {k: v for k, v in replies.items() if not k.startswith(b"o")}
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    """A server of a store with jobs in each state, a schedule and limits."""
    server = JobServer("--quiet", "--longest-poll", "0.05")
    fill(server)
    yield server
    server.close()


NAMES: dict[str, str] = {
    "job_id": "ready",
    "queue": "a",
    "name": "s",
    "receipt": "",
    "topic": "orders.new",
    "pattern": "orders.*",
}


def fill(server: JobServer) -> None:
    """Put a job into each state, and make the things that calls name."""
    for job in (
        {"id": "held"},
        {"id": "ready", "priority": -1, "key": "k", "tags": ["t"], "limit": None},
        {"id": "later", "delay": 3600},
        {"id": "cancelled"},
        {"id": "buried", "queue": "b"},
        {"id": "old", "expires": 3600},
        {"id": "call", "task": "math.sqrt", "args": [2], "body": None},
    ):
        given = {"queue": "a", "body": {"n": 1}, "ttr": 3600} | job
        if given["body"] is None:
            given["ttr"] = None  # a task has none
        for name in [name for name, value in given.items() if value is None]:
            del given[name]
        assert server.post("/v1/jobs", given).status == 201, given
    assert server.post("/v1/jobs/cancelled/cancel").status == 204
    for queue, act in (("b", "bury"), ("a", "touch")):
        (job,) = server.reserve(queue)
        assert server.post(f"/v1/reservations/{job['receipt']}/{act}", {}).status == 204
        NAMES["receipt"] = job["receipt"]
    schedule = {"task": "math.sqrt", "args": [2], "queue": "a", "every": 3600}
    assert server.put("/v1/schedules/s", schedule).status == 201
    assert server.request("PATCH", "/v1/queues/a", {"max_size": 1000}).status == 200
    assert server.request("PATCH", "/v1/queues/b/limit", {"rate": "5/s"}).status == 200


def test_inspection_changes_nothing(server: JobServer) -> None:  # case W1
    before = kept(server)
    for call in described(server):
        if call.method != "GET":
            continue
        for path in odd_paths(call):
            assert ask(server, call, path) < 500, path
        override = {"X-HTTP-Method-Override": "DELETE", "X-HTTP-Method": "DELETE"}
        path = filled(call.path, NAMES)
        assert head(server, path) in (200, 202)
        assert server.request("OPTIONS", path).status == 405
        if not call.streams:
            assert server.get(path, headers=override).status in (200, 202)
            assert server.request("GET", path, {"ids": ["ready"]}).status in (200, 202)
    assert kept(server) == before


def head(server: JobServer, path: str) -> int:
    """The status of a HEAD, which frees its connection even if a GET there is a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        statuses = []
        for asked in (path, "/health"):
            connection.request("HEAD", asked)
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        return statuses[0]
    finally:
        connection.close()


ODD = ("", "-1", "1e400", "nan", "true", "[]", "%00", "%FF", "x" * 300, "';--")


def odd_paths(call: Call) -> Iterator[str]:
    """A path with valid and invalid values in its parameters."""
    path = filled(call.path, NAMES)
    yield path
    for name in (*call.query, "nix", "_method", "wait"):
        for value in ODD:
            yield f"{path}?{name}={value}"
        yield f"{path}?{name}=1&{name}=2"
    for value in ODD:
        odd = call.path
        for part in NAMES:
            odd = odd.replace(f"{{{part}}}", value.partition("'")[0] or "%2F")
        if odd != call.path:
            yield odd
