"""What a real server refuses: with the right status, in one form, with a sentence that helps."""

from __future__ import annotations

import gzip
import http.client
import socket
from typing import Any

import pytest
from servers.http import Answer, JobServer

PROBLEM = "urn:tidemill:problem:"


def refused(answer: Answer, status: int, kind: str) -> str:
    """The sentence of a problem, which has the form of all problems."""
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")
    document = answer.json
    assert (document["status"], document["type"]) == (status, PROBLEM + kind)
    assert document["request_id"] == answer.headers["x-request-id"]
    return str(document["detail"])


# -- too large ------------------------------------------------------------------------------------


LARGE = "x" * (1 << 20)  # with the quotes it is too long


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/jobs", {"body": LARGE}),
        ("POST", "/v1/jobs", {"task": "math.sqrt", "queue": "q", "args": [LARGE]}),
        ("PUT", "/v1/jobs/large", {"body": LARGE}),
        ("PUT", "/v1/jobs/large", {"body": 1, "headers": {"trace": LARGE}}),
        ("POST", "/v1/jobs/batch", {"jobs": [{"queue": "a", "body": 1}, {"body": LARGE}]}),
        ("POST", "/v1/queues/large/messages", LARGE.encode() + b"!"),
        (
            "PUT",
            "/v1/schedules/large",
            {"task": "math.sqrt", "queue": "q", "args": [LARGE], "every": 60},
        ),
    ],
)
def test_a_job_that_is_too_large_is_413(
    server: JobServer, method: str, path: str, body: Any
) -> None:
    detail = refused(server.request(method, path, body), 413, "too-large")
    assert "1,048,576 bytes together; store large data elsewhere" in detail
    assert detail.startswith("jobs[1]: ") == path.endswith("batch")


# -- invalid ------------------------------------------------------------------------------------

STATES = "cancelled, expired, failed, ready, running, scheduled, succeeded or waiting"
CONFLICTS = "keep, merge, reject or replace"


@pytest.mark.parametrize(
    ("method", "path", "body", "detail"),
    [
        ("GET", "/v1/jobs?state=done", None, f"state[0]: expected {STATES}, got 'done'"),
        ("GET", "/v1/jobs?stat=failed", None, "unknown field stat; did you mean 'state'?"),
        (
            *("POST", "/v1/queues/a/messages?on_conflict=x", b"1"),
            f"on_conflict: expected {CONFLICTS}, got 'x'",
        ),
        ("POST", "/v1/jobs", {"delay": "x"}, "delay: expected number or null, got text"),
        (
            *("POST", "/v1/jobs", {"body": 1, "timeout": 3}),
            "timeout and result_ttl belong to a task; a message has a ttr",
        ),
        (
            *("POST", "/v1/jobs", {"body": 1, "limit": "x"}),
            'limit must be jobs per time, as "10/s", "100/m", "5000/h", "1/d" or "10/30s", '
            "not 'x'",
        ),
        (
            *("POST", "/v1/jobs", {"queue": "a"}),
            "body or task is required: body for a message, task for a call",
        ),
        (
            *("POST", "/v1/jobs", {"body": 1, "queue": "a\tb"}),
            "queue 'a\\tb' contains a control or invisible character",
        ),
        ("POST", "/v1/jobs", {"encoding": "x"}, "encoding: expected base64 or json, got 'x'"),
        (
            *("POST", "/v1/jobs/batch", {"jobs": [{"body": 1}, {"on_conflict": "x"}]}),
            f"jobs[1].on_conflict: expected {CONFLICTS}, got 'x'",
        ),
        (
            *("POST", "/v1/reserve", {"queues": ["a"], "order": 7}),
            "order: expected fair, merged or strict, got whole number",
        ),
        (
            *("PATCH", "/v1/queues/a/limit", {"breaker": {"failure": 3}}),
            "breaker: unknown field failure; did you mean 'failures'?",
        ),
    ],
)
def test_a_wrong_request_is_refused_in_one_sentence(
    server: JobServer, method: str, path: str, body: Any, detail: str
) -> None:
    assert refused(server.request(method, path, body), 400, "invalid-request") == detail


@pytest.mark.parametrize(
    ("method", "path", "body", "detail"),
    [
        ("POST", "/v1/queues/a/pause", {"for": 60}, "unknown field for in the body"),
        ("POST", "/v1/queues/a/purge", {"state": "ready"}, "unknown field state in the body"),
        ("POST", "/v1/schedules/a/pause", {"until": 1}, "unknown field until in the body"),
        ("DELETE", "/v1/jobs/a", {"force": True}, "unknown field force in the body"),
        ("POST", "/v1/queues/a/pause", b"for=60", "this call takes no body"),
        ("POST", "/v1/queues/a/pause?for=60", None, "unknown field for in the query"),
        ("GET", "/v1/queues?limit=3", None, "unknown field limit in the query"),
    ],
)
def test_a_field_in_a_call_without_fields_is_400(
    server: JobServer, method: str, path: str, body: Any, detail: str
) -> None:
    server.post("/v1/jobs", {"queue": "a", "body": 1})
    said = refused(server.request(method, path, body), 400, "invalid-request")
    assert said.partition(";")[0] == detail
    assert server.get("/v1/queues/a").json["paused"] is False


def test_an_empty_object_is_accepted_where_no_body_is_expected(server: JobServer) -> None:
    server.post("/v1/jobs", {"queue": "a", "body": 1})
    assert server.post("/v1/queues/a/resume", {}).status == 200


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/queues/a/messages"])
def test_a_body_that_is_no_text_is_refused(server: JobServer, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.post(path, b'{"queue": "\xff", "body": 1}', headers=headers)
    assert "UTF-8" in refused(answer, 400, "invalid-request")


def test_an_invalid_cursor_is_400(server: JobServer) -> None:
    server.post("/v1/jobs/batch", {"jobs": [{"queue": "a", "body": n} for n in range(2)]})
    detail = refused(server.get("/v1/jobs?cursor=nix"), 400, "invalid-request")
    assert detail.startswith("cursor 'nix' does not come from a list of jobs here")
    cursor = server.get("/v1/jobs?limit=1").json["cursor"]
    assert server.get(f"/v1/jobs?cursor={cursor}").json["jobs"]


# -- coded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/queues/a/messages", "/v1/broker/put"])
@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity"])
def test_a_compressed_body_is_refused(server: JobServer, path: str, coding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    answer = server.post(path, gzip.compress(b'{"body": 1}'), headers=headers)
    detail = refused(answer, 415, "unsupported-media-type")
    assert f"Content-Encoding {coding} is not supported; send the body uncompressed" in detail
    assert answer.headers["accept-encoding"] == "identity"


def test_the_coding_identity_is_accepted(server: JobServer) -> None:
    headers = {"Content-Encoding": "identity"}
    assert server.post("/v1/queues/a/messages", b"1", headers=headers).status == 201
    # and where there is no body, there is none that is coded
    assert server.get("/v1/queues", headers={"Content-Encoding": "gzip"}).status == 200


# -- no such method, no such path -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/jobs", "GET, HEAD, POST"),
        ("PROPFIND", "/v1/jobs", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/reserve", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("GET", "/v1/broker/put", "POST"),
    ],
)
def test_a_refused_method_lists_the_methods_of_the_path(
    server: JobServer, method: str, path: str, allow: str
) -> None:
    answer = server.request(method, path)
    assert allow in refused(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize("path", ["/nix", "/v1/nix", "/v1/queues/a/nix", "/v1/broker/a/b"])
def test_an_unknown_path_is_404(server: JobServer, path: str) -> None:
    for method in ("GET", "POST"):
        assert path in refused(server.request(method, path), 404, "not-found")


def raw(server: JobServer, data: bytes) -> Answer:
    """The answer to bytes that need not be a request."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(data)
        response = http.client.HTTPResponse(sock)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())


@pytest.mark.parametrize("method", ["FOO", "GETX", "get"])
def test_an_unknown_method_is_400(server: JobServer, method: str) -> None:
    answer = raw(server, f"{method} /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert (answer.status, answer.headers["connection"]) == (400, "close")


HEAD = "POST /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "head",
    [
        f"{HEAD}Content-Length: a\r\n",
        f"{HEAD}Content-Length: 1\r\nContent-Length: 2\r\n",
        f"{HEAD}Transfer-Encoding: x\r\n",
        f"{HEAD}Transfer-Encoding : chunked\r\n",
        f"{HEAD}Host: localhost\r\n",
    ],
)
def test_a_request_of_unclear_length_or_host_is_refused(server: JobServer, head: str) -> None:
    # case M12: a proxy in front may have read another request in the same bytes
    assert raw(server, f"{head}\r\nGET /v1/jobs HTTP/1.1\r\n".encode()).status in (400, 501)


def test_the_chunks_count_and_not_the_content_length(server: JobServer) -> None:  # case M12
    other = "1\r\nGET /v1/nix HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"{HEAD}Connection: close\r\nContent-Length: {len(other)}\r\n"
    whole = f"{head}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{other}"
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(whole.encode())
        said = b"".join(iter(lambda: sock.recv(4096), b""))
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"/v1/nix" not in said


def test_an_answer_that_has_begun_is_not_mixed_with_another(server: JobServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = sock.recv(65536)
        sock.sendall(b"nonsense\r\n\r\n")
        server.post("/v1/jobs", {"queue": "told", "body": 1})
        while b"told" not in said:  # the stream goes on; what came behind it waits for its end
            said += sock.recv(65536)
    assert said.startswith(b"HTTP/1.1 200")
    assert said.count(b"HTTP/1.1") == 1
